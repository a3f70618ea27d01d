// Curves of an ensemble, told apart by a parameter: a colour a value, or a band a value.

/** @typedef {import("./types").Parameter} Parameter */

export const FEW_VALUES = 8;
const PARTS = 4;

// The members by the values of a parameter; many different numbers are cut into parts of equal count.
/** @param {import("./types").Member[]} members @param {string} name */
export function groupsOf(members, name) {
  const have = members.filter(({ parameters }) => name in parameters).map(({ number, parameters }) => /** @type {const} */ ([number, parameters[name]]));
  const values = sortedValues(have.map(([, value]) => value));
  let parts = values.map((value) => [value]);
  if (values.length > FEW_VALUES) {
    const count = values.every((value) => typeof value === "number") ? PARTS : FEW_VALUES;
    parts = Array.from({ length: count }, (_, i) =>
      values.slice(Math.floor(i * values.length / count), Math.floor((i + 1) * values.length / count)));
  }
  const place = new Map(parts.flatMap((part, index) => part.map((value) => /** @type {const} */ ([value, index]))));
  const labels = parts.map((part) => (part.length === 1 ? parameterWords(part[0])
    : `${parameterWords(part[0])} to ${parameterWords(part[part.length - 1])}`));
  const of = new Map(have.map(([number, value]) => /** @type {const} */ ([number, place.get(value) ?? 0])));
  const counts = labels.map((_, index) => [...of.values()].filter((one) => one === index).length);
  return { name, labels, of, counts };
}

// Different values, numbers by their size, words as they came.
/** @template {Parameter} T @param {T[]} values */
export function sortedValues(values) {
  const different = [...new Set(values)];
  return different.every((value) => typeof value === "number") ? different.sort((a, b) => Number(a) - Number(b)) : different;
}

/** @param {Parameter} value */
export const parameterWords = (value) => (typeof value === "number" ? String(Number(value.toPrecision(4))) : String(value));

// The parameters that differ between members.
/** @param {import("./types").Member[]} members */
export function parametersOf(members) {
  const names = [...new Set(members.flatMap(({ parameters }) => Object.keys(parameters)))];
  return names.filter((name) => new Set(members.map(({ parameters }) => parameters[name])).size > 1);
}
