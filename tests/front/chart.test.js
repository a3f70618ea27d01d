import assert from "node:assert/strict";
import { test } from "node:test";

import { nearest, scales, smooth, spread, ticks } from "../../allranks/widgets/front/chart.js";

test("an axis has a few round numbers", () => {
  assert.deepEqual(ticks(0.13, 0.97, 4).map((value) => Number(value.toFixed(12))), [0.2, 0.4, 0.6, 0.8]);
  assert.deepEqual(ticks(0, 299, 3.5), [0, 100, 200]);
});

test("a smoothed curve does not start at 0, and leaves what is not finite as it is", () => {
  assert.deepEqual(smooth([4, 4, 4], 0.9), [4, 4, 4]);
  const [first, gap, last] = smooth([1, NaN, 3], 0.5);
  assert.equal(first, 1);
  assert.ok(Number.isNaN(gap));
  assert.ok(last > 2 && last < 3);
});

test("the mean of curves lies between their least and their greatest", () => {
  const lines = [{ xs: [0, 10], ys: [1, 5] }, { xs: [0, 10], ys: [3, NaN] }];
  assert.deepEqual(spread(lines), [{ x: 0, low: 1, mean: 2, high: 3 }, { x: 10, low: 5, mean: 5, high: 5 }]);
});

test("a log scale leaves out what is not positive", () => {
  const line = { xs: [0, 1, 2], ys: [0, 0.01, 1] };
  assert.equal(scales([{ xs: [0], ys: [0] }], [], 400, 200, true), null);
  const scale = scales([line], [], 400, 200, true);
  assert.ok(scale);
  assert.ok(scale.x0 === 1 && scale.x1 === 2);
  assert.ok(Math.abs((scale.y(0.01) + scale.y(1)) / 2 - scale.y(0.1)) < 1e-9);
  assert.ok(Math.abs(scale.step(scale.x(1.5)) - 1.5) < 1e-9);
});

test("the point that is named is the one nearest to the pointer, of several the last", () => {
  assert.equal(nearest([0, 10, 20], 12), 1);
  assert.equal(nearest([0, 10, 10], 12), 2);
});

test("the first digit of a long label is inside the chart", () => {
  const lefts = [1, 1_900_000].map((high) => scales([{ xs: [0, 9], ys: [high / 2, high] }], [], 400, 200, false)?.left ?? 0);
  assert.equal(lefts[0], 58);
  assert.ok(lefts[1] >= 6.6 * "1,000,000".length + 6);
});
