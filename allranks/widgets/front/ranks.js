// Ranks: one tile a rank, which selects it in every other panel.

import { isDark, make, put } from "./elements.js";
import { colour, formatBytes, formatNumber } from "./format.js";

export class RanksPanel {
  /** @param {import("./data.js").Data} data */
  constructor(data) {
    this.data = data;
    this.tiles = new Map();
    this.withMemory = false;
    this.element = make("div", { className: "ar-tiles", role: "group", "aria-label": "ranks" });
  }

  get filled() { return true; }

  draw() {
    const { ranks, selected } = this.data;
    this.element.hidden = !this.data.tilesShown;
    this.element.classList.toggle("ar-many", ranks.size > 16);
    // Of all ranks or of none: a rank that has left the cell says no more.
    this.withMemory = [...ranks.values()].every((tile) => tile.rss_nbytes);
    for (const [rank, tile] of ranks) {
      let parts = this.tiles.get(rank);
      if (!parts) {
        parts = { state: make("span", { className: "ar-state" }), use: make("span", { className: "ar-use" }),
          line: make("span", { className: "ar-line" }), more: make("span", { className: "ar-unseen" }) };
        // What is read aloud is what is seen, and more behind it.
        parts.button = make("button", { type: "button", className: "ar-tile" },
          make("b", {}, make("span", { className: "ar-unseen" }, "rank "), String(rank)), " ", parts.state, " ", parts.use, " ",
          parts.line, " ", parts.more);
        parts.button.addEventListener("click", () => {
          const shown = this.data.ranks.get(rank), owner = shown ? this.data.owner(shown) : null;
          if (owner !== null) this.data.select(owner);
        });
        this.tiles.set(rank, parts);
        this.element.append(parts.button);
      }
      const owner = this.data.owner(tile);
      this.fill(parts, tile, owner !== null && owner === selected, ranks.size);
    }
  }

  /** @param {any} parts @param {import("./types").Tile} tile @param {boolean} pressed @param {number} count */
  fill(parts, tile, pressed, count) {
    const { doing, mark } = tile;
    const at = tile.step === null ? "" : `step ${formatNumber(tile.step)}`;
    const step = tile.member === null ? at : `member ${tile.member}`;
    const use = [];
    if (tile.cpu_percent >= 0) use.push(`${tile.cpu_percent} % cpu`);
    if (this.withMemory) use.push(formatBytes(tile.rss_nbytes));
    const gpu = [];
    if (tile.gpu_own_nbytes) gpu.push(`${formatBytes(tile.gpu_own_nbytes)}, all`);
    if (tile.gpu_nbytes) gpu.push(formatBytes(tile.gpu_nbytes));
    if (tile.gpu_total_nbytes) gpu.push(`of ${formatBytes(tile.gpu_total_nbytes)}`);
    const { gpu_percent: percent = -1, gpu_celsius: celsius = -1 } = tile;
    if (percent >= 0) gpu.push(`${percent} %`);
    if (celsius >= 0) gpu.push(`${celsius} °C`);
    if (gpu.length) use.push(`gpu ${gpu.join(" ")}`);
    const { button } = parts;
    Object.assign(button.dataset, { state: tile.state, look: tile.look });
    const owner = this.data.owner(tile);
    button.style.setProperty("--ar-rank", owner === null ? "" : colour(owner, isDark()));
    button.setAttribute("aria-pressed", String(pressed));
    const said = [`rank ${tile.rank}`, doing, step, ...use, tile.device, tile.host && `${tile.host}, pid ${tile.pid}`, tile.line];
    button.title = said.filter(Boolean).join("\n");
    put(parts.more, (count > 16 ? said.slice(1) : said.slice(-3, -1)).filter(Boolean).join(", "));
    put(parts.state, count > 16 ? mark : `${mark} ${doing}${step ? ` · ${step}` : ""}`);
    put(parts.use, count > 16 ? "" : use.join(" · "));
    put(parts.line, count > 16 ? "" : tile.line);
  }
}
