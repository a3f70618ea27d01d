// The stage: a column for each rank, a cell for each value.

class Stage {
  constructor() {
    this.element = make("table", { className: "ar-columns" });
  }

  // A frame as it stands: values, and what has just come.
  draw(frame, chunks) {
    const ranks = frame.values.length, count = frame.values[0].length;
    const head = make("tr", {}, make("td", { colSpan: 2 }), ...frame.values.map((_, rank) =>
      make("th", { scope: "col" }, `rank ${rank}`)));
    const cells = frame.values.map(() => []), rows = [];
    for (let place = 0; place < count; place++) {
      const row = make("tr", {}), chunk = chunks.find(([, start]) => start === place);
      if (chunk) {
        const [number, start, stop] = chunk, name = stop - start < count ? `chunk ${number}` : "array";
        row.append(make("th", { scope: "rowgroup", rowSpan: stop - start }, name));
        row.classList.add("ar-chunk");
      }
      row.append(make("th", { scope: "row" }, String(place)));
      for (let rank = 0; rank < ranks; rank++) {
        const cell = make("td", {}, frame.values[rank][place]), share = frame.shares[rank][place] / ranks;
        cell.style.setProperty("--ar-share", `${100 * share}%`);
        cell.classList.toggle("ar-whole", share === 1);
        row.append(cell);
        cells[rank].push(cell);
      }
      rows.push(row);
    }
    for (const message of frame.messages) {
      for (let place = message.start; place < message.stop; place++) {
        const cell = cells[message.receiver][place], i = place - message.start;
        cell.classList.add(message.adds ? "ar-added" : "ar-replaced");
        cell.title = message.adds ? `${message.before[i]} + ${message.received[i]} = ${message.after[i]}`
          : `${message.before[i]} becomes ${message.after[i]}`;
      }
    }
    this.element.replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
  }
}
