// The curves as a file, which goes where the browser puts what is downloaded.

import { make } from "./elements.js";

/** @param {string} text */
const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

/** @param {import("./data.js").Data} data */
export function curvesAsCsv(data) {
  const second = data.noun === "member" ? "rank" : "member";
  const rows = [["name", data.noun, second, "step", "value"].join()];
  /** @param {any} a @param {any} b */
  const before = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  const series = [...data.series.values()].sort((a, b) =>
    before(a.name, b.name) || a.rank - b.rank || before(a.member, b.member));
  for (const { name, rank, member, steps, values, last } of series) {
    const head = [quoted(name), rank, quoted(member)].join();
    steps.forEach((step, i) => rows.push(`${head},${step},${values[i]}`));
    // Thinning may have taken the last one.
    if (steps.at(-1) !== last[0]) rows.push(`${head},${last.join()}`);
  }
  return `${rows.join("\n")}\n`;
}

const KEPT_MS = 60_000;

/** @param {string} name @param {string} text */
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  make("a", { href: url, download: name }).click();
  // Not at once: a browser may begin to read it later.
  setTimeout(() => URL.revokeObjectURL(url), KEPT_MS);
}
