// The plugin: commands, a field in the toolbar of notebooks, a sidebar, and a card in the launcher.

// JupyterLab's own classes have no types here.
/** @typedef {import("./notebook_ranks.js").Ranks} Ranks */
/** @typedef {import("./notebook_ranks.js").Trans} Trans */
/** @typedef {any} App */
/** @typedef {any} Panel a notebook in the page */
/** @typedef {any} Cell */
/** @typedef {{ n?: number }} Size */

const SIZES = [2, 4, 8];
const LOOK_MS = 1000;
const OFFER_MS = 30_000;
const MISSING = "No module named 'allranks'";
const ICON = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16" width="16" height="16">
  <g class="jp-icon3" fill="#616161"><circle cx="3.5" cy="3.5" r="2"/><circle cx="12.5" cy="3.5" r="2"/>
  <circle cx="3.5" cy="12.5" r="2"/><circle cx="12.5" cy="12.5" r="2"/><path d="M5 3h6v1H5zM5 12h6v1H5zM3
  5h1v6H3zM12 5h1v6h-1z"/></g></svg>`;

// Any notebook can have a button that calls a command with arguments of its own. They become part of a
// line that the kernel runs, so no other value may.
const isSize = (/** @type {number | undefined} */ n) => n === undefined || SIZES.includes(n);

/** @param {Record<string, any>} packages */
export const plugins = (packages) => {
  const { Dialog, ICommandPalette, ILauncher, INotebookTracker, IRenderMimeRegistry, IToolbarWidgetRegistry, ITranslator } = packages;
  const { LabIcon, MenuSvg, NotebookActions, Notification, Poll, Widget } = packages;
  const { LOAD_LINE, caretDownIcon, firstCells, makeChooser, makeHelp, makeNotebookRanks, makeSidebar, nullTranslator, showDialog, unknownMagic } = packages;
  const NotebookRanks = makeNotebookRanks(packages);
  const Sidebar = makeSidebar(packages);
  const openHelp = makeHelp(packages);
  const icon = new LabIcon({ name: "allranks:ranks", svgstr: ICON });

  const install = (/** @type {Trans} */ trans) =>
    trans.__("allranks is not installed for this kernel. Type in a cell: %1", "%pip install allranks");

  /** @param {Ranks} ranks @param {Promise<boolean>} done */
  const report = async (ranks, done) => {
    // Before the command ends, which may show another one.
    if (ranks.notification) Notification.dismiss(ranks.notification);
    ranks.notification = "";
    const ok = await done;
    if (ok) return;
    const advice = ranks.text.includes(MISSING) ? install(ranks.trans) : "";
    const said = advice || ranks.text.trim() || ranks.trans.__("The command has not run.");
    ranks.notification = Notification.error(said, { autoClose: false });
  };

  /** A dialog's text, and a line for options. */
  class Options extends Widget {
    /** @param {string} text @param {string} label @param {string} value */
    constructor(text, label, value) {
      super();
      this.input = Object.assign(document.createElement("input"), { value, className: "jp-mod-styled" });
      this.addClass("jp-allranks-options");
      const labelled = document.createElement("label");
      labelled.append(label, this.input);
      const about = Object.assign(document.createElement("p"), { textContent: text });
      this.node.append(about, labelled);
    }

    getValue() {
      return this.input.value;
    }
  }

  /**
   * Offers the cell that starts these ranks: without it, the notebook cannot be run again.
   *
   * @param {Ranks} ranks
   */
  const offerStart = (ranks) => {
    const { trans } = ranks;
    const lines = ranks.startLines.replaceAll("\n", ", ");
    const actions = [{ label: trans.__("Write this as the first cell"), callback: () => ranks.isUnwritten && ranks.writeStart() }];
    const text = trans.__("No cell of this notebook starts ranks. To run it again, it needs: %1", lines);
    ranks.notification = Notification.info(text, { actions, autoClose: OFFER_MS });
  };

  /** @param {Ranks} ranks @param {string} text @param {string} label @param {() => unknown} callback */
  const advise = (ranks, text, label, callback) => {
    if (ranks.advice) Notification.dismiss(ranks.advice);
    ranks.advice = Notification.info(text, { actions: [{ label, callback }], autoClose: OFFER_MS });
  };

  /** @param {any} notebook @param {number} place */
  const select = (notebook, place) => {
    notebook.activeCellIndex = place;
    // A click on the notification has taken the focus: the next Shift-Enter shall run the cell.
    notebook.activate();
    void notebook.scrollToItem(place);
  };

  /**
   * Offers the start of the ranks that have ended with their kernel.
   *
   * @param {any} notebook @param {Cell} failed @param {Ranks} ranks
   */
  const offerAgain = (notebook, failed, ranks) => {
    const { trans, wholeStart } = ranks;
    // It offers to write the start of ranks that run.
    if (ranks.notification) Notification.dismiss(ranks.notification);
    const joined = (/** @type {string} */ source) => source.trim().replaceAll("\n", ", ");
    if (!wholeStart) {
      const text = trans.__("The ranks ended with the kernel. Run first: %1", joined(ranks.startLines));
      advise(ranks, text, trans.__("Write this as the first cell"), () => {
        ranks.writeStart();
        select(notebook, 0);
      });
      return;
    }
    const text = trans.__("The ranks ended with the kernel. Run first the cell that starts them: %1", joined(wholeStart.sharedModel.source));
    advise(ranks, text, trans.__("Run that cell"), async () => {
      const place = notebook.widgets.findIndex((/** @type {Cell} */ { model }) => model === wholeStart);
      if (place < 0) return;
      notebook.deselectAll();
      notebook.activeCellIndex = place;
      await NotebookActions.run(notebook, ranks.context.sessionContext);
      const next = notebook.widgets.indexOf(failed);
      if (next >= 0) select(notebook, next);
    });
  };

  /**
   * Says what loads the magic that a cell has not found: Jupyter's own error does not.
   *
   * @param {any} notebook @param {Cell} cell @param {Ranks} ranks
   */
  const offerLoad = (notebook, cell, ranks) => {
    const { trans } = ranks;
    const magic = unknownMagic(cell.model.outputs.toJSON());
    if (!magic) return;
    const text = trans.__("%1 is a magic of allranks. Run first: %2", magic, LOAD_LINE);
    advise(ranks, text, trans.__("Insert this cell"), () => {
      const place = notebook.widgets.indexOf(cell);
      if (place < 0) return;
      notebook.model.sharedModel.insertCell(place, { cell_type: "code", metadata: {}, source: LOAD_LINE });
      select(notebook, place);
    });
  };

  /**
   * What the toolbar's menu, the sidebar and the palette have in common.
   *
   * @param {App} app @param {Trans} trans @param {() => any} current the ranks that a command is for, null if there are none
   */
  const addCommands = (app, trans, current) => {
    /** @param {string} name @param {unknown} label @param {(args: Size) => unknown} execute @param {object} more */
    const add = (name, label, execute, more = {}) =>
      app.commands.addCommand(`allranks:${name}`, { label, execute, isEnabled: () => current() !== null, ...more });
    const running = { isEnabled: () => Boolean(current()?.size) && !current().doing };
    // Also in place of ranks that run, but not as many again: that is "restart".
    const startable = {
      isEnabled: (/** @type {Size} */ { n }) => isSize(n) && Boolean(current()?.python) && !current().doing && n !== current().size,
    };

    const deletes = (/** @type {Ranks} */ ranks) => {
      const interrupts = ranks.runs ? ` ${trans.__("The running cell is interrupted.")}` : "";
      return `${trans.__("This deletes all variables on the ranks. Those of the notebook stay.")}${interrupts}`;
    };
    // What deletes variables has the button of a warning.
    /** @param {string} title @param {unknown} body @param {string} label @param {boolean} warns */
    const ask = async (title, body, label, warns) => {
      const button = warns ? Dialog.warnButton({ label }) : Dialog.okButton({ label });
      return showDialog({ title, body, buttons: [Dialog.cancelButton(), button], focusNodeSelector: "input" });
    };
    /** @param {Ranks} ranks @param {string} title @param {string} label */
    const confirm = async (ranks, title, label) => (await ask(title, deletes(ranks), label, true)).button.accept;

    const startLabel = (/** @type {Size} */ { n }) => {
      const ranks = n ? trans.__("%1 ranks", n) : trans.__("ranks …");
      return current()?.size ? trans.__("Restart with %1", ranks) : trans.__("Start %1", ranks);
    };
    add("start", startLabel, async ({ n }) => {
      // Lumino does not ask isEnabled before it executes a command.
      if (!isSize(n)) throw new Error(`expected ${SIZES.join(", ")} or no number of ranks. Choose one in the toolbar's menu`);
      const ranks = current();
      const runs = ranks.size > 0;
      let options = n ? `-n ${n}` : "";
      if (!n) {
        const title = runs ? trans.__("Restart with other ranks?") : trans.__("Start ranks");
        const example = trans.__("Options of %1, for example: %2", "%distributed start", "-n 4 --on ssh:h1:2,h2:2");
        const body = new Options(runs ? deletes(ranks) : "", example, `-n ${ranks.size || 4}`);
        const asked = await ask(title, body, runs ? trans.__("Restart") : trans.__("Start"), runs);
        if (!asked.button.accept) return;
        // Python ends lines at more characters than \s has.
        options = (asked.value ?? "").replace(/[\s\p{Cc}]+/gu, " ");
      } else if (runs && !(await confirm(ranks, trans.__("Restart with %1 ranks?", n), trans.__("Restart")))) return;
      await report(ranks, runs ? ranks.restart(options) : ranks.start(options));
    }, startable);
    add("write-start", trans.__("Write the start of the ranks as the first cell"), () => {
      const ranks = current();
      if (ranks.isUnwritten) ranks.writeStart();
      if (ranks.notification) Notification.dismiss(ranks.notification);
    }, { isEnabled: () => Boolean(current()?.isUnwritten) });
    add("every-cell", trans.__("Every cell runs on the ranks"), async () => {
      const ranks = current();
      await report(ranks, ranks.type("…", [`%distributed ${ranks.state.every_cell ? "off" : "on"}`]));
    }, { ...running, isToggled: () => Boolean(current()?.state?.every_cell) });
    // Also a command, which may wait for a cell or for hosts.
    const interrupts = () => (current()?.busyBeside ? trans.__("Interrupt the ranks") : trans.__("Interrupt the cell"));
    add("interrupt", interrupts, () => current().interrupt(), {
      isEnabled: () => Boolean(current()?.size || current()?.doing),
    });
    add("restart", trans.__("Restart the ranks"), async () => {
      const ranks = current();
      if (await confirm(ranks, trans.__("Restart the ranks?"), trans.__("Restart"))) await report(ranks, ranks.restart(""));
    }, running);
    add("stop", trans.__("Stop the ranks"), async () => {
      const ranks = current();
      if (await confirm(ranks, trans.__("Stop the ranks?"), trans.__("Stop"))) await report(ranks, ranks.stop());
    }, running);
    add("show", trans.__("Show the ranks"), () => app.shell.activateById("allranks-ranks"), { isEnabled: () => true });
  };

  const ITEMS = [
    [...SIZES.map((n) => ({ command: "allranks:start", args: { n } })), { command: "allranks:start" }],
    ["every-cell", "interrupt", "restart", "stop"].map((name) => ({ command: `allranks:${name}` })),
    [{ command: "allranks:write-start" }, { command: "allranks:show" }],
  ];
  const CHANGING = [...new Set(ITEMS.flat().map(({ command }) => command))].filter((id) => id !== "allranks:show");

  const makeMenu = (/** @type {App} */ app) => {
    const menu = new MenuSvg({ commands: app.commands });
    for (const [index, part] of ITEMS.entries()) {
      if (index) menu.addItem({ type: "separator" });
      for (const item of part) menu.addItem(item);
    }
    return menu;
  };

  class Field extends Widget {
    /** @param {Ranks} ranks @param {(button: HTMLElement) => void} open */
    constructor(ranks, open) {
      super();
      this.addClass("jp-ToolbarButton");
      this.button = document.createElement("button");
      this.button.className = "jp-allranks-field";
      this.button.setAttribute("aria-haspopup", "menu");
      this.button.onclick = () => open(this.button);
      this.label = document.createElement("span");
      this.button.append(icon.element(), this.label, caretDownIcon.element());
      this.node.append(this.button);
      this.ranks = ranks;
      ranks.changed.connect(this.draw, this);
      this.draw();
    }

    draw() {
      this.setHidden(!this.ranks.python);
      this.button.title = this.ranks.description;
      this.label.textContent = this.ranks.title;
    }
  }

  /**
   * Follows the cells of a notebook: the view of their outputs, and the mark of those that run on ranks.
   *
   * @param {Panel} panel @param {Ranks} ranks @param {Trans} trans @param {(cell: Cell) => unknown} choose
   */
  const followCells = (panel, ranks, trans, choose) => {
    const mark = (/** @type {Cell} */ cell) => {
      if (cell.isDisposed) return;
      const runs = ranks.runsCell(cell.model), ran = ranks.ranCell(cell.model);
      cell.toggleClass("jp-allranks-cell", runs || ran);
      const prompt = cell.node.querySelector(".jp-InputPrompt");
      if (prompt) prompt.title = runs ? trans.__("This cell runs on the ranks") : ran ? trans.__("This cell ran on the ranks") : "";
    };
    const watched = new WeakSet();
    const watch = (/** @type {Cell} */ cell) => {
      void choose(cell);
      mark(cell);
      if (watched.has(cell)) return;
      watched.add(cell);
      const changed = (/** @type {unknown} */ _, /** @type {any} */ { sourceChange }) => sourceChange && mark(cell);
      const { sharedModel } = cell.model;
      sharedModel.changed.connect(changed);
      cell.disposed.connect(() => sharedModel.changed.disconnect(changed));
      void cell.ready.then(() => mark(cell));
    };
    // Also cells that are moved, pasted or undone: they are new to the page.
    const { cells } = panel.content.model;
    const follow = () => panel.content.widgets.forEach(watch);
    const markAll = () => {
      panel.toggleClass("jp-allranks-notebook", ranks.size > 0);
      panel.content.widgets.forEach(mark);
    };
    // JupyterLab makes the cells of a notebook one by one: some may have come after the last look.
    const scheduled = (/** @type {unknown} */ _, /** @type {any} */ { notebook, cell }) => {
      if (notebook !== panel.content) return;
      ranks.ran.delete(cell.model.id);
      watch(cell);
    };
    cells.changed.connect(follow);
    ranks.changed.connect(markAll);
    NotebookActions.executionScheduled.connect(scheduled);
    panel.disposed.connect(() => {
      NotebookActions.executionScheduled.disconnect(scheduled);
      cells.changed.disconnect(follow);
      ranks.changed.disconnect(markAll);
    });
    follow();
    markAll();
  };

  /** @param {App} app @param {any} launcher @param {Trans} trans */
  const addLauncherCard = (app, launcher, trans) => {
    app.commands.addCommand("allranks:new-notebook", {
      label: trans.__("allranks (4 ranks)"),
      caption: trans.__("A notebook whose first cell starts four ranks"),
      icon,
      execute: async (/** @type {{ cwd: string }} */ { cwd }) => {
        const { path } = await app.serviceManager.contents.newUntitled({ path: cwd, type: "notebook" });
        const kernel = { name: app.serviceManager.kernelspecs.specs?.default ?? "python3" };
        const panel = await app.commands.execute("docmanager:open", { path, factory: "Notebook", kernel });
        await Promise.all([panel.sessionContext.ready, panel.revealed]);
        const { sharedModel } = panel.content.model;
        const made = firstCells("-n 4").map((/** @type {string} */ source) => ({ cell_type: "code", metadata: {}, source }));
        sharedModel.transact(() => {
          sharedModel.deleteCellRange(0, sharedModel.cells.length);
          sharedModel.insertCells(0, made);
        });
        panel.content.activeCellIndex = 0;
        const started = await NotebookActions.runAndAdvance(panel.content, panel.sessionContext);
        const isMissing = !started && JSON.stringify(sharedModel.cells[0].outputs).includes(MISSING);
        if (isMissing) Notification.error(install(trans), { autoClose: false });
        return panel;
      },
    });
    // In this category the launcher takes a picture only by its address. Readable in both themes.
    const kernelIconUrl = `data:image/svg+xml,${encodeURIComponent(ICON.replace("#616161", "#1f83c9"))}`;
    launcher.add({ command: "allranks:new-notebook", category: "Notebook", rank: 10, kernelIconUrl });
  };

  /**
   * The menu "Help" has this command: see the schema.
   *
   * @param {App} app @param {any} rendermime @param {any} palette @param {Trans} trans
   */
  const addHelp = (app, rendermime, palette, trans) => {
    const command = "allranks:help";
    // A page of Notebook 7 has no second widget beside the notebook.
    const area = app.name === "JupyterLab" ? "main" : "right";
    /** @type {any} */
    let help = null;
    app.commands.addCommand(command, {
      label: trans.__("allranks Documentation"),
      execute: () => {
        if (!help || help.isDisposed) {
          help = openHelp(rendermime, trans);
          help.title.icon = icon;
          app.shell.add(help, area);
        }
        app.shell.activateById(help.id);
      },
    });
    palette?.addItem({ command, category: trans.__("Help") });
  };

  /** @param {App} app @param {any} tracker @param {any} rendermime @param {any} palette @param {any} launcher @param {any} toolbars @param {any} translator */
  const activate = (app, tracker, rendermime, palette, launcher, toolbars, translator) => {
    const given = translator ?? nullTranslator;
    const trans = given.load("allranks");
    /** The ranks of each notebook; two views of a notebook have one kernel. */
    const known = new Map();
    const ofPanel = (/** @type {Panel} */ panel) => (panel ? known.get(panel.context) ?? null : null);
    const current = () => ofPanel(tracker.currentWidget);
    const others = () => {
      const panels = new Map();
      tracker.forEach((/** @type {Panel} */ panel) => panels.set(ofPanel(panel), panel));
      return [...panels].filter(([ranks]) => ranks && ranks !== current() && ranks.size);
    };
    const choose = makeChooser(packages, trans);
    addHelp(app, rendermime, palette, trans);
    addCommands(app, trans, current);
    for (const item of ITEMS.flat()) palette?.addItem({ ...item, category: trans.__("Ranks") });
    const sidebar = new Sidebar(app, current, others, given);
    sidebar.title.icon = icon;
    app.shell.add(sidebar, "left", { rank: 900, type: "Ranks" });

    // Questions only while ranks start or something runs: they count as activity of the kernel, and an idle
    // kernel may have to be culled.
    const awaits = (/** @type {any} */ ranks) => Boolean(ranks?.comm)
      && (ranks.runs || ranks.starting > 0 || (ranks.busyBeside && sidebar.isVisible));
    const look = async () => {
      const ranks = current();
      const goesOn = awaits(ranks);
      if (ranks?.comm && (!ranks.runs || ranks.starting || sidebar.isVisible)) await ranks.ask();
      if (!goesOn) void poll.stop();
    };
    const poll = new Poll({
      name: "allranks:ranks",
      auto: false,
      factory: look,
      frequency: { interval: LOOK_MS, backoff: false, max: LOOK_MS },
      standby: "when-hidden",
    });
    const watch = () => {
      const ranks = current();
      // Without effect while it runs.
      if (awaits(ranks)) void poll.start();
    };

    const changed = (/** @type {Ranks} */ ranks) => {
      if (ranks === current()) {
        for (const id of CHANGING) app.commands.notifyCommandChanged(id);
        watch();
      }
      if (ranks.advice && ranks.size) {
        Notification.dismiss(ranks.advice);
        ranks.advice = "";
      }
      if (ranks.offers && ranks.size) {
        ranks.offers = false;
        if (ranks.isUnwritten) offerStart(ranks);
      }
      sidebar.refresh();
    };
    const ranksOf = (/** @type {Panel} */ panel) => {
      const { context } = panel;
      if (!known.has(context)) {
        const ranks = new NotebookRanks(context, trans, () => sidebar.comparesVariables);
        known.set(context, ranks);
        ranks.changed.connect(changed);
        ranks.disposed.connect(() => known.delete(context));
      }
      return known.get(context);
    };

    const menu = makeMenu(app);
    // For the keyboard. What is chosen in the menu moves the focus after that.
    /** @type {HTMLElement | null} */
    let opener = null;
    menu.aboutToClose.connect(() => opener?.focus());
    toolbars?.addFactory("Notebook", "allranks", (/** @type {Panel} */ panel) => new Field(ranksOf(panel), (button) => {
      if (tracker.currentWidget !== panel) app.shell.activateById(panel.id);
      const { left, bottom } = button.getBoundingClientRect();
      opener = button;
      menu.open(left, bottom);
    }));
    tracker.widgetAdded.connect(async (/** @type {unknown} */ _, /** @type {Panel} */ panel) => {
      const ranks = ranksOf(panel);
      await panel.revealed;
      if (!panel.isDisposed) followCells(panel, ranks, trans, choose);
    });
    tracker.currentChanged.connect(() => {
      for (const id of CHANGING) app.commands.notifyCommandChanged(id);
      watch();
      sidebar.refresh();
    });
    const ofNotebook = (/** @type {unknown} */ notebook) => ofPanel(tracker.find((/** @type {Panel} */ panel) => panel.content === notebook));
    NotebookActions.executed.connect((/** @type {unknown} */ _, /** @type {any} */ { notebook, cell, success }) => {
      const ranks = ofNotebook(notebook);
      if (!ranks) return;
      void ranks.ask();
      if (success || cell.model.type !== "code") return;
      const offer = ranks.lacksRanks(cell.model.outputs.toJSON()) ? offerAgain : offerLoad;
      offer(notebook, cell, ranks);
    });
    if (launcher) addLauncherCard(app, launcher, trans);
  };

  return [{
    id: "allranks:ranks",
    description: "The ranks of a notebook in its toolbar and in a sidebar.",
    autoStart: true,
    requires: [INotebookTracker, IRenderMimeRegistry],
    // A token that an application lacks is undefined, and cannot be asked for.
    optional: [ICommandPalette, ILauncher, IToolbarWidgetRegistry, ITranslator].filter(Boolean),
    /** @param {App} app @param {any} tracker @param {any} rendermime @param {any} palette @param {any[]} more */
    activate: (app, tracker, rendermime, palette, ...more) => {
      const [launcher, toolbars, translator] = ILauncher ? more : [null, ...more];
      activate(app, tracker, rendermime, palette, launcher, toolbars, translator);
    },
  }];
};
