import assert from "node:assert/strict";
import { test } from "node:test";

import { parents, treePlaces } from "../../allranks/lessons/front/circle.js";

const frames = (ranks, messages) => [
  { values: Array(ranks).fill([]), messages: [] },
  { values: Array(ranks).fill([]), messages: messages.map(([sender, receiver, adds = true]) => ({ sender, receiver, adds })) },
];

test("a tree is found by the ways of its sums", () => {
  const up = parents(frames(4, [[1, 0], [2, 0], [3, 1], [0, 1, false], [0, 2, false], [1, 3, false]]));
  assert.deepEqual([...up], [[1, 0], [2, 0], [3, 1]]);
  // A ring, and ranks that exchange their arrays.
  assert.equal(parents(frames(3, [[0, 1], [1, 2], [2, 0]])), null);
  assert.equal(parents(frames(2, [[0, 1], [1, 0]])), null);
  assert.equal(parents(frames(4, [[0, 1], [1, 0], [0, 2], [1, 3]])), null);
});

test("the root is on top, and each rank above its children, which do not lie over each other", () => {
  const up = new Map(Array.from({ length: 15 }, (_, i) => [i + 1, Math.floor(i / 2)]));
  const places = treePlaces(up, 16, 27);
  for (const [child, parent] of up) assert.ok(places[parent][1] + 2 * 27 < places[child][1]);
  const below = places.filter(([, y]) => y === places[7][1]).map(([x]) => x).sort((a, b) => a - b);
  assert.equal(below.length, 8);
  assert.ok(below.every((x, i) => i === 0 || x - below[i - 1] > 2 * 27));
  assert.ok(places.every(([x, y]) => x > 27 && x < 640 - 27 && y > 27 && y < 540 - 27));
});
