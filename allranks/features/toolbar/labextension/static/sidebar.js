// The sidebar with the ranks of the current notebook, in JupyterLab's collapsible sections.

/** @typedef {import("./notebook_ranks.js").Ranks} Ranks */
/** @typedef {any} Panel a notebook in the page */

const SIZES = [2, 4, 8];

const MOST_LINKS = 128;

const megabytes = (/** @type {[number, number]} */ [least, most]) => {
  const [from, to] = [least, most].map((nbytes) => Math.round(nbytes / 1e6));
  return to === 0 ? "" : `${from === to ? "" : `${from}–`}${to} MB`;
};

// React's and JupyterLab's own classes have no types here.
/** @param {Record<string, any>} packages */
export const makeSidebar = ({ ReactWidget, SidePanel, createElement: h }) => {
  /** A part of the sidebar; `render` returns React's elements. */
  class Section extends ReactWidget {
    /** @param {string} title @param {() => unknown} render */
    constructor(title, render, onShow = () => {}) {
      super();
      this.title.label = title;
      this.draw = render;
      this.onShow = onShow;
      this.addClass("jp-allranks-section");
      // It scrolls, also by keyboard.
      this.node.tabIndex = 0;
    }

    /** @param {unknown} message */
    onAfterShow(message) {
      super.onAfterShow?.(message);
      this.onShow();
    }

    render() {
      return this.draw();
    }
  }

  const table = (/** @type {string[]} */ names, /** @type {unknown} */ rows) => h(
    "table", null,
    h("thead", null, h("tr", null, names.map((name) => h("th", { key: name, scope: "col" }, name)))),
    h("tbody", null, rows),
  );

  const name = (/** @type {Ranks} */ ranks) => ranks.context.localPath.split("/").at(-1);

  return class Sidebar extends SidePanel {
    /**
     * `current` returns the ranks of the current notebook or null, `others` those of the other notebooks with their panels.
     *
     * @param {any} app @param {() => Ranks | null} current @param {() => [Ranks, Panel][]} others @param {any} translator
     */
    constructor(app, current, others, translator) {
      super({ translator });
      this.trans = translator.load("allranks");
      this.app = app;
      this.current = current;
      this.others = others;
      this.id = "allranks-ranks";
      this.title.caption = this.trans.__("Ranks");
      this.addClass("jp-allranks-sidebar");
      this.node.setAttribute("role", "region");
      this.node.setAttribute("aria-label", this.trans.__("Ranks of the notebook"));
      this.head = new Section("", () => this.renderHead());
      this.header.addWidget(this.head);
      const t = (/** @type {string} */ text) => this.trans.__(text);
      this.pauses = new Section(t("Paused in the debugger"), () => this.renderPauses());
      this.ranks = new Section(t("Ranks"), () => this.renderRanks());
      this.variables = new Section(t("Variables"), () => this.renderVariables(), () => void this.current()?.ask());
      this.command = new Section(t("Last command"), () => h("pre", null, this.current()?.text.trim() ?? ""));
      this.clusters = new Section(t("Other notebooks with ranks"), () => this.renderOthers());
      // The ranks compare their variables while that section is open.
      this.variables.isClosed = true;
      this.command.isClosed = true;
      // The header grows and shrinks with its buttons, which no message says.
      this.observer = new ResizeObserver(() => this.content.update());
      this.observer.observe(this.content.node);
      this.content.expansionToggled.connect(this.share, this);
      this.sections = [this.pauses, this.ranks, this.variables, this.command, this.clusters];
      this.refresh();
    }

    get comparesVariables() {
      return this.variables.isVisible;
    }

    /** @param {unknown} message */
    onAfterShow(message) {
      super.onAfterShow(message);
      void this.current()?.ask();
    }

    /** Draws what has changed. */
    refresh() {
      const ranks = this.current();
      const needed = new Map([
        [this.pauses, Boolean(ranks?.debugger.pauses.length)],
        [this.ranks, Boolean(ranks?.size)],
        [this.variables, Boolean(ranks?.size)],
        [this.command, Boolean(ranks?.text)],
        [this.clusters, this.others().length > 0],
      ]);
      const before = this.content.widgets.length;
      let place = 0;
      for (const section of this.sections) {
        const isNew = needed.get(section) && section.parent === null;
        if (isNew) {
          section.show();
          this.content.insertWidget(place, section);
        }
        if (isNew && section.isClosed) this.content.collapse(place);
        if (!needed.get(section) && section.parent !== null) {
          section.isClosed = section.isHidden;
          section.parent = null;
        }
        if (needed.get(section)) place += 1;
        section.update();
      }
      if (this.content.widgets.length !== before) this.share();
      this.head.update();
    }

    /** Gives open sections the same height. */
    share() {
      this.content.setRelativeSizes(this.content.widgets.map((/** @type {any} */ section) => (section.isHidden ? 0 : 1)));
    }

    dispose() {
      this.observer.disconnect();
      for (const section of this.sections) section.dispose();
      super.dispose();
    }

    /** @param {string} label @param {string} command @param {object} args */
    button(label, command, args = {}) {
      const id = `allranks:${command}`;
      if (!this.app.commands.isEnabled(id, args)) return null;
      return h("button", { key: label, onClick: () => void this.app.commands.execute(id, args) }, label);
    }

    renderHead() {
      const { commands } = this.app;
      const ranks = this.current();
      const { trans } = this;
      if (ranks === null) return h("p", null, trans.__("Open a notebook to start ranks."));
      const said = ranks.size && !ranks.doing ? ranks.place : ranks.title;
      const starts = ranks.size ? [] : SIZES.map((n) => this.button(trans.__("Start %1", n), "start", { n }));
      return h(
        "div", { className: "jp-allranks-head" },
        h("h2", null, name(ranks)),
        h("p", null, ranks.python ? said : trans.__("Ranks need a Python kernel.")),
        h(
          "div", { className: "jp-allranks-buttons" },
          starts,
          this.button(ranks.size ? trans.__("Restart with …") : trans.__("Start …"), "start"),
          ranks.runs || ranks.doing || ranks.busyBeside ? this.button(trans.__("Interrupt"), "interrupt") : null,
          this.button(trans.__("Restart"), "restart"),
          this.button(trans.__("Stop"), "stop"),
          this.button(trans.__("Write the start as the first cell"), "write-start"),
        ),
        ranks.state?.interrupt && h("p", { role: "status" }, ranks.state.interrupt),
        ranks.state !== null && ranks.size > 0 && h(
          "label", null,
          h("input", {
            type: "checkbox",
            checked: ranks.state.every_cell,
            disabled: !commands.isEnabled("allranks:every-cell"),
            onChange: () => void commands.execute("allranks:every-cell"),
          }),
          commands.label("allranks:every-cell"),
        ),
      );
    }

    renderRanks() {
      const ranks = this.current();
      const { rows: found } = ranks?.state ?? {};
      if (!ranks?.state || !found) return null;
      const { trans } = this;
      const { state } = ranks;
      const rows = found.flatMap((row, at) => {
        const host = row.host !== found[at - 1]?.host && state.hosts.length > 1
          ? [h("tr", { key: `${row.host} ${row.ranks}` }, h("th", { colSpan: 4, scope: "colgroup" }, row.host))] : [];
        const processes = trans.__("processes on %1: %2", row.host, row.processes);
        const className = row.is_bad ? "jp-allranks-bad" : "";
        return [
          ...host,
          h(
            "tr", { key: row.ranks, className: "jp-allranks-rank" },
            h("td", { title: processes }, row.ranks),
            h("td", { title: row.device }, row.device),
            h("td", null, megabytes(row.nbytes)),
            h("td", { className, title: row.state }, row.state),
          ),
          // Always there, so that the rows below do not move.
          h("tr", { key: `${row.ranks} detail` }, h("td", { colSpan: 4, className: `jp-allranks-line${row.is_bad ? " jp-allranks-whole" : ""}`, title: row.detail }, row.detail || "\u00a0")),
        ];
      });
      return h(
        "div", null,
        h("p", { className: "jp-allranks-summary" }, state.summary),
        table(["rank", "device", "memory", "state"].map((word) => trans.__(word)), rows),
        h("h3", null, trans.__("Logs")),
        h("pre", null, state.logs),
        h("div", { className: "jp-allranks-logs" }, Array.from({ length: Math.min(state.size, MOST_LINKS) }, (_, rank) => h(
          "button", { key: rank, title: trans.__("Open the log of rank %1 as text", rank), onClick: () => ranks.openLog(rank) }, trans.__("rank %1", rank),
        ))),
      );
    }

    // The debugger's list of ranks: a click chooses the one that it shows.
    renderPauses() {
      const ranks = this.current();
      if (!ranks) return null;
      const { trans } = this;
      const { pauses, shown, only, notice } = ranks.debugger;
      const steps = [[trans.__("Step all ranks"), false], [trans.__("Step rank %1 only", shown), true]];
      return h(
        "div", { className: "jp-allranks-list" },
        h("p", { role: "status" }, notice),
        h("ul", null, pauses.map(({ rank, place }) => h("li", { key: rank }, h(
          "button", { title: place, "aria-pressed": rank === shown, onClick: () => void ranks.choose(rank, only) },
          h("span", null, trans.__("rank %1", rank)),
          h("code", null, place),
        )))),
        shown !== null && h("div", { className: "jp-allranks-buttons" }, steps.map(([text, alone]) => h(
          "button", { key: text, "aria-pressed": alone === only, onClick: () => void ranks.choose(shown, alone) }, text,
        ))),
      );
    }

    renderVariables() {
      const ranks = this.current();
      if (!ranks) return null;
      const { trans } = this;
      const rows = ranks.variables.map(({ name, value, state, each }) => {
        const differs = state.startsWith("different") || state.startsWith("only");
        return h("tr", { key: name }, [name, value, state].map((text, at) => h(
          "td", { key: at, title: `${text}\n${each}`, className: at === 2 && differs ? "jp-allranks-bad" : "" }, text,
        )));
      });
      return h(
        "div", { className: "jp-allranks-variables" },
        ranks.missing && h("p", null, trans.__("Without %1: no answer.", ranks.missing)),
        rows.length ? table(["name", "value", "ranks"].map((word) => trans.__(word)), rows) : h("p", null, trans.__("No variables yet.")),
      );
    }

    // Ranks of the other notebooks in this page; a click opens the notebook.
    renderOthers() {
      return h("div", { className: "jp-allranks-list" }, h("ul", null, this.others().map(([ranks, panel]) => h(
        "li", { key: panel.id },
        h("button", { onClick: () => this.app.shell.activateById(panel.id) }, h("span", null, name(ranks)), h("span", null, ranks.title)),
      ))));
    }
  };
};
