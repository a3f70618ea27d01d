import assert from "node:assert/strict";
import { test } from "node:test";

import { ranksOf, split } from "../../allranks/features/toolbar/labextension/static/chooser.js";

const display = (text, whose, more = {}) =>
  ({ output_type: "display_data", data: { "text/plain": text, ...more }, metadata: whose ? { allranks: whose } : {} });
const stream = (text) => ({ output_type: "stream", name: "stdout", text });

test("each rank gets its lines, whatever they look like", () => {
  const found = split([
    stream("allranks started ranks 0–2\n"),
    display("ranks 0, 2 │ rank 1 │ both\n           │\nrank 1     ! own", { lines: [[[[0, 0], [2, 2]], 2], [[[1, 1]], 1]], indent: 13 }),
    { output_type: "error", ename: "E", evalue: "", traceback: [] },
  ]);
  assert.deepEqual([...found.byRank], [[0, [stream("rank 1 │ both\n\n")]], [1, [stream("own\n")]], [2, [stream("rank 1 │ both\n\n")]]]);
  assert.equal(found.first, 1);
  assert.deepEqual(found.above, [stream("allranks started ranks 0–2\n")]);
  assert.deepEqual(found.below.map(({ output_type }) => output_type), ["error"]);
});

test("a figure belongs to its ranks, and the line with their names to none", () => {
  const figure = display("<Figure>", { ranks: [[1, 2]] }, { "image/png": "…" });
  const found = split([display("rank 0 │ none", { lines: [[[[0, 0]], 1]], indent: 9 }), display("ranks 1–2:", { ranks: [[1, 2]], title: true }), figure]);
  assert.deepEqual(found.byRank.get(2), [figure]);
  assert.deepEqual([found.above, found.below], [[], []]);
});

test("what only looks like output of ranks is no output of ranks", () => {
  assert.equal(split([stream("ranks 0–3 │ printed by somebody\n"), display("rank 1:")]), null);
  assert.equal(split([display("rank 0 │ alone", { lines: [[[[0, 0]], 1]], indent: 9 })]), null);
});

test("an output names no more ranks than a cluster can have", () => {
  const spans = [[[0, 2], [5, 5]], [[0, 99_999_999_999]], [[0, 16_000], [0, 16_000]], [[7, 3]], [["a", "b"]]];
  assert.deepEqual(spans.map(ranksOf), [[0, 1, 2, 5], [], [], [], []]);
});
