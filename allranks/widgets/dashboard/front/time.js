// Where each rank's time and memory goes: live for as long as this is open, and when the cell has ended.

const TIME_ROWS = 16;
const NAMED = 3;

class TimePanel {
  constructor(data) {
    this.data = data;
    this.chart = new StripChart(data, () => this.draw());
    const button = (text, act) => {
      const element = make("button", { type: "button", className: "ar-small" }, text);
      element.addEventListener("click", act);
      return element;
    };
    this.key = make("span", { className: "ar-legend ar-kinds" });
    this.said = make("span", { role: "status" });
    this.bar = make("div", { className: "ar-bar" },
      button("zoom in", () => this.chart.closer(2)), button("zoom out", () => this.chart.closer(0.5)),
      button("earlier", () => this.chart.move(-0.5)), button("later", () => this.chart.move(0.5)),
      button("whole cell", () => this.chart.whole()), this.said, this.key);
    this.tables = make("div", {});
    this.memory = make("div", { className: "ar-memory" });
    this.element = make("div", { className: "ar-time" }, this.bar, this.chart.element, this.tables, this.memory);
  }

  // From the beginning, closed: a heading that came at the end would move what stands below.
  get filled() { return this.data.noun === "rank" && Boolean(this.data.strips.size || this.data.memory || !this.data.ended); }

  draw() {
    const { data } = this, dark = isDark();
    this.drawMemory();
    const said = JSON.stringify([data.stripsAt, data.settings.range, data.selected, dark, this.element.clientWidth, data.ranks.size]);
    if (said === this.drawn) return;
    this.drawn = said;
    this.bar.hidden = this.chart.element.hidden = data.ended && !data.strips.size;
    this.chart.draw(dark);
    const { range } = data.settings;
    put(this.said, range ? formatPart(range) : "");
    const colours = dark ? TIME_DARK : TIME_LIGHT;
    this.key.replaceChildren(...TIME_KINDS.map((name, kind) => {
      const mark = make("i", { "aria-hidden": "true", className: "ar-swatch" });
      mark.style.background = colours[kind];
      return make("span", {}, mark, kind === WAITING ? "waiting, for the rank of that number" : name);
    }));
    this.drawTables();
  }

  drawTables() {
    const { times, range } = this.chart, zoomed = Boolean(this.data.settings.range), rows = times.slice(0, TIME_ROWS);
    if (!rows.length) return;
    const parts = [this.table(zoomed ? "time in this part of the cell" : "time", rows.map((time) => {
      const { sums, whom } = time.between(...range);
      const waits = zoomed ? [...whom].sort((a, b) => b[1] - a[1]) : time.waits;
      return [time, sums, this.why(time, waits, zoomed ? [] : time.importing, range)];
    }))];
    const steps = rows.filter((time) => time.step);
    if (steps.length) {
      const count = Math.max(...steps.map((time) => time.step.count));
      parts.push(this.table(`a step, mean of ${formatNumber(count)}`, steps.map((time) => [time, time.step.sums, ""])));
    }
    const left = times.slice(TIME_ROWS).map(({ rank }) => rank);
    if (left.length) parts.push(make("p", { className: "ar-note" }, `${formatRanks(left)} not in these tables`));
    this.tables.replaceChildren(...parts.flat());
  }

  // For whom a rank waited most, and what it imported.
  why(time, waits, importing, [began, ended]) {
    const length = Math.min(ended, time.seconds) - began;
    const named = (pairs, prefix, name) => {
      const longest = Math.max(0, ...pairs.map(([, value]) => value));
      const found = pairs.slice(0, NAMED).filter(([, value]) => value >= 0.1 * longest && value >= 0.01 * length);
      return found.length ? [`${prefix} ${found.map(([one, value]) => `${name}${one} ${formatSeconds(value)}`).join(", ")}`] : [];
    };
    return [...named(waits.filter(([rank]) => rank >= 0), "waits for", "rank "), ...named(importing, "imports", "")].join("; ");
  }

  // Without the kinds that nobody has spent time in.
  table(title, rows) {
    const sum = (sums) => sums.reduce((a, b) => a + b, 0), most = Math.max(...rows.map(([, sums]) => sum(sums)));
    const kinds = TIME_KINDS.map((_, kind) => kind).filter((kind) => rows.some(([, sums]) => sums[kind] > 0));
    const head = ["rank", "all", ...kinds.map((kind) => TIME_KINDS[kind]), "for whom, and what"].map((text) => make("th", { scope: "col" }, text));
    const body = rows.map(([time, sums, why]) => make("tr", {}, make("th", { scope: "row" }, `rank ${time.rank}`),
      ...[sum(sums), ...kinds.map((kind) => sums[kind])].map((value) => make("td", {}, formatSecondsLike(value, most))), make("td", {}, why)));
    const whys = rows.some(([, , why]) => why);
    if (!whys) for (const row of [{ lastElementChild: head.pop() }, ...body]) row.lastElementChild.remove();
    const table = make("table", { className: "ar-table ar-times", "aria-label": title }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
    table.classList.toggle("ar-whys", whys);
    return [make("p", { className: "ar-caption" }, title), table];
  }

  drawMemory() {
    const { memory } = this.data;
    if (memory === this.shown) return;
    this.shown = memory;
    this.memory.innerHTML = memory ?? "";
    for (const table of this.memory.querySelectorAll("table")) table.className = "ar-table";
  }
}
