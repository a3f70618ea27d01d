// The stage: a column for each rank, a cell for each value.

import { isDark, make } from "../../widgets/front/elements.js";

export class Stage {
  constructor() {
    this.element = make("table", { className: "ar-columns" });
  }

  // A frame as it stands: values, and what has just come.
  /** @param {import("./types").Frame} frame @param {import("./types").State["chunks"]} chunks */
  draw(frame, chunks) {
    const ranks = frame.values.length, count = frame.values[0].length;
    const head = make("tr", {}, make("td", { colSpan: 2 }), ...frame.values.map((_, rank) =>
      make("th", { scope: "col" }, `rank ${rank}`)));
    /** @type {HTMLElement[][]} */
    const cells = frame.values.map(() => []);
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

// The circle: ranks around it, each a ring of chunks that fill up as sums grow, and the pieces that
// travel between them. Colours are attributes, so that what is drawn can be saved as it is.

const SVG = "http://www.w3.org/2000/svg";
export const WIDTH = 640, HEIGHT = 540;
const FLIGHT_MS = 1400;
// Where on its way a piece rests when the round is over, so that a still picture shows it; where ways
// cross, near its end.
const REST = 0.62, REST_CROSSING = 0.8;
const FONT = "system-ui, sans-serif";
export const INKS = {
  light: { paper: "#ffffff", ink: "#1f1f1f", soft: "#616161", path: "#8c8c8c", fill: "#b9e5d6", edge: "#007a57",
    adds: "#b35c00", replaces: "#1a6fae" },
  dark: { paper: "#111111", ink: "#f2f2f2", soft: "#bdbdbd", path: "#7d7d7d", fill: "#0b5a43", edge: "#22c79a",
    adds: "#f0a830", replaces: "#56b4e9" },
};
const inks = () => INKS[isDark() ? "dark" : "light"];
export const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
/** @param {number} t */
export const ease = (t) => t * t * (3 - 2 * t);

/** @param {string} tag @param {Record<string, string | number>} [attributes] @param {...(Node | string)} children */
export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    element.setAttribute(name, String(typeof value === "number" ? Math.round(value * 100) / 100 : value));
  }
  element.append(...children);
  return element;
}

/** @typedef {import("./types").Way} Way */

export class Circle {
  constructor() {
    this.element = draw("svg", { class: "ar-circle", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img",
      "font-family": FONT, "font-size": 13, "text-anchor": "middle" });
    this.speed = 1;
    this.node = this.turn = this.bend = 0;
    /** @type {number[][]} */
    this.places = [];
    /** @type {Map<number, SVGElement>[]} */
    this.parts = [];
    /** @type {{ way: Way, element: SVGElement }[]} */
    this.pieces = [];
  }

  // All ranks as they are after a round, and what has travelled in it.
  /** @param {import("./types").State} state @param {number} at @param {import("./types").Ink} [ink] */
  show(state, at, ink = inks()) {
    this.land();
    this.paint(state, at, state.frames[at].messages, ink);
    this.put(state.chunks.length > 1 ? REST : REST_CROSSING);
    const last = state.frames.length - 1;
    this.element.setAttribute("aria-label", `a ${parents(state.frames) ? "tree" : "circle"} of ${state.frames[0].values.length}, `
      + (at ? `after round ${at} of ${last}` : "before the first round"));
  }

  // The pieces of a round on their way: true once they have arrived, false where something else is shown.
  /** @param {import("./types").State} state @param {number} at */
  async fly(state, at) {
    if (still()) { this.show(state, at); return true; }
    this.begin(state, at);
    const arrived = await new Promise((done) => {
      let passed = 0, before = performance.now();
      /** @param {number} now */
      const step = (now) => {
        passed += (now - before) * this.speed / FLIGHT_MS;
        before = now;
        this.put(ease(Math.min(1, passed)));
        if (passed < 1) this.turn = requestAnimationFrame(step); else done(true);
      };
      this.land = () => { cancelAnimationFrame(this.turn); done(false); this.land = () => {}; };
      this.turn = requestAnimationFrame(step);
    });
    if (arrived) this.show(state, at);
    return arrived;
  }

  /** @param {import("./types").State} state @param {number} at @param {import("./types").Ink} [ink] */
  begin(state, at, ink = inks()) {
    this.land();
    this.paint(state, at - 1, state.frames[at].messages, ink);
    this.put(0);
  }

  land() {}

  /** @param {import("./types").State} state @param {number} at @param {import("./types").Sent[]} messages @param {import("./types").Ink} ink */
  paint(state, at, messages, ink) {
    const frame = state.frames[at], ranks = frame.values.length;
    const node = ranks <= 4 ? 50 : ranks <= 8 ? 40 : 27;
    const radius = HEIGHT / 2 - node - (ranks <= 8 ? 30 : 24);
    this.node = node;
    const up = parents(state.frames);
    this.places = up ? treePlaces(up, ranks, node) : frame.values.map((_, rank) => {
      const angle = 2 * Math.PI * rank / ranks - (ranks === 2 ? Math.PI : Math.PI / 2);
      return [WIDTH / 2 + radius * Math.cos(angle), HEIGHT / 2 + radius * Math.sin(angle)];
    });
    // The path of neighbours on the circle is its arc, or close to it.
    this.bend = up ? 0.1 : Math.max(0.1, Math.min(0.3, Math.tan(Math.PI / 2 / ranks) / 2));
    /** @type {Map<string, Way>} */
    const ways = new Map();
    const way = (/** @type {{ sender: number, receiver: number }} */ { sender, receiver }) =>
      ways.get(`${sender} ${receiver}`) ?? this.way(sender, receiver);
    for (const { messages } of state.frames) {
      for (const { sender, receiver } of messages) ways.set(`${sender} ${receiver}`, this.way(sender, receiver));
    }
    const faint = [...ways.values()].map(({ path }) => draw("path", { d: path, fill: "none", stroke: ink.path, "stroke-width": 1 }));
    const pieces = messages.filter(({ start, stop }) => stop > start);
    const active = pieces.flatMap(({ sender, receiver, adds }) => this.arrow(way({ sender, receiver }), adds ? ink.adds : ink.replaces));
    const shown = at && messages === frame.messages ? pieces : [];
    const came = new Map(shown.map((one) => [`${one.receiver} ${one.start}`, one]));
    this.parts = frame.values.map(() => new Map());
    const nodes = frame.values.map((_, rank) => this.rank(state, frame, rank, came, ink));
    this.pieces = pieces.map((message) => ({ way: way(message), element: this.piece(state, message, ranks, ink) }));
    this.element.replaceChildren(...faint, ...active, ...nodes, ...this.pieces.map(({ element }) => element));
  }

  // From one rank's rim to another's, bent to the left, so that the way back is another one.
  /** @param {number} sender @param {number} receiver */
  way(sender, receiver) {
    const [a, b] = [this.places[sender], this.places[receiver]];
    const across = [b[0] - a[0], b[1] - a[1]], length = Math.hypot(...across);
    const middle = [(a[0] + b[0]) / 2 + 2 * this.bend * across[1], (a[1] + b[1]) / 2 - 2 * this.bend * across[0]];
    /** @param {number[]} from @param {number} room */
    const rim = (from, room) => {
      const toward = [middle[0] - from[0], middle[1] - from[1]], far = Math.hypot(...toward);
      return from.map((one, i) => one + toward[i] / far * (this.node + room));
    };
    const start = rim(a, 3), end = rim(b, Math.min(8, length / 12));
    const said = [start, middle, end].map((point) => point.map((one) => one.toFixed(1)).join(" "));
    /** @param {number} t */
    const at = (t) => start.map((one, i) => (1 - t) ** 2 * one + 2 * t * (1 - t) * middle[i] + t * t * end[i]);
    return { path: `M${said[0]}Q${said[1]} ${said[2]}`, at, end, toward: [end[0] - middle[0], end[1] - middle[1]] };
  }

  /** @param {import("./types").Way} options @param {string} colour */
  arrow({ path, end: [x, y], toward }, colour) {
    const angle = Math.atan2(toward[1], toward[0]) * 180 / Math.PI;
    return [draw("path", { d: path, fill: "none", stroke: colour, "stroke-width": 3 }),
      draw("path", { d: "M4 0L-9 -6.5L-9 6.5z", fill: colour, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)}) rotate(${angle.toFixed(1)})` })];
  }

  /** @param {import("./types").State} state @param {import("./types").Frame} frame @param {number} rank @param {Map<string, import("./types").Sent>} came @param {import("./types").Ink} ink */
  rank(state, frame, rank, came, ink) {
    const { chunks } = state, ranks = frame.values.length, [x, y] = this.places[rank], { node } = this;
    const inner = node * 0.44, turn = 2 * Math.PI / chunks.length;
    /** @type {SVGElement[]} */
    const marked = [];
    const group = draw("g", { transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` });
    chunks.forEach(([number, start, stop], index) => {
      const from = index * turn - Math.PI / 2, to = from + turn, share = frame.shares[rank][start] / ranks;
      const name = chunks.length > 1 ? `chunk ${number}` : "array";
      const title = draw("title", {}, `rank ${rank}, ${name}: ${frame.values[rank].slice(start, stop).join(", ")}; a sum over ${frame.shares[rank][start]} of ${ranks}`);
      const message = came.get(`${rank} ${start}`);
      const part = draw("g", { "data-rank": rank, "data-chunk": number, "data-share": share },
        title,
        draw("path", { d: sector(inner, node, from, to), fill: ink.paper, stroke: ink.soft }),
        draw("path", { d: sector(inner, inner + (node - inner) * share, from, to), fill: ink.fill, stroke: ink.edge, "stroke-width": share === 1 ? 2 : 1 }));
      if (message) marked.push(draw("path", { d: sector(inner, node, from, to), fill: "none", "stroke-width": 3.5, stroke: message.adds ? ink.adds : ink.replaces }));
      if (chunks.length > 1 && node * turn > 25) {
        const middle = (from + to) / 2, at = (inner + node) / 2;
        part.append(draw("text", { x: at * Math.cos(middle), y: at * Math.sin(middle) + 4, fill: ink.ink, "font-size": 12 }, String(number)));
      }
      this.parts[rank].set(number, part);
      group.append(part);
    });
    if (node > 45) group.append(draw("text", { y: -5, fill: ink.soft, "font-size": 11 }, "rank"));
    group.append(...marked, draw("text", { y: node > 45 ? 11 : 5, fill: ink.ink, "font-size": 15, "font-weight": 700 }, String(rank)));
    return group;
  }

  // What travels: its chunk, and its values where there is room.
  /** @param {import("./types").State} state @param {import("./types").Sent} message @param {number} ranks @param {import("./types").Ink} ink */
  piece(state, { chunk, start, received, adds }, ranks, ink) {
    const several = state.chunks.length > 1;
    const values = ranks > 8 ? "" : shorten(received.join(", "), ranks > 5 ? 8 : 16);
    const said = [several ? `${ranks > 8 ? "" : "chunk "}${chunk}` : "", values].filter(Boolean).join(": ") || shorten(received[0], 6);
    const width = 7 * said.length + 14;
    return draw("g", { class: "ar-piece", "data-start": start },
      draw("rect", { x: -width / 2, y: -12, width, height: 24, rx: 12, fill: ink.paper, stroke: adds ? ink.adds : ink.replaces, "stroke-width": 2 }),
      draw("text", { y: 4.5, fill: ink.ink, "font-size": 12.5 }, said));
  }

  // The pieces stand at this share of their ways.
  /** @param {number} t */
  put(t) {
    for (const { way, element } of this.pieces) {
      element.setAttribute("transform", `translate(${way.at(t).map((one) => one.toFixed(1)).join(" ")})`);
    }
  }

  // A rank is asked about: it is marked, and its chunks can be clicked.
  /** @param {number} rank @param {(chunk: number) => void} picked */
  ask(rank, picked) {
    const [x, y] = this.places[rank];
    this.element.append(draw("circle", { class: "ar-asked", cx: x, cy: y, r: this.node + 7, fill: "none",
      stroke: inks().ink, "stroke-width": 2, "stroke-dasharray": "6 4" }));
    for (const [number, part] of this.parts[rank]) {
      part.style.cursor = "pointer";
      part.addEventListener("click", () => picked(number));
    }
  }
}

// The parent of each rank where sums go up a tree, whose root has none; null where they take other ways.
/** @param {import("./types").Frame[]} frames @returns {Map<number, number> | null} */
export function parents(frames) {
  const up = new Map();
  for (const { sender, receiver, adds } of frames.flatMap(({ messages }) => messages)) {
    if (adds && up.has(sender)) return null;
    if (adds) up.set(sender, receiver);
  }
  return up.size === frames[0].values.length - 1 ? up : null;
}

// The root on top, each rank above its children.
/** @param {Map<number, number>} up @param {number} ranks @param {number} node */
export function treePlaces(up, ranks, node) {
  const all = Array.from({ length: ranks }, (_, rank) => rank);
  let leaves = 0, deepest = 0;
  /** @type {number[][]} */
  const found = [];
  /** @param {number} rank @param {number} depth */
  const place = (rank, depth) => {
    const children = all.filter((child) => up.get(child) === rank);
    for (const child of children) place(child, depth + 1);
    const columns = children.map((child) => found[child][0]);
    found[rank] = [children.length ? (columns[0] + columns[columns.length - 1]) / 2 : leaves++, depth];
    deepest = Math.max(deepest, depth);
  };
  place(all.find((rank) => !up.has(rank)) ?? 0, 0);
  const room = node + 26, wide = (WIDTH - 2 * room) / Math.max(1, leaves - 1), high = (HEIGHT - 2 * room) / Math.max(1, deepest);
  return found.map(([column, depth]) => [leaves > 1 ? room + column * wide : WIDTH / 2, room + depth * high]);
}

// A part of a ring, between two radii and two angles.
/** @param {number} inner @param {number} outer @param {number} from @param {number} to */
function sector(inner, outer, from, to) {
  if (to - from > 6.2) return `${round(outer, 1)}${round(inner, 0)}`;
  const large = to - from > Math.PI ? 1 : 0;
  /** @param {number} radius @param {any} angle */
  const at = (radius, angle) => `${(radius * Math.cos(angle)).toFixed(2)} ${(radius * Math.sin(angle)).toFixed(2)}`;
  return `M${at(outer, from)}A${outer} ${outer} 0 ${large} 1 ${at(outer, to)}`
    + `L${at(inner, to)}A${inner} ${inner} 0 ${large} 0 ${at(inner, from)}z`;
}

/** @param {number} radius @param {number} sweep */
const round = (radius, sweep) => `M${radius} 0A${radius} ${radius} 0 0 ${sweep} ${-radius} 0A${radius} ${radius} 0 0 ${sweep} ${radius} 0z`;

/** @param {string} text @param {number} most */
const shorten = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
