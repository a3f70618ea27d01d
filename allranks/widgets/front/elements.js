// Elements of the page: they are made, and changed only where something has changed.


// An element with properties, attributes (aria-…, data-…, role) and children.
/**
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag @param {Record<string, any>} [properties] @param {...(Node | string)} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else Reflect.set(element, name, value);
  }
  element.append(...children);
  return element;
}

/** @param {string} tag @param {Record<string, any>} attributes @param {...(Node | string)} children */
export function shape(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

export const isDark = () => document.body.dataset.jpThemeLight === "false"
  || (!document.body.dataset.jpThemeLight && matchMedia("(prefers-color-scheme: dark)").matches);

/** @param {HTMLElement} element @param {string} text */
export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** @type {WeakMap<HTMLElement, string>} */
const shown = new WeakMap();

// Pictures and tables that the kernel has drawn.
/** @param {HTMLElement} element @param {string} [html] */
export function putHtml(element, html = "") {
  if (html === shown.get(element)) return;
  shown.set(element, html);
  element.innerHTML = html;
  for (const table of element.querySelectorAll("table")) table.className = "ar-table";
}

// A part of a bar.
/** @param {string} kind @param {number} share */
export function part(kind, share) {
  const element = make("i", { className: `ar-${kind}` });
  element.style.width = `${100 * share}%`;
  return element;
}

// A list of names to choose from.
export class Choice {
  /** @param {string} label @param {string} none @param {() => void} changed */
  constructor(label, none, changed) {
    this.none = none;
    this.said = "";
    this.chosen = false;
    this.select = make("select", {});
    this.element = make("label", {}, `${label} `, this.select);
    this.select.addEventListener("change", () => { this.chosen = true; changed(); });
  }

  get value() { return this.select.value; }

  /** @param {string[]} names @param {string} wanted */
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
