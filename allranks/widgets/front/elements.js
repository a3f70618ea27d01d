// Elements of the page: they are made, and changed only where something has changed.


// An element with properties, attributes (aria-…, data-…, role) and children.
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

export const isDark = () => document.body.dataset.jpThemeLight === "false"
  || (!document.body.dataset.jpThemeLight && matchMedia("(prefers-color-scheme: dark)").matches);

export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Pictures and tables that the kernel has drawn.
export function putHtml(element, html) {
  if (html === element.shown) return;
  element.shown = html;
  element.innerHTML = html;
  for (const table of element.querySelectorAll("table")) table.className = "ar-table";
}

// A part of a bar.
export function part(kind, share) {
  const element = make("i", { className: `ar-${kind}` });
  element.style.width = `${100 * share}%`;
  return element;
}

// A list of names to choose from.
export class Choice {
  constructor(label, none, changed) {
    this.none = none;
    this.select = make("select", {});
    this.element = make("label", {}, `${label} `, this.select);
    this.select.addEventListener("change", () => { this.chosen = true; changed(); });
  }

  get value() { return this.select.value; }

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
