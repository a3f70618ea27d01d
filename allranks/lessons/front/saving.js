// Saving: a round as SVG, and all of them as a moving picture (APNG, which every browser plays).

import { Circle, HEIGHT, INKS, WIDTH, draw, ease } from "./circle.js";
import { make, put } from "../../widgets/front/elements.js";

const FILM_FRAMES = 120, FILM_STEPS = 12, STEP_MS = 90, REST_MS = 1200;
const HEAD = 44;

// A picture that needs nothing else: on paper of its own, with its title.
/** @param {import("./circle.js").Circle} circle @param {string} title @param {string} words */
function pictured(circle, title, words) {
  const { paper, ink, soft } = INKS.light, picture = /** @type {SVGElement} */ (circle.element.cloneNode(true));
  picture.removeAttribute("class");
  for (const [name, value] of [["viewBox", `0 ${-HEAD} ${WIDTH} ${HEIGHT + HEAD}`], ["width", WIDTH], ["height", HEIGHT + HEAD]]) {
    picture.setAttribute(String(name), String(value));
  }
  picture.prepend(draw("rect", { y: -HEAD, width: WIDTH, height: HEIGHT + HEAD, fill: paper }),
    draw("text", { x: WIDTH / 2, y: 20 - HEAD, fill: ink, "font-weight": 700, "font-size": 14 }, title),
    draw("text", { x: WIDTH / 2, y: 38 - HEAD, fill: soft }, words));
  return new XMLSerializer().serializeToString(picture);
}

/** @param {import("./types").State} state @param {number} at */
function svgOf(state, at) {
  const circle = new Circle();
  circle.show(state, at, INKS.light);
  return pictured(circle, state.title, roundWords(state, at));
}

/** @param {import("./types").State} state @param {number} at */
export const roundWords = (state, at) => (at ? `round ${at} of ${state.frames.length - 1}: ${state.frames[at].phase}`
  : `start, ${state.frames.length - 1} rounds`);

// Every round with its pieces on their way, as [svg, milliseconds].
/** @param {import("./types").State} state @returns {Generator<[string, number]>} */
function* filmed(state) {
  const circle = new Circle(), last = state.frames.length - 1;
  const steps = Math.max(2, Math.min(FILM_STEPS, Math.floor(FILM_FRAMES / last)));
  yield [svgOf(state, 0), REST_MS];
  for (let at = 1; at <= last; at++) {
    circle.begin(state, at, INKS.light);
    for (let step = 0; step < steps; step++) {
      circle.put(ease(step / steps));
      yield [pictured(circle, state.title, roundWords(state, at)), STEP_MS];
    }
    yield [svgOf(state, at), at === last ? 2 * REST_MS : REST_MS];
  }
}

/** @param {import("./types").State} state @param {(share: number) => void} told */
async function film(state, told) {
  const canvas = make("canvas", { width: WIDTH, height: HEIGHT + HEAD }), paint = canvas.getContext("2d", { willReadFrequently: true });
  const frames = [], all = [...filmed(state)];
  let before = null;
  if (!paint) throw new Error("expected a page that can draw pictures, found none");
  for (const [svg, ms] of all) {
    const image = new Image();
    image.src = `data:image/svg+xml,${encodeURIComponent(svg)}`;
    await image.decode();
    paint.drawImage(image, 0, 0);
    const now = paint.getImageData(0, 0, canvas.width, canvas.height);
    frames.push({ data: await packed(before ? changed(before, now) : now), ms });
    before = now;
    told(frames.length / all.length);
  }
  return animated(frames, canvas.width, canvas.height);
}

// What is as before becomes transparent: a film is a tenth of the size.
/** @param {ImageData} before @param {ImageData} now */
function changed(before, now) {
  const was = new Uint32Array(before.data.buffer), is = new Uint32Array(now.data.buffer);
  return new ImageData(new Uint8ClampedArray(is.map((pixel, i) => (pixel === was[i] ? 0 : pixel)).buffer), now.width);
}

// Rows of pixels as PNG has them, each behind a 0, compressed.
/** @param {ImageData} options */
async function packed({ data, width, height }) {
  const rows = new Uint8Array(height * (4 * width + 1));
  for (let y = 0; y < height; y++) rows.set(data.subarray(4 * width * y, 4 * width * (y + 1)), y * (4 * width + 1) + 1);
  const packing = new Blob([rows]).stream().pipeThrough(new CompressionStream("deflate"));
  return new Uint8Array(await new Response(packing).arrayBuffer());
}

// Pictures one after the other in one file, as the third edition of the PNG specification has it.
/** @param {{ data: Uint8Array, ms: number }[]} frames @param {number} width @param {number} height */
function animated(frames, width, height) {
  const parts = [new Uint8Array([137, 80, 78, 71, 13, 10, 26, 10])];
  let number = 0;
  parts.push(chunk("IHDR", joined(words(width, height), [8, 6, 0, 0, 0])), chunk("acTL", words(frames.length, 0)));
  frames.forEach(({ data, ms }, index) => {
    // The last 1: over what is there.
    const time = [ms >> 8, ms & 255, 1000 >> 8, 1000 & 255, 0, 1];
    parts.push(chunk("fcTL", joined(words(number++, width, height, 0, 0), time)));
    parts.push(index ? chunk("fdAT", joined(words(number++), data)) : chunk("IDAT", data));
  });
  parts.push(chunk("IEND", []));
  return new Blob(parts, { type: "image/png" });
}

/** @param {...Iterable<number>} parts */
const joined = (...parts) => new Uint8Array(parts.flatMap((part) => [...part]));

/** @param {...number} numbers */
function words(...numbers) {
  const view = new DataView(new ArrayBuffer(4 * numbers.length));
  numbers.forEach((number, i) => view.setUint32(4 * i, number));
  return new Uint8Array(view.buffer);
}

/** @param {string} type @param {Uint8Array | number[]} data */
function chunk(type, data) {
  const named = joined([...type].map((letter) => letter.charCodeAt(0)), data);
  return joined(words(data.length), named, words(crc(named)));
}

const CRC = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let k = 0; k < 8; k++) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1;
  return n >>> 0;
});

/** @param {Uint8Array} bytes */
function crc(bytes) {
  let sum = 0xffffffff;
  for (const byte of bytes) sum = CRC[(sum ^ byte) & 255] ^ (sum >>> 8);
  return (sum ^ 0xffffffff) >>> 0;
}

/** @param {Blob} blob @param {string} name */
function download(blob, name) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// The two buttons of a player.
/** @param {import("./player.js").Player} player */
export function savers(player) {
  const name = () => `allreduce-${player.state.algorithm.replaceAll(" ", "-")}-${player.state.frames[0].values.length}-ranks`;
  const svg = player.button("save SVG", "save SVG: this round as a picture", () =>
    download(new Blob([svgOf(player.state, player.at)], { type: "image/svg+xml" }), `${name()}-round-${player.at}.svg`));
  const moving = player.button("save film", "save film: all rounds as a moving picture, APNG", async () => {
    if (moving.disabled) return;
    moving.disabled = true;
    try {
      /** @param {any} share */
      const told = (share) => put(moving, `saving ${Math.round(100 * share)} %`);
      const { state } = player, as = `${name()}.png`;
      download(await film(state, told), as);
    } finally {
      put(moving, "save film");
      moving.disabled = false;
    }
  });
  return [svg, moving];
}
