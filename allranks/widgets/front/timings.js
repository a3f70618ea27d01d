// Communication: waiting against transfer for each rank, the straggler, and every kind of call.

import { alike, mean, rowName } from "./alike.js";
import { make, part, put, shape } from "./elements.js";
import { formatBandwidth, formatBytes, formatSeconds } from "./format.js";

const MANY_ROWS = 16;
/** @type {Record<string, string>} */
const EXPLAINED = {
  "total waiting": "of all these calls together, the mean of the ranks",
  "total transfer": "of all these calls together, the mean of the ranks",
  busbw: "bus bandwidth, as in nccl-tests: the bytes a second on the link of a rank, to compare with the most that the link can do",
  best: "busbw of the fastest call",
};

export class TimingsPanel {
  /** @param {import("./data.js").Data} data */
  constructor(data) {
    this.data = data;
    /** @type {import("./types").Timings | null} */
    this.drawn = null;
    /** @type {import("./types").Selected} */
    this.chosen = null;
    this.seconds = 0;
    /** @type {Map<string, number>} */
    this.places = new Map();
    this.whole = make("span", {});
    this.bars = make("div", { className: "ar-bars" });
    this.straggler = make("p", { className: "ar-straggler" });
    this.table = make("table", { className: "ar-table" });
    /** @param {string} kind @param {string} text */
    const key = (kind, text) => make("span", {}, make("i", { className: `ar-swatch ar-${kind}` }), text);
    this.element = make("div", { className: "ar-timings" },
      make("div", { className: "ar-bar" }, key("wait", "waiting for other ranks"), key("transfer", "transfer"), this.whole),
      this.bars, this.straggler, make("div", { className: "ar-scroll" }, this.table));
  }

  get filled() { return Boolean(this.data.timings); }

  draw() {
    const { timings, selected, placeOfStraggler } = this.data;
    this.straggler.classList.toggle("ar-placed", placeOfStraggler);
    const seconds = Number(this.data.seconds.toPrecision(3));
    if (!timings || (timings === this.drawn && selected === this.chosen && seconds === this.seconds)) return;
    this.seconds = seconds;
    this.drawn = timings;
    this.chosen = selected;
    const most = Math.max(seconds, ...timings.ranks.map((row) => row.wait_seconds + row.transfer_seconds)) || 1;
    put(this.whole, `of a cell of ${formatSeconds(most)}`);
    const groups = alike(timings.ranks, MANY_ROWS, (row) => [row.wait_seconds, row.transfer_seconds]);
    this.bars.replaceChildren(...groups.map((rows) => {
      const ranks = rows.map(({ rank }) => rank), who = rowName(ranks), calls = Math.max(...rows.map((row) => row.calls));
      const wait = mean(rows.map((row) => row.wait_seconds)), transfer = mean(rows.map((row) => row.transfer_seconds));
      const bar = make("div", { className: "ar-track" }, part("wait", wait / most), part("transfer", transfer / most));
      const words = `${formatSeconds(wait)} + ${formatSeconds(transfer)}`;
      const row = make("div", { className: "ar-bar-row", role: "img",
        "aria-label": `${who}: waited ${formatSeconds(wait)}, transferred ${formatSeconds(transfer)} in ${calls} calls` },
        make("span", { className: "ar-who" }, who), bar, make("span", {}, words));
      row.classList.toggle("ar-faded", selected !== null && !ranks.includes(selected));
      return row;
    }));
    put(this.straggler, timings.straggler);
    this.drawTable(timings.calls);
  }

  /** @param {import("./types").CallRow[]} calls */
  drawTable(calls) {
    const head = make("tr", {}, ...["call", "name", "dtype", "size", "calls", "total waiting", "total transfer", "busbw", "best"]
      .map((text) => make("th", { scope: "col", ...(text in EXPLAINED && { title: EXPLAINED[text] }) }, text)));
    // Each call stays where it has come first: the costliest may be another one in a moment.
    for (const call of calls) if (!this.places.has(keyOf(call))) this.places.set(keyOf(call), this.places.size);
    const placed = [...calls].sort((a, b) => (this.places.get(keyOf(a)) ?? 0) - (this.places.get(keyOf(b)) ?? 0));
    const rows = placed.map((call) => {
      const cells = [call.op, call.name, call.dtype, formatBytes(call.nbytes), call.calls.toLocaleString("en"),
        formatSeconds(call.wait_seconds), formatSeconds(call.transfer_seconds), formatBandwidth(call.busbw_gbps),
        formatBandwidth(call.best_gbps)];
      const row = make("tr", {}, ...cells.map((text) => make("td", {}, text)));
      if (call.recent.length > 1) row.children[7].prepend(sparkline(call.recent));
      return row;
    });
    this.table.replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
  }
}

/** @param {import("./types").CallRow} call */
const keyOf = ({ op, name, dtype, nbytes }) => [op, name, dtype, nbytes].join(" ");

// How the bandwidth was over the cell.
/** @param {number[]} values */
function sparkline(values) {
  const low = Math.min(...values), high = Math.max(...values), said = `busbw over the cell: ${formatBandwidth(low)} to ${formatBandwidth(high)}`;
  const points = values.map((value, i) =>
    `${(1 + 58 * i / (values.length - 1)).toFixed(1)},${(13 - 12 * (high > low ? (value - low) / (high - low) : 0.5)).toFixed(1)}`);
  return shape("svg", { class: "ar-spark", width: 60, height: 14, role: "img", "aria-label": said },
    shape("title", {}, said), shape("polyline", { points: points.join(" "), fill: "none", stroke: "currentColor" }));
}
