import assert from "node:assert/strict";
import { test } from "node:test";

import { lastValues, plotOf } from "../../allranks/widgets/front/plot.js";

const curves = (count) => [...Array(count).keys()].map((rank) =>
  ({ number: rank, name: "loss", rank, member: "", steps: [0, 1], values: [rank, rank + 1], stride: 1, broken: null, last: [2, rank + 2] }));
const choice = (count, more = {}) => ({ owners: new Map([...Array(count).keys()].map((rank) => [`${rank} `, rank])), noun: "rank", groups: null,
  mean: false, smoothing: 0, selected: null, log: { x: false, y: false }, range: null, ...more });

test("more curves than colours differ in their dashes", () => {
  const { lines } = plotOf("loss", curves(20), choice(20));
  assert.equal(new Set(lines.map(({ index, dash }) => `${index % 8} ${dash}`)).size, 20);
  assert.deepEqual(lines[9].xs, [0, 1, 2]);
  assert.equal(lines[9].last, 11);
});

test("of a mean only the selected curve is a line too", () => {
  const { lines, bands } = plotOf("loss", curves(3), choice(3, { mean: true, selected: 1 }));
  assert.deepEqual(lines.map(({ rank, strong }) => [rank, strong]), [[1, true]]);
  assert.deepEqual(bands.map(({ label, count, columns }) => [label, count, columns[0]]), [["mean", 3, { x: 0, low: 0, mean: 1, high: 2 }]]);
});

test("groups of members have a colour each, and names beside their bands", () => {
  const groups = { name: "lr", labels: ["0.1", "1"], counts: [2, 1], of: new Map([[0, 0], [1, 0], [2, 1]]) };
  const members = plotOf("loss", curves(3), choice(3, { noun: "member", groups }));
  assert.deepEqual(members.lines.map(({ index }) => index), [0, 0, 1]);
  assert.ok(!members.named);
  const { bands, named } = plotOf("loss", curves(3), choice(3, { noun: "member", groups, mean: true }));
  assert.ok(named);
  assert.deepEqual(bands.map(({ label, index, count }) => [label, index, count]), [["lr=0.1", 0, 2], ["lr=1", 1, 1]]);
});

test("the last values are those of few curves, of one that all share, or of the mean", () => {
  const lasts = (count, more, same = false) => lastValues(plotOf("loss", curves(count), choice(count, more)), same).map(({ label, last }) => [label, last]);
  assert.deepEqual(lasts(2), [["rank 0", 2], ["rank 1", 3]]);
  assert.deepEqual(lasts(3, {}, true), [["rank 0", 2]]);
  const broken = curves(3).map((curve) => (curve.rank ? curve : { ...curve, last: [2, NaN] }));
  assert.deepEqual(lastValues(plotOf("loss", broken, choice(3, { mean: true })), false).map(({ last }) => last), [NaN]);
  assert.deepEqual(lasts(20), []);
  assert.deepEqual(lasts(3, { mean: true }), [["mean", 3]]);
  const groups = { name: "lr", labels: ["0.1", "1"], counts: [2, 1], of: new Map([[0, 0], [1, 0], [2, 1]]) };
  assert.deepEqual(lasts(3, { noun: "member", groups, mean: true }), []);
});
