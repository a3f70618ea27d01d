import assert from "node:assert/strict";
import { test } from "node:test";

import { curvesAsCsv } from "../../allranks/widgets/front/csv.js";
import { Data } from "../../allranks/widgets/front/data.js";
import { groupsOf, parametersOf } from "../../allranks/widgets/front/groups.js";
import { RankTime } from "../../allranks/widgets/front/rank_time.js";

const STATE = { seq: 3, key: "k", mode: "auto", paths: {}, title: "", curves: [], points: null, ranks: [] };
const head = (number, rank, count, more = {}) => ({ number, name: "loss", rank, member: "", count, stride: 1, ...more });
const floats = (...values) => new DataView(Float64Array.from(values).buffer);

/** A widget's model, and what the page has sent through it. */
function modelOf() {
  const sent = [], heard = {};
  return { sent, on: (name, act) => { heard[name] = act; }, send: (message) => sent.push(message),
    tell: (message, ...buffers) => heard["msg:custom"](message, buffers), get: () => null };
}

/** The same in JupyterLab, and what is called when the status of its kernel changes. */
function modelWithKernel() {
  const acts = new Set();
  const statusChanged = { connect: (act) => acts.add(act), disconnect: (act) => acts.delete(act) };
  return { acts, model: { ...modelOf(), widget_manager: { kernel: { statusChanged } } } };
}

test("points of each message follow those before; the last one stands apart", () => {
  const model = modelOf(), data = new Data(STATE, model);
  assert.deepEqual(model.sent, [{ kind: "ready" }]);
  model.tell({ seq: 4, curves: [head(0, 1, 2)] }, floats(0, 5, 1, 4, 1, 4));
  model.tell({ seq: 5, curves: [head(0, 1, 1)] }, floats(2, 3, 2, 3));
  const [series] = data.series.values();
  assert.deepEqual([series.steps, series.values, series.last], [[0, 1, 2], [5, 4, 3], [2, 3]]);
});

test("a curve that comes anew replaces its points", () => {
  const model = modelOf(), data = new Data(STATE, model);
  model.tell({ seq: 4, curves: [head(0, 1, 1)] }, floats(0, 5, 0, 5));
  model.tell({ seq: 5, curves: [head(0, 1, 1, { anew: true, stride: 2 })] }, floats(0, 9, 0, 9));
  assert.deepEqual([...data.series.values()].map(({ values }) => values), [[9]]);
});

test("an old message changes nothing, and a gap in the numbers asks for everything", () => {
  const model = modelOf(), data = new Data({ ...STATE, said: "running" }, model);
  model.tell({ seq: 3, said: "old" });
  assert.equal(data.said, "running");
  data.greeted = 0;
  model.tell({ seq: 9, said: "new" });
  assert.ok(data.missed);
  assert.deepEqual(model.sent.map(({ kind }) => kind), ["ready", "ready"]);
  model.tell({ ...STATE, seq: 9, anew: true, said: "all" }, null);
  assert.ok(!data.missed && data.said === "all");
});

test("what a reader chooses is told to the kernel until the cell ends", () => {
  const model = modelOf(), data = new Data(STATE, model);
  data.select(2);
  assert.deepEqual(model.sent.at(-1), { kind: "settings", settings: data.settings });
  assert.equal(data.selected, 2);
  model.tell({ seq: 4, ended: true });
  data.select(2);
  assert.equal(data.selected, null);
  assert.equal(model.sent.length, 2);
});

test("a kernel that ends in a cell ends the panel, which shows no rank as running", () => {
  const { acts, model } = modelWithKernel();
  const tile = (rank, look) => ({ rank, state: "some", mark: "▶", look, doing: "some", cpu_percent: 7 });
  const data = new Data({ ...STATE, elapsed: 6, ranks: [tile(0, ""), tile(1, "bad"), tile(2, "")] }, model);
  acts.forEach((act) => act(null, "busy"));
  assert.ok(!data.ended);
  acts.forEach((act) => act(null, "restarting"));
  assert.deepEqual([...data.ranks.values()].map(({ doing }) => doing), ["last seen", "some", "last seen"]);
  assert.match(data.title, /^the notebook's kernel ended after 6/);
  assert.ok(data.ended);
});

test("a kernel does not keep the panel of a cell that has ended", () => {
  const { acts, model } = modelWithKernel();
  new Data(STATE, model);
  assert.equal(acts.size, 1);
  model.tell({ seq: 4, ended: true });
  assert.equal(acts.size, 0);
});

test("tiles give way to one line where every rank has finished, and stay where one says more", () => {
  const tile = (rank, look) => ({ rank, look, member: null });
  const data = (...looks) => new Data({ ...STATE, ranks: looks.map((look, rank) => tile(rank, look)), ended: true });
  assert.equal(data("well", "well").tilesShown, false);
  assert.equal(data("well", "bad").tilesShown, true);
  assert.equal(new Data({ ...STATE, ranks: [tile(0, "well")] }).tilesShown, true);
  // A click on a rank in the legend moves nothing.
  const chosen = data("well", "well");
  chosen.select(1);
  assert.equal(chosen.tilesShown, false);
  chosen.set({ tiles: true });
  assert.equal(chosen.tilesShown, true);
});

test("the line about the last rank keeps its place until the cell ends", () => {
  const model = modelOf(), data = new Data(STATE, model);
  const timings = (straggler) => ({ ranks: [], calls: [], straggler });
  model.tell({ seq: 4, timings: timings("") });
  assert.ok(!data.placeOfStraggler);
  model.tell({ seq: 5, timings: timings("rank 1 came last") });
  model.tell({ seq: 6, timings: timings("") });
  assert.ok(data.placeOfStraggler);
  model.tell({ seq: 7, ended: true });
  assert.ok(!data.placeOfStraggler);
});

test("the logs hold which lines are standard error", () => {
  const model = modelOf(), data = new Data(STATE, model);
  const text = new TextEncoder().encode("out\nerr\n");
  model.tell({ seq: 4, logs: [{ rank: 2, spans: [[4, 8]], skipped: 0 }] }, new DataView(text.buffer));
  const rows = [0, 1].map((index) => data.lines.row(index));
  assert.deepEqual(rows, [{ ranks: [2], text: "out", kind: 0 }, { ranks: [2], text: "err", kind: 1 }]);
});

test("curves as CSV are sorted, quoted and whole", () => {
  const model = modelOf(), data = new Data(STATE, model);
  model.tell({ seq: 4, curves: [head(0, 1, 1), { ...head(1, 0, 1), name: 'a "b", c' }] }, floats(0, 5, 7, 4, 0, 1, 0, 1));
  assert.equal(curvesAsCsv(data), 'name,rank,member,step,value\n"a ""b"", c",0,,0,1\nloss,1,,0,5\nloss,1,,7,4\n');
});

test("members are grouped by their values; many numbers by parts of equal count", () => {
  const members = [...Array(12).keys()].map((number) => ({ number, parameters: { lr: 10 ** -(number % 3), seed: number, kind: "a" } }));
  assert.deepEqual(parametersOf(members), ["lr", "seed"]);
  assert.deepEqual(groupsOf(members, "lr").labels, ["0.01", "0.1", "1"]);
  const { labels, counts, of } = groupsOf(members, "seed");
  assert.deepEqual(labels, ["0 to 2", "3 to 5", "6 to 8", "9 to 11"]);
  assert.deepEqual(counts, [3, 3, 3, 3]);
  assert.equal(of.get(7), 2);
});

test("the seconds of a cell are those of the ranks' clocks, where these are known", () => {
  const data = new Data({ ...STATE, elapsed: 30, ended: true });
  assert.equal(data.seconds, 30);
  data.strips.set(0, new RankTime(0, { width: 1, seconds: 2.5, steps: [], waits: [], importing: [], shares: [[], [], []], whom: [] }));
  assert.equal(data.seconds, 2.5);
});
