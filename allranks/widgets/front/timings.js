// Timings: waiting against transfer for each rank, the straggler, and every kind of call.

class TimingsPanel {
  constructor(data) {
    this.data = data;
    this.bars = make("div", { className: "ar-bars" });
    this.cause = make("p", { className: "ar-cause" });
    this.straggler = make("p", { className: "ar-straggler" });
    this.table = make("table", { className: "ar-table" });
    const key = (kind, text) => make("span", {}, make("i", { className: `ar-swatch ar-${kind}` }), text);
    this.element = make("div", { className: "ar-timings" }, this.cause,
      make("div", { className: "ar-bar" }, key("wait", "waiting for other ranks"), key("transfer", "transfer")),
      this.bars, this.straggler, make("div", { className: "ar-scroll" }, this.table));
  }

  get filled() { return Boolean(this.data.timings); }

  draw() {
    const { timings, selected } = this.data;
    if (!timings || (timings === this.drawn && selected === this.chosen)) return;
    this.drawn = timings;
    this.chosen = selected;
    const most = Math.max(...timings.ranks.map((row) => row.wait_seconds + row.transfer_seconds)) || 1;
    this.bars.classList.toggle("ar-many", timings.ranks.length > 16);
    this.bars.replaceChildren(...timings.ranks.map(({ rank, calls, wait_seconds: wait, transfer_seconds: transfer }) => {
      const bar = make("div", { className: "ar-track" }, part("wait", wait / most), part("transfer", transfer / most));
      const words = `${formatSeconds(wait)} + ${formatSeconds(transfer)}`;
      const row = make("div", { className: "ar-bar-row", role: "img",
        "aria-label": `rank ${rank}: waited ${formatSeconds(wait)}, transferred ${formatSeconds(transfer)} in ${calls} calls` },
        make("span", { className: "ar-who" }, `rank ${rank}`), bar, make("span", {}, words));
      row.classList.toggle("ar-faded", selected !== null && selected !== rank);
      return row;
    }));
    put(this.cause, timings.cause ?? "");
    put(this.straggler, timings.straggler);
    this.drawTable(timings.calls);
  }

  drawTable(calls) {
    const peak = Math.max(...calls.map((call) => call.best_gbps ?? 0));
    const head = make("tr", {}, ...["call", "name", "dtype", "size", "calls", "waiting", "transfer", "busbw", "best"]
      .map((text) => make("th", { scope: "col" }, text)));
    const rows = calls.map((call) => {
      const bandwidth = call.busbw_gbps;
      const cells = [call.op, call.name, call.dtype, formatBytes(call.nbytes), call.calls.toLocaleString("en"),
        formatSeconds(call.wait_seconds), formatSeconds(call.transfer_seconds), formatBandwidth(bandwidth),
        formatBandwidth(call.best_gbps)];
      const row = make("tr", {}, ...cells.map((text) => make("td", {}, text)));
      if (bandwidth && peak) row.children[7].style.setProperty("--ar-share", `${100 * Math.min(1, bandwidth / peak)}%`);
      return row;
    });
    this.table.replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
  }
}

function part(kind, share) {
  const element = make("i", { className: `ar-${kind}` });
  element.style.width = `${100 * share}%`;
  return element;
}
