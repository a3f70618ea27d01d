import assert from "node:assert/strict";
import { test } from "node:test";

import { Axis } from "../../allranks/widgets/front/parallel.js";

test("the labels of an axis are short, and have their exponents", () => {
  const axis = new Axis("result", [7.88860905221e-31, 1.46412936, 3.2e-14]);
  assert.deepEqual(axis.labels(), ["7.889e-31", "1.464", "3.2e-14"]);
  assert.deepEqual(new Axis("lr", [0.1, 0.3]).labels(), ["0.1", "0.3"]);
  assert.deepEqual(new Axis("kind", ["a word that is long", "a"]).labels().sort(), ["a", "a word tha…"]);
});

test("labels that would overlap are left out, but not those of the ends", () => {
  assert.deepEqual(new Axis("loss", [0.5, 1, 1.01, 1.02]).labels(), ["0.5", "1.02"]);
  const decades = new Axis("loss", Array.from({ length: 30 }, (_, n) => 10 ** -n)), places = decades.marks().map((mark) => decades.y(mark));
  assert.ok(places.length > 8);
  places.sort((a, b) => a - b).slice(1).forEach((y, i) => assert.ok(y - places[i] >= 12));
});
