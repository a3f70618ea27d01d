import assert from "node:assert/strict";
import { test } from "node:test";

import {
  formatBandwidth, formatBytes, formatLabels, formatNumber, formatRanks, formatSeconds, formatSecondsLike,
} from "../../allranks/widgets/front/format.js";

test("numbers have four digits, and an exponent where zeros would have to be counted", () => {
  const said = [0.000123456, 12345, 1.5e9, 12345.6, 9999.7, NaN, -0.5, 1e-9].map((value) => formatNumber(value));
  assert.deepEqual(said, ["0.0001235", "12,345", "1.5e9", "1.235e4", "1e4", "NaN", "-0.5", "1e-9"]);
});

test("different labels of an axis differ, with as few digits as that takes", () => {
  assert.deepEqual(formatLabels([0.1, 0.2, 0.30000000000000004]), ["0.1", "0.2", "0.3"]);
  assert.deepEqual(formatLabels([1.00001, 1.00002]), ["1.00001", "1.00002"]);
});

test("the labels of one axis have one notation", () => {
  assert.deepEqual(formatLabels([0, 5e6, 1e7]), ["0", "5e6", "1e7"]);
  assert.deepEqual(formatLabels([0, 5e5, 1e6]), ["0", "500,000", "1,000,000"]);
});

test("a duration has the unit that fits it", () => {
  assert.deepEqual([75, 1.234, 0.00123, 0].map(formatSeconds), ["1 min 15 s", "1.23 s", "1.23 ms", "0 µs"]);
});

test("durations of one column have the unit of the longest", () => {
  assert.deepEqual([0.5, 20.72].map((value) => formatSecondsLike(value, 20.72)), ["0.5 s", "20.7 s"]);
  assert.deepEqual([5, 75].map((value) => formatSecondsLike(value, 75)), ["0 min 05 s", "1 min 15 s"]);
});

test("sizes are powers of a thousand", () => {
  assert.deepEqual([999, 4e6, 1.5e9, 2.16e12].map(formatBytes), ["999 B", "4 MB", "1.5 GB", "2.16 TB"]);
  assert.deepEqual([null, 0.5].map(formatBandwidth), ["n/a", "500 MB/s"]);
});

test("neighbouring ranks are a span", () => {
  assert.equal(formatRanks([3, 0, 2]), "ranks 0, 2–3");
  assert.equal(formatRanks([7], "member"), "member 7");
});
