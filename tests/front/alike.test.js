import assert from "node:assert/strict";
import { test } from "node:test";

import { alike, mean, rowName } from "../../allranks/widgets/front/alike.js";

const rows = (count, of) => [...Array(count).keys()].map((rank) => ({ rank, seconds: of(rank) }));
const groups = (found) => found.map((group) => group.map(({ rank }) => rank));

test("few rows stand alone, however alike they are", () => {
  assert.deepEqual(groups(alike(rows(3, () => 1), 16, ({ seconds }) => [seconds])), [[0], [1], [2]]);
});

test("of many ranks, those that hardly differ are one row", () => {
  const found = alike(rows(64, (rank) => (rank === 1 ? 0.1 : 2 + rank / 10_000)), 16, ({ seconds }) => [seconds]);
  assert.deepEqual(groups(found), [[0, ...Array.from({ length: 62 }, (_, at) => at + 2)], [1]]);
});

test("what is said of ranks keeps them apart", () => {
  const found = alike(rows(20, () => 1), 16, ({ seconds }) => [seconds], ({ rank }) => (rank < 4 ? "waits" : ""));
  assert.deepEqual(found.map((group) => group.length), [4, 16]);
});

test("where too many rows are left, larger differences count as none", () => {
  const found = alike(rows(64, (rank) => 1 + rank / 63), 16, ({ seconds }) => [seconds]);
  assert.ok(found.length <= 16);
  assert.equal(found.flat().length, 64);
  assert.equal(mean([1, 2, 6]), 3);
});

test("a row of several ranks says that it has their means", () => {
  assert.deepEqual([[3], [0, 2, 3, 4]].map(rowName), ["rank 3", "ranks 0, 2–4, mean"]);
});
