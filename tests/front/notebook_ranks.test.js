import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";

import * as inCells from "../../allranks/features/toolbar/labextension/static/cells.js";
import { makeNotebookRanks } from "../../allranks/features/toolbar/labextension/static/notebook_ranks.js";

// As in a tab of a browser.
const kept = new Map();
Object.defineProperty(globalThis, "sessionStorage", {
  value: {
    getItem: (key) => kept.get(key) ?? null,
    setItem: (key, value) => kept.set(key, value),
    removeItem: (key) => kept.delete(key),
  },
});
beforeEach(() => kept.clear());

const signal = () => ({ connect: () => {}, disconnect: () => {} });

class Signal {
  static clearData() {}
  connect() {}
  emit() {}
}

/** Returns the ranks of a notebook whose cells are in these states, what the kernel gets, and how often it is interrupted. */
const notebook = (...states) => notebookOf(states.map((executionState) => ({ executionState })));

const notebookOf = (cells, path = "a.ipynb") => {
  const sent = [], interrupts = [];
  const comm = { send: (data) => sent.push(data), dispose: () => {} };
  const kernel = { name: "python3", createComm: () => comm, interrupt: () => interrupts.push("kernel") };
  const sessionContext = {
    statusChanged: signal(), kernelChanged: signal(), iopubMessage: signal(), ready: new Promise(() => {}), session: { kernel },
  };
  const NotebookRanks = makeNotebookRanks({ Signal, ...inCells });
  const ranks = new NotebookRanks({ path, sessionContext, disposed: signal(), model: { cells } }, {}, () => true);
  ranks.connect(kernel);
  return { ranks, sent, interrupts };
};

test("what ranks do while the kernel is idle is interrupted on the ranks", async () => {
  const { ranks, sent, interrupts } = notebook("idle");
  ranks.take({ size: 2, is_busy: true });
  assert.equal(ranks.busyBeside, true);
  ranks.interrupt();
  assert.deepEqual([sent, interrupts], [[{ interrupt: true }], []]);
});

test("a cell that runs is interrupted by the kernel", () => {
  const { ranks, sent, interrupts } = notebook("idle", "running");
  ranks.take({ size: 2, is_busy: true });
  assert.equal(ranks.busyBeside, false);
  ranks.interrupt();
  assert.deepEqual([sent, interrupts], [[], ["kernel"]]);
});

test("variables are compared of idle ranks only", async () => {
  const { ranks, sent } = notebook();
  ranks.take({ size: 2, is_busy: true });
  await ranks.ask();
  ranks.take({ size: 2, is_busy: false });
  await ranks.ask();
  assert.deepEqual(sent, [{}, {}, { variables: true }]);
});

const NOT_FOUND = [{ output_type: "stream", text: "UsageError: Cell magic `%%distributed` not found.\n" }];
const NAME_ERROR = [{ output_type: "error", ename: "NameError", evalue: "name 'rank' is not defined" }];
const cell = (source, outputs = []) => ({ type: "code", sharedModel: { source }, outputs: { toJSON: () => outputs } });
const ranksOf = (...cells) => notebookOf(cells).ranks;

test("a cell that came before allranks was loaded has started no ranks", () => {
  const typed = "%%distributed -n 4\nrank";
  const failed = ranksOf(cell(typed, NOT_FOUND)), ran = ranksOf(cell(typed));
  for (const ranks of [failed, ran]) ranks.take({ size: 4, every_cell: true });
  assert.deepEqual([failed.isUnwritten, ran.isUnwritten], [true, false]);
});

test("the cell that is written starts the ranks that run or ran last, and switches on what was on", () => {
  const ranks = ranksOf();
  ranks.options = "-n 2";
  ranks.take({ size: 4, every_cell: true });
  assert.equal(ranks.startLines, "%load_ext allranks\n%distributed start -n 4\n%distributed on");
  ranks.forget();
  ranks.forget(); // a new kernel after a restart
  assert.equal(ranks.startLines, "%load_ext allranks\n%distributed start -n 4\n%distributed on");
  ranks.take({ size: 3, every_cell: false });
  assert.equal(ranks.startLines, "%load_ext allranks\n%distributed start -n 3");
});

test("a cell lacks the ranks that ended with their kernel until others run", () => {
  const ranks = ranksOf(cell("print(rank)"));
  const lacks = () => [NAME_ERROR, NOT_FOUND, []].map((outputs) => ranks.lacksRanks(outputs));
  assert.deepEqual(lacks(), [false, false, false]);
  ranks.take({ size: 4, every_cell: true });
  ranks.forget();
  assert.deepEqual(lacks(), [true, true, false]);
  ranks.take({ size: 0, starting: 4, every_cell: false });
  assert.deepEqual(lacks(), [false, false, false]);
  ranks.take({ size: 4, every_cell: true });
  ranks.take({ size: 0, every_cell: false }); // stopped by the user
  ranks.forget();
  assert.deepEqual(lacks(), [false, false, false]);
});

test("a page that is loaded again knows the ranks that ended with their kernel, until others run", () => {
  const lacks = (path) => notebookOf([cell("print(rank)")], path).ranks.lacksRanks(NAME_ERROR);
  const ranks = ranksOf();
  ranks.take({ size: 4, every_cell: true });
  ranks.forget();
  assert.deepEqual([lacks("a.ipynb"), lacks("b.ipynb")], [true, false]);
  assert.equal(ranksOf().startLines, "%load_ext allranks\n%distributed start -n 4\n%distributed on");
  ranksOf().take({ size: 2, every_cell: false });
  assert.equal(lacks("a.ipynb"), false);
});

test("ranks are shown where the browser stores nothing", () => {
  const { value } = Object.getOwnPropertyDescriptor(globalThis, "sessionStorage");
  const refuse = () => { throw new Error("SecurityError"); };
  const before = { ...value };
  Object.assign(value, { getItem: refuse, setItem: refuse, removeItem: refuse });
  try {
    const ranks = ranksOf();
    ranks.take({ size: 4, every_cell: true });
    ranks.forget();
    assert.equal(ranks.state, null);
    assert.equal(ranks.lost.size, 4);
    ranks.take({ size: 2, every_cell: true });
    assert.equal(ranks.lost, null);
  } finally {
    Object.assign(value, before);
  }
});

test("where not every cell ran on the ranks, a cell of the notebook may start them again", () => {
  const ranks = ranksOf(cell("%load_ext allranks"), cell("%%distributed -n 4"));
  ranks.take({ size: 4, every_cell: false });
  ranks.forget();
  assert.ok(!ranks.lacksRanks(NAME_ERROR));
  assert.ok(!ranks.lacksRanks(NOT_FOUND)); // %load_ext is enough
  ranks.context.model.cells.length = 1;
  assert.ok(ranks.lacksRanks(NOT_FOUND));
});

test("a cell that starts the lost ranks alone is found", () => {
  const two = cell("%load_ext allranks\n%distributed start -n 4"), three = cell(`${two.sharedModel.source}\n%distributed on`);
  const ranks = ranksOf(cell("1"), two, three);
  for (const [everyCell, expected] of [[false, two], [true, three]]) {
    ranks.take({ size: 4, every_cell: everyCell });
    ranks.forget();
    assert.equal(ranks.wholeStart, expected);
  }
});
