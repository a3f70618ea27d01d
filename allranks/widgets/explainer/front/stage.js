// The stage: a column for each rank, a cell for each value, arrows for what travels.

const FLIGHT_MS = 900;
const SVG = "http://www.w3.org/2000/svg";
const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

class Stage {
  constructor() {
    this.arrows = document.createElementNS(SVG, "svg");
    this.arrows.setAttribute("class", "ar-arrows");
    this.arrows.setAttribute("aria-hidden", "true");
    this.table = make("table", { className: "ar-columns" });
    this.air = make("div", { className: "ar-air", "aria-hidden": "true" });
    this.element = make("div", { className: "ar-stage" }, this.arrows, this.table, this.air);
    this.flights = [];
  }

  // A frame as it stands: values, what has just come, and from where.
  draw(frame, chunks = this.chunks) {
    this.land();
    this.chunks = chunks;
    const ranks = frame.values.length, count = frame.values[0].length;
    const head = make("tr", {}, make("td", { colSpan: 2 }), ...frame.values.map((_, rank) =>
      make("th", { scope: "col" }, `rank ${rank}`)));
    this.cells = frame.values.map(() => []);
    const rows = [];
    for (let place = 0; place < count; place++) {
      const row = make("tr", {}), chunk = chunks.find(([, start]) => start === place);
      if (chunk) {
        const [number, start, stop] = chunk, name = stop - start < count ? `chunk ${number}` : "array";
        row.append(make("th", { scope: "rowgroup", rowSpan: stop - start }, name));
        row.classList.add("ar-chunk");
      }
      row.append(make("th", { scope: "row" }, String(place)));
      for (let rank = 0; rank < ranks; rank++) {
        const cell = make("td", {}, frame.values[rank][place]);
        const share = frame.shares[rank][place] / ranks;
        cell.style.setProperty("--ar-share", `${100 * share}%`);
        cell.classList.toggle("ar-whole", share === 1);
        row.append(cell);
        this.cells[rank].push(cell);
      }
      rows.push(row);
    }
    this.table.replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
    for (const message of frame.messages) {
      for (let place = message.start; place < message.stop; place++) {
        const cell = this.cells[message.receiver][place];
        cell.classList.add(message.adds ? "ar-added" : "ar-replaced");
        const i = place - message.start;
        cell.title = message.adds ? `${message.before[i]} + ${message.received[i]} = ${message.after[i]}`
          : `${message.before[i]} becomes ${message.after[i]}`;
      }
    }
    this.heads = [...head.children].slice(1);
    this.drawArrows(frame.messages);
  }

  drawArrows(messages) {
    const width = this.element.scrollWidth, foot = 40;
    const drawn = messages.map(({ sender, receiver, adds }) => {
      const [from, to] = [sender, receiver].map((rank) => {
        const { left, width } = this.place(this.heads[rank]);
        return left + width / 2;
      });
      const shift = from < to ? 5 : -5, top = foot - 1.5 * Math.min(26, 12 + Math.abs(to - from) / 16);
      const path = document.createElementNS(SVG, "path"), end = to - shift;
      path.setAttribute("d", `M${from + shift} ${foot}Q${(from + to) / 2} ${top} ${end} ${foot}`
        + `M${end - (shift > 0 ? 6 : -6)} ${foot - 5}L${end} ${foot}L${end + (shift > 0 ? 2 : -2)} ${foot - 7}`);
      path.setAttribute("class", adds ? "ar-added" : "ar-replaced");
      return path;
    });
    this.arrows.setAttribute("width", width);
    this.arrows.replaceChildren(...drawn);
  }

  // Shows a frame by letting what came fly from its senders; true once it stands as drawn.
  async fly(frame) {
    if (still() || !this.cells) { this.draw(frame); return true; }
    this.land();
    this.drawArrows(frame.messages);
    const flights = [];
    for (const { sender, receiver, start, stop, received } of frame.messages) {
      for (let place = start; place < stop; place++) {
        const from = this.place(this.cells[sender][place]), to = this.place(this.cells[receiver][place]);
        const chip = make("span", {}, received[place - start]);
        for (const [name, value] of Object.entries(from)) chip.style[name] = `${value}px`;
        this.air.append(chip);
        const path = [{ transform: "none" }, { transform: `translate(${to.left - from.left}px, ${to.top - from.top}px)` }];
        flights.push(chip.animate(path, { duration: FLIGHT_MS, easing: "ease-in-out", fill: "forwards" }));
      }
    }
    this.flights = flights;
    try { await Promise.all(flights.map((one) => one.finished)); } catch { return false; }
    this.draw(frame);
    return true;
  }

  // Where something stands on the stage, in pixels.
  place(element) {
    const { left, top, width, height } = element.getBoundingClientRect();
    const stage = this.element.getBoundingClientRect();
    return { left: left - stage.left, top: top - stage.top, width, height };
  }

  // What is in the air is gone.
  land() {
    for (const flight of this.flights) flight.cancel();
    this.flights = [];
    this.air.replaceChildren();
  }
}
