// Rows of many ranks: those whose values hardly differ are one row.

import { formatRanks } from "./format.js";

// The greatest value has so many parts; fewer where too many rows would be left.
const FINENESS = [50, 10, 4];

/**
 * @template T
 * @param {T[]} rows
 * @param {number} most as many rows stand alone
 * @param {(row: T) => number[]} valuesOf
 * @param {(row: T) => string} [wordsOf] what is the same in all rows of one group
 */
export function alike(rows, most, valuesOf, wordsOf = () => "") {
  let groups = rows.map((row) => [row]);
  const greatest = Math.max(...rows.flatMap(valuesOf)) || 1;
  for (const parts of FINENESS) {
    if (groups.length <= most) break;
    /** @type {Map<string, T[]>} */
    const found = new Map();
    for (const row of rows) {
      const key = [wordsOf(row), ...valuesOf(row).map((value) => Math.round(value / greatest * parts))].join(" ");
      found.set(key, [...found.get(key) ?? [], row]);
    }
    groups = [...found.values()];
  }
  return groups;
}

/** @param {number[]} values */
export const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

/**
 * The name of a row: its ranks, and that its values are their means.
 *
 * @param {number[]} ranks
 */
export const rowName = (ranks) => formatRanks(ranks) + (ranks.length > 1 ? ", mean" : "");
