import assert from "node:assert/strict";
import { test } from "node:test";

import { Lines } from "../../allranks/widgets/front/lines.js";

const feed = (lines, rank, text, spans = [], skipped = 0) => lines.feed(rank, new TextEncoder().encode(text), spans, skipped);
const shown = (lines) => lines.rows.map((_, index) => lines.row(index));

test("equal lines of several ranks are one row, each as often as one rank wrote it", () => {
  const lines = new Lines();
  for (const rank of [0, 1, 2]) feed(lines, rank, "same\nsame\n");
  feed(lines, 2, "own\n");
  assert.deepEqual(shown(lines).map(({ ranks, text }) => [ranks, text]),
    [[[0, 1, 2], "same"], [[0, 1, 2], "same"], [[2], "own"]]);
  lines.look({ fold: false });
  assert.equal(lines.rows.length, 7);
});

test("a search finds a text in any case, and signs that mean something in patterns", () => {
  const lines = new Lines();
  feed(lines, 0, "a Needle (1)\nhay\n");
  feed(lines, 1, "needle [1]\n");
  lines.look({ query: "needle (1)" });
  assert.deepEqual(shown(lines).map(({ text }) => text), ["a Needle (1)"]);
  lines.look({ query: "", only: 1 });
  assert.deepEqual(shown(lines).map(({ text }) => text), ["needle [1]"]);
  assert.equal(lines.among, 1);
});

test("a warning that all ranks write is standard error once", () => {
  const lines = new Lines();
  for (const rank of [0, 1]) feed(lines, rank, "a warning\n", [[0, 10]]);
  assert.deepEqual(shown(lines), [{ ranks: [0, 1], text: "a warning", kind: 1 }]);
});

test("a line that comes in pieces is one line, as a terminal shows it", () => {
  const lines = new Lines(), bytes = new TextEncoder().encode("ä 10 %\rä \u001b[1m20\u001b[0m %\n");
  for (const byte of bytes) lines.feed(0, Uint8Array.of(byte), [], 0);
  assert.deepEqual(shown(lines).map(({ text }) => text), ["ä 20 %"]);
});

test("the oldest lines are forgotten, and what was skipped is said", () => {
  const lines = new Lines();
  feed(lines, 0, "late\n", [], 5_000_000);
  assert.deepEqual(shown(lines).map(({ text }) => text), ["… 5 MB are in the log file only", "late"]);
  feed(lines, 0, "x\n".repeat(600_001));
  assert.equal(lines.count + lines.forgotten, 600_003);
  assert.ok(lines.count <= 600_000);
});
