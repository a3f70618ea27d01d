// Members: the table of an ensemble, one row a member, and the control that adds more.

const MEMBER_COLUMNS = [["member", "number"], ["values", "values"], ["state", "state"], ["rank", "rank"],
  ["metric", "metric"], ["time", "seconds"], ["", null]];
const MEMBER_MARKS = { waiting: "·", running: "▶", finished: "✓", failed: "✗", stopped: "■", "stopped early": "▽" };

class MembersPanel {
  constructor(data) {
    this.data = data;
    this.rows = new Map();
    this.sorted = "number";
    this.down = false;
    this.field = make("input", { type: "text", placeholder: "lr=0.03 seed=0:4", "aria-label": "values of members to add" });
    const add = make("button", { type: "button", className: "ar-button", title: "add members with these values" }, "Add");
    this.answer = make("span", { className: "ar-answer", role: "status" });
    const ask = () => {
      if (!this.field.value.trim()) return;
      data.answer = "";
      data.model.send({ kind: "add", what: this.field.value });
    };
    add.addEventListener("click", ask);
    this.field.addEventListener("keydown", (event) => { if (event.key === "Enter") ask(); });
    this.heads = MEMBER_COLUMNS.map(([name, key]) => this.head(name, key));
    this.body = make("tbody", {});
    const table = make("table", { className: "ar-members" },
      make("thead", {}, make("tr", {}, ...this.heads.map(({ cell }) => cell))), this.body);
    this.element = make("div", {},
      make("div", { className: "ar-bar" }, make("label", {}, "add ", this.field), add, this.answer),
      make("div", { className: "ar-scroll ar-high", tabIndex: 0, role: "region", "aria-label": "table of members" }, table));
  }

  get filled() { return this.data.members.size > 0; }

  head(name, key) {
    const cell = make("th", { scope: "col" });
    const button = make("button", { type: "button", className: "ar-sort", hidden: !key }, name);
    button.addEventListener("click", () => {
      this.down = this.sorted === key && !this.down;
      this.sorted = key;
      this.draw();
    });
    cell.append(button);
    return { cell, button, key };
  }

  draw() {
    const { members, ensemble } = this.data;
    put(this.answer, this.data.answer ?? "");
    for (const { cell, button, key } of this.heads) {
      if (key === "metric") put(button, ensemble.metric || "metric");
      if (key === this.sorted) cell.setAttribute("aria-sort", this.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    const best = this.best();
    for (const row of members.values()) {
      let parts = this.rows.get(row.number);
      if (!parts) this.rows.set(row.number, parts = this.parts(row.number));
      this.fill(parts, row, row.number === best);
    }
    const order = [...members.values()].sort((a, b) => this.compare(a, b)).map((row) => row.number);
    const said = order.join();
    if (said !== this.order) {
      this.order = said;
      this.body.replaceChildren(...order.map((number) => this.rows.get(number).element));
    }
  }

  best() {
    let best = null;
    for (const { number, state, metric } of this.data.members.values()) {
      if (state !== "finished" || !Number.isFinite(metric)) continue;
      if (best === null || (this.data.ensemble.lower ? metric < best[1] : metric > best[1])) best = [number, metric];
    }
    return best && best[0];
  }

  compare(a, b) {
    const x = a[this.sorted], y = b[this.sorted], way = this.down ? -1 : 1;
    if (x === y) return a.number - b.number;
    // What has no value stands last, whichever way.
    if (x === null || y === null) return x === null ? 1 : -1;
    return (x < y ? -1 : 1) * way;
  }

  parts(number) {
    const cells = MEMBER_COLUMNS.slice(0, -1).map(() => make("td", {}));
    const choose = make("button", { type: "button", className: "ar-choose", title: "show its curve" }, String(number));
    choose.addEventListener("click", () => this.data.select(number));
    cells[0].append(choose);
    const stop = make("button", { type: "button", className: "ar-small", "aria-label": `stop member ${number}` }, "stop");
    stop.addEventListener("click", () => {
      stop.classList.add("ar-pressed");
      this.data.model.send({ kind: "stop", what: number });
    });
    return { cells, choose, stop, element: make("tr", {}, ...cells, make("td", {}, stop)) };
  }

  fill({ cells, choose, stop, element }, row, best) {
    const { state, error, metric } = row;
    const since = state === "running" ? (Date.now() - row.at) / 1000 : 0;
    element.dataset.state = state;
    element.classList.toggle("ar-best", best);
    choose.setAttribute("aria-pressed", String(this.data.selected === row.number));
    put(cells[1], row.values);
    put(cells[2], `${MEMBER_MARKS[state] ?? ""} ${state}${error ? `: ${error}` : ""}`);
    cells[2].title = error;
    put(cells[3], row.rank === null ? "" : String(row.rank));
    put(cells[4], metric === null ? "" : `${formatNumber(metric)}${best ? " ★" : ""}`);
    put(cells[5], row.seconds === null ? "" : formatSeconds(since ? Math.floor(row.seconds + since) || 0.1 : row.seconds));
    stop.hidden = state !== "running" && state !== "waiting";
  }
}
