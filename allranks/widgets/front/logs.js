// Logs: the rows in sight only, so that hundreds of thousands of lines scroll and search at once.

import { make, put } from "./elements.js";
import { formatBytes, formatRanks } from "./format.js";

const ROW = 18;
const SPARE = 8;

export class LogsPanel {
  /** @param {import("./data.js").Data} data */
  constructor(data) {
    this.data = data;
    this.follow = true;
    this.typing = this.top = 0;
    this.search = make("input", { type: "search", placeholder: "search", "aria-label": "search the logs" });
    const { query = "", fold = true } = data.settings;
    this.search.value = query;
    this.foldBox = make("input", { type: "checkbox", checked: fold });
    this.followBox = make("input", { type: "checkbox", checked: true });
    this.said = make("span", { className: "ar-said", role: "status" });
    this.space = make("div", { className: "ar-space" });
    this.sight = make("div", { className: "ar-sight" });
    this.space.append(this.sight);
    this.box = make("div", { className: "ar-log", tabIndex: 0, role: "log", "aria-label": "output of the ranks", "aria-live": "off" }, this.space);
    this.element = make("div", {},
      make("div", { className: "ar-bar" }, this.search,
        make("label", { title: "show equal lines of several ranks once" }, this.foldBox, " fold"),
        make("label", {}, this.followBox, " follow"), this.said),
      this.box);
    this.search.addEventListener("input", () => {
      clearTimeout(this.typing);
      this.typing = setTimeout(() => this.look({ query: this.search.value }), 120);
    });
    this.foldBox.addEventListener("change", () => this.look({ fold: this.foldBox.checked }));
    this.followBox.addEventListener("change", () => { this.follow = this.followBox.checked; this.draw(); });
    this.box.addEventListener("scroll", () => {
      const left = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight;
      // Only a person scrolls up; scrolling to the end begins to follow again.
      if (this.box.scrollTop < this.top - 2) this.setFollow(false);
      else if (left < 2) this.setFollow(true);
      this.top = this.box.scrollTop;
      this.drawRows();
    });
  }

  get filled() { return Boolean(this.data.withLogs); }

  /** @param {boolean} value */
  setFollow(value) {
    this.follow = value;
    this.followBox.checked = value;
  }

  /** @param {import("./types").Settings} change */
  look(change) {
    this.data.set(change);
    this.data.lines.look(change);
    this.draw();
  }

  draw() {
    const { lines, selected } = this.data;
    if (lines.only !== selected) lines.look({ only: selected });
    this.space.style.height = `${lines.rows.length * ROW}px`;
    if (this.follow) {
      this.box.scrollTop = this.box.scrollHeight;
      this.top = this.box.scrollTop;
    }
    const whose = selected === null ? "" : ` of rank ${selected}`;
    const found = lines.query ? `${lines.rows.length.toLocaleString("en")} of ` : "";
    const gone = lines.forgotten ? `, ${lines.forgotten.toLocaleString("en")} older ones in the log files` : "";
    const more = lines.skipped ? `, ${formatBytes(lines.skipped)} more in the log files` : "";
    put(this.said, `${found}${lines.among.toLocaleString("en")} lines${whose}${gone}${more}`);
    this.drawRows();
  }

  drawRows() {
    const { lines } = this.data, rows = lines.rows.length;
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW) - SPARE);
    const last = Math.min(rows, Math.ceil((this.box.scrollTop + this.box.clientHeight) / ROW) + SPARE);
    this.sight.style.transform = `translateY(${first * ROW}px)`;
    const drawn = [];
    for (let index = first; index < last; index++) drawn.push(this.row(lines.row(index), lines.pattern));
    this.sight.replaceChildren(...drawn);
  }

  /** @param {ReturnType<import("./lines.js").Lines["row"]>} line @param {RegExp | null} pattern */
  row({ ranks, text, kind }, pattern) {
    const shown = make("span", {});
    const match = pattern ? pattern.exec(text) : null;
    if (match && match[0]) {
      const end = match.index + match[0].length;
      shown.append(text.slice(0, match.index), make("mark", {}, match[0]), text.slice(end));
    } else {
      shown.append(text);
    }
    return make("div", { className: ["ar-out", "ar-err", "ar-note"][kind] },
      make("b", { title: kind === 1 ? "standard error" : "" }, formatRanks(ranks)),
      make("i", { "aria-hidden": "true" }, ["│", "!", "·"][kind]), shown);
  }
}
