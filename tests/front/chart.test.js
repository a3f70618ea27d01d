import assert from "node:assert/strict";
import { test } from "node:test";

import { apart, nearest, scales, smooth, spread, ticks } from "../../allranks/widgets/front/chart.js";

const plot = (line, more = {}) => ({ name: "loss", xName: "step", log: { x: false, y: false }, range: null, bands: [], marks: [], named: false,
  lines: [{ label: "rank 0", rank: 0, index: 0, dash: 0, faint: false, strong: false, last: 0, ...line }], ...more });

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
  const log = { x: false, y: true };
  assert.equal(scales(plot({ xs: [0], ys: [0] }, { log }), 400, 200), null);
  const scale = scales(plot({ xs: [0, 1, 2], ys: [0, 0.01, 1] }, { log }), 400, 200);
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
  const lefts = [1, 1_900_000].map((high) => scales(plot({ xs: [0, 9], ys: [high / 2, high] }), 400, 200)?.left ?? 0);
  assert.equal(lefts[0], 58);
  assert.ok(lefts[1] >= 6.6 * "1,000,000".length + 6);
});

test("of a part of the steps only the values there make the scale", () => {
  const line = { xs: [0, 5, 10], ys: [100, 2, 1] };
  const scale = scales(plot(line, { range: [4, 10] }), 400, 200);
  assert.ok(scale && scale.y0 < 1 && scale.y1 > 2 && scale.y1 < 3);
  assert.deepEqual([scale.first, scale.last], [4, 10]);
  assert.ok(Math.abs(scale.step(scale.x(7)) - 7) < 1e-9);
});

test("steps on a log axis keep their ratios", () => {
  const scale = scales(plot({ xs: [0, 1, 10, 100], ys: [1, 2, 3, 4] }, { log: { x: true, y: false } }), 400, 200);
  assert.ok(scale);
  assert.ok(Math.abs(scale.x(10) - (scale.x(1) + scale.x(100)) / 2) < 1e-9);
  assert.ok(Math.abs(scale.step(scale.x(31)) - 31) < 1e-9);
});

test("names beside lines get room, and do not cover each other", () => {
  const line = { xs: [0, 9], ys: [1, 2] };
  const [without, beside] = [false, true].map((named) => scales(plot(line, { named }), 400, 200)?.right ?? 0);
  assert.ok(without - beside >= 6.6 * "rank 0".length - 10);
  assert.deepEqual(apart([50, 52, 51, 150], 12, 0, 160), [50, 74, 62, 150]);
  assert.deepEqual(apart([150, 151], 12, 0, 155), [143, 155]);
});
