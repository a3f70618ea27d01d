// Curves of an ensemble, told apart by a parameter: a colour a value, or a band a value.


export const FEW_VALUES = 8, PARTS = 4;
const DASHES = [[[], "━━"], [[6, 3], "╍╍"], [[2, 2], "┅┅"], [[8, 3, 2, 3], "━╍"]];
// The fifth colour resembles the first: they differ in their dashes.
export const dashed = (index) => DASHES[(index + Math.floor(index / DASHES.length)) % DASHES.length];

// The members by the values of a parameter; many different numbers are cut into parts of equal count.
export function groupsOf(members, name) {
  const have = members.filter(({ parameters }) => name in parameters).map(({ number, parameters }) => [number, parameters[name]]);
  const values = sortedValues(have.map(([, value]) => value));
  let parts = values.map((value) => [value]);
  if (values.length > FEW_VALUES) {
    const count = values.every((value) => typeof value === "number") ? PARTS : FEW_VALUES;
    parts = Array.from({ length: count }, (_, i) =>
      values.slice(Math.floor(i * values.length / count), Math.floor((i + 1) * values.length / count)));
  }
  const place = new Map(parts.flatMap((part, index) => part.map((value) => [value, index])));
  const labels = parts.map((part) => (part.length === 1 ? parameterWords(part[0])
    : `${parameterWords(part[0])} to ${parameterWords(part[part.length - 1])}`));
  const of = new Map(have.map(([number, value]) => [number, place.get(value)]));
  const counts = labels.map((_, index) => [...of.values()].filter((one) => one === index).length);
  return { name, labels, of, counts };
}

// Different values, numbers by their size, words as they came.
export function sortedValues(values) {
  const different = [...new Set(values)];
  return different.every((value) => typeof value === "number") ? different.sort((a, b) => a - b) : different;
}

export const parameterWords = (value) => (typeof value === "number" ? String(Number(value.toPrecision(4))) : String(value));

// The parameters that differ between members.
export function parametersOf(members) {
  const names = [...new Set(members.flatMap(({ parameters }) => Object.keys(parameters)))];
  return names.filter((name) => sortedValues(members.map(({ parameters }) => parameters[name])).length > 1);
}
