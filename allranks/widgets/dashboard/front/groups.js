// Curves of an ensemble, told apart by a parameter: a colour a value, or a band a value.

const FEW_VALUES = 8, PARTS = 4;
const DASHES = [[[], "━━"], [[6, 3], "╍╍"], [[2, 2], "┅┅"], [[8, 3, 2, 3], "━╍"]];
// The fifth colour resembles the first: they differ in their dashes.
const dashed = (index) => DASHES[(index + Math.floor(index / DASHES.length)) % DASHES.length];

// The members by the values of a parameter; many different numbers are cut into parts of equal count.
function groupsOf(members, name) {
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
function sortedValues(values) {
  const different = [...new Set(values)];
  return different.every((value) => typeof value === "number") ? different.sort((a, b) => a - b) : different;
}

const parameterWords = (value) => (typeof value === "number" ? String(Number(value.toPrecision(4))) : String(value));

// The parameters that differ between members.
function parametersOf(members) {
  const names = [...new Set(members.flatMap(({ parameters }) => Object.keys(parameters)))];
  return names.filter((name) => sortedValues(members.map(({ parameters }) => parameters[name])).length > 1);
}

class Choice {
  constructor(label, none, changed) {
    this.none = none;
    this.select = make("select", {});
    this.element = make("label", {}, `${label} `, this.select);
    this.select.addEventListener("change", () => { this.chosen = true; changed(); });
  }

  get value() { return this.select.value; }

  offer(names, wanted) {
    const said = names.join("\n");
    if (said !== this.said) {
      const before = this.value;
      this.said = said;
      this.select.replaceChildren(make("option", { value: "" }, this.none), ...names.map((name) => make("option", { value: name }, name)));
      this.select.value = names.includes(before) ? before : "";
    }
    if (!this.chosen) this.select.value = wanted ?? "";
  }
}

class GroupedCurves extends CurvesPanel {
  constructor(data) {
    super(data);
    this.groups = null;
    this.by = new Choice("by", "each member", () => this.draw());
    this.element.firstElementChild.insertBefore(this.by.element, this.legend);
  }

  draw() {
    const members = [...this.data.members.values()], names = parametersOf(members);
    this.by.element.hidden = !names.length;
    // Where curves are too many to be told apart, they are grouped unasked.
    const many = this.data.owners().size > MANY_CURVES;
    this.by.offer(names, many ? names[0] : "");
    this.groups = this.by.value ? groupsOf(members, this.by.value) : null;
    for (const { name } of this.data.series.values()) {
      if (this.charts.has(name)) continue;
      const chart = new GroupedChart(name, this);
      this.charts.set(name, chart);
      this.grid.append(chart.element);
    }
    super.draw();
  }

  drawLegend(owners, dark) {
    if (!this.groups) { super.drawLegend(owners, dark); return; }
    const { name, labels, counts } = this.groups, said = JSON.stringify([this.groups.name, labels, counts, this.mean.checked, dark]);
    if (said === this.said) return;
    this.said = said;
    const what = this.mean.checked ? ["mean between minimum and maximum of"] : [];
    this.legend.replaceChildren(...what, ...labels.map((label, index) => {
      const mark = make("i", { "aria-hidden": "true", className: "ar-dashes" }, this.mean.checked ? dashed(index)[1] : "━━");
      mark.style.color = colour(index, dark);
      return make("span", {}, mark, `${name}=${label} (${counts[index]})`);
    }));
  }
}

class GroupedChart extends Chart {
  draw(list, owners, dark) {
    const { groups, mean } = this.panel;
    if (!groups) { super.draw(list, owners, dark); return; }
    const group = (rank) => groups.of.get(rank) ?? groups.labels.length;
    const mapped = new Map([...owners.keys()].map((owner) => [owner, group(parseInt(owner, 10))]));
    if (!mean.checked) { super.draw(list, mapped, dark); return; }
    super.draw([], mapped, dark); // an empty chart of the right size
    this.list = list;
    this.annotate(list);
    this.drawBands(list, groups, dark);
  }

  drawBands(list, groups, dark) {
    const { canvas, panel } = this, width = canvas.clientWidth, height = canvas.clientHeight;
    const log = panel.log.checked, paint = canvas.getContext("2d"), style = getComputedStyle(canvas);
    const lines = list.map((series) => ({ series, xs: [...series.steps, series.last[0]],
      ys: smooth([...series.values, series.last[1]], panel.smoothing) }));
    const bands = groups.labels.map((label, index) => ({ label, index,
      band: spread(lines.filter(({ series }) => groups.of.get(series.rank) === index)) })).filter(({ band }) => band.length);
    const scale = width ? scales([], bands.flatMap(({ band }) => band), width, height, log) : null;
    this.describeBands(groups, bands);
    if (!scale) return;
    drawAxes(paint, scale, width, height, log, style.color, style.getPropertyValue("--ar-line"));
    for (const { index, band } of bands) drawBand(paint, scale, band, colour(index, dark), log, 0.15);
    for (const { index, band } of bands) {
      drawLine(paint, scale, band.map((c) => c.x), band.map((c) => c.mean),
        { colour: colour(index, dark), alpha: 1, width: 2, dash: dashed(index)[0] }, log);
    }
    for (const { series, xs, ys } of lines) {
      if (series.rank === panel.data.selected) drawLine(paint, scale, xs, ys, { colour: style.color, alpha: 1, width: 2.5, dash: [] }, log);
    }
    this.tip.hidden = this.at === null || !bands.length;
    if (this.tip.hidden) return;
    this.drawTip(paint, scale, [], bands[0].band, height, style.color);
    const x = scale.step(this.at), rows = bands.map(({ label, band }) => {
      const { mean, low, high } = band[nearest(band.map((c) => c.x), x)];
      return make("div", {}, `${groups.name}=${label}  ${formatNumber(mean)}  (${formatNumber(low)} to ${formatNumber(high)})`);
    });
    this.tip.replaceChildren(this.tip.firstElementChild, ...rows);
  }

  // What a screen reader says: where each group stands now.
  describeBands(groups, bands) {
    const said = bands.map(({ label, index, band }) => {
      const { mean, low, high } = band[band.length - 1];
      return `${groups.name}=${label}, ${groups.counts[index]} members: mean ${formatNumber(mean)}, ${formatNumber(low)} to ${formatNumber(high)}`;
    });
    this.canvas.setAttribute("aria-label", `${this.name}: ${said.join("; ")}`);
  }
}
