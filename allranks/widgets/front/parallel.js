// Parallel coordinates: an axis a parameter and one for the metric, a line a member.

import { ticks } from "./chart.js";
import { Choice, isDark, make, shape } from "./elements.js";
import { colour, formatLabels, formatNumber } from "./format.js";
import { FEW_VALUES, groupsOf, parameterWords, parametersOf, sortedValues } from "./groups.js";
import { PALETTE } from "./palette.js";

const PARALLEL = { height: 230, top: 26, bottom: 24, side: 70 };
const LABEL = { letters: 11, height: 12 };
const MANY_LINES = 60;
// Lines of more members are left out, the worst first, as in the still picture.
const MOST_LINES = 400;
/** @typedef {import("./types").Member & { metric: number }} Measured */
/** @typedef {import("./types").Parameter} Parameter */

export class ParallelPanel {
  /** @param {import("./data.js").Data} data */
  constructor(data) {
    this.data = data;
    this.by = new Choice("colour", "by the metric", () => this.draw());
    this.how = this.said = "";
    this.at = 0;
    this.picture = shape("svg", { class: "ar-parallel", role: "img" });
    this.legend = make("div", { className: "ar-legend" });
    this.element = make("div", {}, make("div", { className: "ar-bar" }, this.by.element,
      make("span", {}, "each line is a member: click one to highlight it"), this.legend), this.picture);
  }

  /** @returns {Measured[]} */
  get members() { return /** @type {Measured[]} */ ([...this.data.members.values()].filter(({ metric }) => Number.isFinite(metric))); }
  get filled() { return this.members.length > 1 && parametersOf(this.members).length > 0; }

  draw() {
    const { members } = this, names = parametersOf(members), { ensemble, selected } = this.data, dark = isDark();
    this.by.offer(names, "");
    const width = Math.round(this.element.clientWidth);
    const how = [width, dark, selected, this.by.value, ensemble.metric, ensemble.lower].join();
    // Many lines are drawn again once a second; what a person has chosen, at once.
    if (!width || (how === this.how && members.length > MANY_LINES && Date.now() - this.at < 900)) return;
    const said = how + members.map(({ number, metric }) => `${number} ${metric}`).join();
    if (said === this.said) return;
    this.how = how;
    this.said = said;
    this.at = Date.now();
    const axes = [...names.map((name) => new Axis(name, members.map(({ parameters }) => parameters[name]))),
      new Axis(ensemble.metric || "metric", members.map(({ metric }) => metric))];
    axes.forEach((axis, i) => { axis.x = PARALLEL.side + i * (width - 2 * PARALLEL.side) / (axes.length - 1); });
    const colourOf = this.colours(members, axes[axes.length - 1], dark);
    const sorted = this.drawn(members, selected).sort((a, b) => Number(a.number === selected) - Number(b.number === selected));
    const lines = sorted.map((member) => this.line(member, names, axes, colourOf(member), selected));
    this.picture.setAttribute("viewBox", `0 0 ${width} ${PARALLEL.height}`);
    this.picture.replaceChildren(...lines, ...axes.flatMap((axis, at) => axis.drawn(at === 0)));
    this.describe(members, names);
  }

  /** @param {Measured[]} members @param {import("./types").Selected} selected */
  drawn(members, selected) {
    const way = this.data.ensemble.lower ? 1 : -1;
    const best = [...members].sort((a, b) => way * (a.metric - b.metric));
    return best.filter(({ number }, place) => place < MOST_LINES || number === selected).reverse();
  }

  // By a parameter's groups, or from the worst to the best; the legend says which is which.
  /** @param {Measured[]} members @param {Axis} axis @param {boolean} dark */
  colours(members, axis, dark) {
    if (this.by.value) {
      const groups = groupsOf(members, this.by.value);
      this.explain(groups.labels.map((label, index) => [colour(index, dark), `${groups.name}=${label}`]));
      return (/** @type {Measured} */ { number }) => colour(groups.of.get(number) ?? 0, dark);
    }
    const [poor, best] = PALETTE.worstToBest[dark ? "dark" : "light"];
    /** @param {number} share */
    const mixed = (share) => `rgb(${Array(3).fill(Math.round(poor + share * (best - poor))).join(" ")})`;
    this.explain([[mixed(0), "worst"], [mixed(1), "best"]]);
    return (/** @type {Measured} */ { metric }) => mixed(this.data.ensemble.lower ? 1 - axis.share(metric) : axis.share(metric));
  }

  /** @param {[string, string][]} marks */
  explain(marks) {
    this.legend.replaceChildren(...marks.map(([background, said]) => {
      const mark = make("i", { "aria-hidden": "true", className: "ar-swatch" });
      mark.style.background = background;
      return make("span", {}, mark, said);
    }));
  }

  /** @param {Measured} member @param {string[]} names @param {Axis[]} axes @param {string} stroke @param {import("./types").Selected} selected */
  line(member, names, axes, stroke, selected) {
    const values = [...names.map((name) => member.parameters[name]), member.metric];
    const points = values.flatMap((value, i) => (value === undefined ? [] : [`${axes[i].x.toFixed(1)},${axes[i].y(value).toFixed(1)}`]));
    const chosen = member.number === selected, said = names.map((name) => `${name}=${parameterWords(member.parameters[name] ?? "")}`);
    const line = shape("polyline", { points: points.join(" "), fill: "none", stroke: chosen ? "currentColor" : stroke,
      "stroke-width": chosen ? 3.5 : 1.8, opacity: selected === null || chosen ? 1 : 0.35, "data-member": member.number },
    shape("title", {}, `member ${member.number}: ${said.join(", ")}: ${formatNumber(member.metric)}`));
    line.addEventListener("click", () => this.data.select(member.number));
    return line;
  }

  // The table of members says the same to who does not see it, line by line.
  /** @param {Measured[]} members @param {string[]} names */
  describe(members, names) {
    const { metric, lower } = this.data.ensemble;
    const best = members.reduce((a, b) => ((lower ? b.metric < a.metric : b.metric > a.metric) ? b : a));
    const how = names.map((name) => `${name}=${parameterWords(best.parameters[name] ?? "")}`).join(", ");
    this.picture.setAttribute("aria-label", `${members.length} members from ${names.join(", ")} to ${metric || "metric"}; `
      + `the ${lower ? "lowest" : "highest"} is ${formatNumber(best.metric)} of member ${best.number}, ${how}`);
  }
}

// Where a value stands: numbers on a scale, a log one where they span two decades; words one by one.
export class Axis {
  /** @param {string} name @param {(import("./types").Parameter | undefined)[]} values */
  constructor(name, values) {
    this.name = name;
    this.x = 0;
    this.log = false;
    this.ends = [0, 0];
    this.values = sortedValues(values.filter((value) => value !== undefined));
    this.numbers = this.values.every((value) => typeof value === "number");
    if (!this.numbers || !this.values.length) return;
    const [low, high] = [Number(this.values[0]), Number(this.values[this.values.length - 1])];
    this.log = low > 0 && high / low >= 100;
    this.ends = [low, high];
  }

  /** @param {import("./types").Parameter} value */
  share(value) {
    if (!this.numbers) return this.values.length > 1 ? this.values.indexOf(value) / (this.values.length - 1) : 0.5;
    const at = this.log ? Math.log10 : Number, [low, high] = this.ends.map((one) => at(one));
    return low === high ? 0.5 : (at(Number(value)) - low) / (high - low);
  }

  /** @param {import("./types").Parameter} value */
  y(value) { return PARALLEL.height - PARALLEL.bottom - this.share(value) * (PARALLEL.height - PARALLEL.top - PARALLEL.bottom); }

  // Both ends, and what does not overlap them.
  marks() {
    const marks = this.candidates(), kept = [...new Set([marks[0], marks[marks.length - 1]])];
    for (const mark of marks.slice(1, -1)) {
      if (kept.every((other) => Math.abs(this.y(mark) - this.y(other)) >= LABEL.height)) kept.push(mark);
    }
    return kept;
  }

  labels() {
    const marks = this.marks();
    if (!this.numbers) return marks.map(String).map((word) => (word.length > LABEL.letters ? `${word.slice(0, LABEL.letters - 1)}…` : word));
    const labels = formatLabels(marks.map(Number));
    return labels.some((label) => label.length > LABEL.letters) ? marks.map((mark) => formatNumber(Number(mark))) : labels;
  }

  // Each value where they are few; else round numbers, or decades.
  candidates() {
    if (!this.numbers || this.values.length <= FEW_VALUES) return this.values;
    const [low, high] = this.ends;
    if (low === high) return [low];
    if (!this.log) return ticks(low, high, 5);
    const decades = [];
    for (let n = Math.ceil(Math.log10(low) - 1e-9); n <= Math.log10(high) + 1e-9; n++) decades.push(10 ** n);
    return decades.length > 1 ? decades : [low, high];
  }

  // Beside the first axis its values stand where no line is.
  /** @param {boolean} isFirst */
  drawn(isFirst) {
    const side = isFirst ? { x: this.x - 5, "text-anchor": "end" } : { x: this.x + 5 };
    const marks = this.marks(), labels = this.labels();
    /** @param {any} attributes @param {string} said */
    const text = (attributes, said) => shape("text", { fill: "currentColor", "font-size": 11, "paint-order": "stroke", class: "ar-axis-label", ...attributes }, said);
    return [
      shape("path", { d: `M${this.x} ${PARALLEL.top}V${PARALLEL.height - PARALLEL.bottom}`, stroke: "currentColor" }),
      text({ x: this.x, y: 14, "text-anchor": "middle", "font-weight": 600, "font-size": 12 }, this.name),
      ...marks.map((mark, i) => text({ ...side, y: this.y(mark) + 4 }, labels[i])),
    ];
  }
}
