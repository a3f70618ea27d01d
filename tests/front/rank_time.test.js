import assert from "node:assert/strict";
import { test } from "node:test";

import { RankTime, takeStrips } from "../../allranks/widgets/front/rank_time.js";

const TIMES = { width: 1, seconds: 2.5, steps: [0, 0.5, 4, 2.5], waits: [], importing: [], shares: [[0, 0, 0], [255, 51, 0], [0, 0, 0]], whom: [1, 2, -1] };

test("the kinds of each bin sum up to its time; before the first step it is the start-up", () => {
  const time = new RankTime(0, TIMES);
  assert.deepEqual(time.bins.map((bin) => bin.reduce((a, b) => a + b, 0)), [1, 1, 0.5]);
  assert.deepEqual(time.bins[0], [0, 0, 0, 1, 0]);
  const { sums, whom } = time.between(0, 2);
  assert.deepEqual(sums.map((value) => Number(value.toFixed(6))), [0, 0, 0.8, 1.2, 0]);
  assert.deepEqual([...whom].map(([rank, value]) => [rank, Number(value.toFixed(6))]), [[1, 1], [2, 0.2]]);
  assert.equal(time.step?.count, 4);
});

/** The bins of one rank as the kernel sends them. */
function message(first, shares, whom, width = 1) {
  const count = whom.length, bytes = new DataView(new ArrayBuffer(5 * count));
  shares.flat().forEach((value, at) => bytes.setUint8(at, value));
  whom.forEach((rank, at) => bytes.setInt16(3 * count + 2 * at, rank, true));
  const bins = btoa(String.fromCharCode(...new Uint8Array(bytes.buffer)));
  return { rows: [[0, first, count, width, first + count, [], [], []]], bins };
}

test("changed bins replace those from the same place on", () => {
  const found = new Map();
  takeStrips(found, message(0, [[0, 0], [255, 0], [0, 0]], [3, -1]));
  takeStrips(found, message(1, [[0, 0], [0, 255], [9, 0]], [-1, 300]));
  assert.deepEqual(found.get(0)?.whom, [3, -1, 300]);
  assert.deepEqual(found.get(0)?.shares, [[0, 0, 0], [255, 0, 255], [0, 9, 0]]);
  // Of bins of another width there is nothing that they could follow.
  takeStrips(found, message(3, [[0], [0], [0]], [7], 2));
  assert.equal(found.get(0)?.whom.length, 3);
});
