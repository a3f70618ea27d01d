// The pages of the documentation, which are installed beside this extension, as JupyterLab renders Markdown.

const FIRST = "docs/index.md";
const BESIDE = new URL("..", import.meta.url);
// The others need the tools that make the documentation's site, or a checkout.
const INSTALLED = /^(README|docs\/\w+)\.md$/;
const PICTURE = /(!\[[^\]]*\]\(|<img src=")(?![a-z]+:)([^)"]+)/g;

/** @typedef {{ page: string, anchor: string }} Place */

/**
 * The place to which a link leads, null if it leads out of the installed pages.
 *
 * @param {string} href @param {string} page the page with the link, for example "docs/cells.md"
 * @returns {Place | null}
 */
export const target = (href, page) => {
  const root = "https://pages.invalid/";
  const url = new URL(href, `${root}${page}`);
  const path = url.pathname.slice(1);
  return url.href.startsWith(root) && INSTALLED.test(path) ? { page: path, anchor: decodeURIComponent(url.hash.slice(1)) } : null;
};

/**
 * The name by which a link leads to a heading.
 *
 * @param {string} heading
 */
export const anchorOf = (heading) => heading.toLowerCase().replace(/[^\p{L}\p{N}_\- ]/gu, "").replaceAll(" ", "-");

// JupyterLab's own classes, which have no types here.
/** @param {Record<string, any>} packages */
export const makeHelp = ({ MainAreaWidget, MimeModel, ToolbarButton, Widget }) => {
  class Page extends Widget {
    /** @param {any} rendermime @param {any} trans */
    constructor(rendermime, trans) {
      super();
      Object.assign(this, { rendermime, trans });
      /** @type {Place[]} */
      this.before = [];
      /** @type {Place} */
      this.place = { page: FIRST, anchor: "" };
      this.addClass("jp-allranks-help");
      this.node.tabIndex = 0;
      this.node.onclick = (/** @type {MouseEvent} */ event) => this.follow(event);
      void this.show();
    }

    /** @param {MouseEvent} event */
    follow(event) {
      const link = event.target instanceof Element ? event.target.closest("a[href]") : null;
      const place = link && target(link.getAttribute("href") ?? "", this.place.page);
      if (!place) return;
      event.preventDefault();
      this.go(place);
    }

    /** @param {Place} place */
    go(place) {
      this.before.push(this.place);
      this.place = place;
      void this.show();
    }

    back() {
      const place = this.before.pop();
      if (!place) return;
      this.place = place;
      void this.show();
    }

    async show() {
      const { place } = this;
      const address = new URL(place.page, BESIDE);
      const answer = await fetch(address).catch(() => null);
      const missing = answer?.status === 404 ? this.trans.__("The documentation is not installed at %1. Install the package again.", address.href)
        : this.trans.__("Jupyter's server did not send %1. Open the page again when it answers.", address.href);
      const text = answer?.ok ? await answer.text() : missing;
      const source = text.replace(PICTURE, (/** @type {string} */ _, /** @type {string} */ before, /** @type {string} */ path) => `${before}${new URL(path, address)}`);
      const rendered = this.rendermime.createRenderer("text/markdown");
      await rendered.renderModel(new MimeModel({ data: { "text/markdown": source } }));
      // Another link was followed meanwhile, or the page was closed.
      if (place !== this.place || this.isDisposed) {
        rendered.dispose();
        return;
      }
      this.prepare(rendered.node, place.page);
      this.rendered?.dispose();
      this.rendered = rendered;
      Widget.attach(rendered, this.node);
      const headings = [...rendered.node.querySelectorAll("h1, h2, h3, h4")];
      const heading = headings.find(({ textContent }) => anchorOf(textContent.trim()) === place.anchor);
      if (heading) heading.scrollIntoView();
      else this.node.scrollTop = 0;
    }

    /** @param {HTMLElement} node @param {string} page */
    prepare(node, page) {
      for (const mark of node.querySelectorAll(".jp-InternalAnchorLink")) mark.remove();
      for (const link of node.querySelectorAll("a[href]")) {
        const href = link.getAttribute("href") ?? "";
        // To a part of the checkout that is not installed.
        if (!/^[a-z]+:/.test(href) && !target(href, page)) link.replaceWith(...link.childNodes);
      }
    }

    dispose() {
      if (this.isDisposed) return;
      this.rendered?.dispose();
      super.dispose();
    }
  }

  /**
   * Makes the widget of the main area with the documentation.
   *
   * @param {any} rendermime @param {any} trans
   */
  return (rendermime, trans) => {
    const content = new Page(rendermime, trans);
    const made = new MainAreaWidget({ content });
    made.id = "allranks-help";
    made.title.label = trans.__("allranks");
    made.title.closable = true;
    made.toolbar.addItem("all", new ToolbarButton({ label: trans.__("All pages"), onClick: () => content.go({ page: FIRST, anchor: "" }) }));
    made.toolbar.addItem("back", new ToolbarButton({ label: trans.__("Back"), onClick: () => content.back() }));
    return made;
  };
};
