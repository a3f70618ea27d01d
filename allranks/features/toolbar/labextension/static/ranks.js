// The ranks of the current notebook: a field in its toolbar, a sidebar, and a card in the launcher.
// What they do is typed into the kernel as %distributed commands; what they show comes over a comm
// that allranks/features/toolbar/notebook.py has registered.

const TARGET = "allranks.ranks";
const SIZES = [2, 4, 8];
const LOOK_MS = 1000;
const MOST_QUIET_MS = 20_000;
const MOST_ENDING_MS = 5_000;
const NO_PAUSES = { pauses: [], shown: null, only: false };
const ICON = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16" width="16" height="16">
  <g class="jp-icon3" fill="#616161"><circle cx="3.5" cy="3.5" r="2"/><circle cx="12.5" cy="3.5" r="2"/>
  <circle cx="3.5" cy="12.5" r="2"/><circle cx="12.5" cy="12.5" r="2"/><path d="M5 3h6v1H5zM5 12h6v1H5zM3
  5h1v6H3zM12 5h1v6h-1z"/></g></svg>`;

const element = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};

// A kernel colours what it prints.
const plain = (text) => text.replace(/\x1b\[[0-9;]*m/g, "");

const after = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Any notebook can have a button that calls a command with arguments of its own. They become part of a
// line that the kernel runs, so no other value may.
const isSize = (n) => n === undefined || SIZES.includes(n);

const megabytes = (nbytes) => (nbytes ? `${Math.round(nbytes / 1e6)} MB` : "");

/** The ranks of one notebook. `state` is null until the kernel has loaded allranks; `known` is whether it has. */
class Ranks {
  constructor(context, createMessage) {
    this.context = context;
    this.createMessage = createMessage;
    this.python = false;
    this.known = true;
    this.state = null;
    this.doing = "";
    this.text = "";
    this.ran = false;
    this.notification = "";
    this.variables = [];
    this.missing = "";
    this.compares = false;
    this.debugger = NO_PAUSES;
    this.listeners = new Set();
    this.comm = null;
    const { sessionContext } = context;
    sessionContext.statusChanged.connect((_, status) => {
      if (["restarting", "autorestarting", "dead", "terminating"].includes(status)) this.forget();
    });
    sessionContext.kernelChanged.connect(() => void this.look());
    sessionContext.iopubMessage.connect((_, { header }) => {
      if (header.msg_type === "debug_event" && this.comm !== null) void this.askDebugger();
    });
    void sessionContext.ready.then(() => this.look());
  }

  /** Looks at a kernel that is new to this notebook. */
  async look() {
    this.forget();
    const kernel = this.kernel;
    // A kernel whose cell runs does not give its language.
    const language = (await kernel?.spec)?.language ?? (await kernel?.info)?.language_info.name;
    this.python = language?.toLowerCase() === "python";
    this.known = !this.python;
    this.changed();
    if (this.python) await this.ask({ isNew: true });
  }

  get kernel() {
    return this.context.sessionContext.session?.kernel ?? null;
  }

  // Not a count of the events of cells: they do not come for a cell that is deleted, moved or run
  // again while it runs.
  get runs() {
    return [...this.context.model.cells].some((cell) => cell.executionState === "running");
  }

  get size() {
    return this.state?.ranks.length ?? 0;
  }

  get title() {
    if (this.doing) return this.doing;
    if (!this.known) return "…";
    if (!this.size) return "no ranks";
    const ranks = this.size === 1 ? "1 rank" : `${this.size} ranks`;
    const hosts = [...new Set(this.state.ranks.map((one) => one.host))];
    return `${ranks} on ${hosts.length > 2 ? `${hosts.length} hosts` : hosts.join(", ")}`;
  }

  changed() {
    for (const listener of this.listeners) listener();
  }

  forget() {
    this.comm?.dispose();
    Object.assign(this, { state: null, comm: null, known: true, doing: "", text: "", variables: [], missing: "" });
    this.debugger = NO_PAUSES;
    this.changed();
  }

  /** Asks the kernel for the state. Does nothing in a kernel that has not loaded allranks. */
  async ask({ isNew = false } = {}) {
    const kernel = this.kernel;
    if (!kernel) return;
    if (this.comm === null) {
      const content = { target_name: TARGET };
      const answer = kernel.requestCommInfo(content);
      const beside = async () => {
        await after(LOOK_MS);
        const answered = this.known || this.comm !== null || kernel.status === "idle";
        return answered ? answer : this.findComm(kernel, content);
      };
      const answers = isNew ? [answer, beside().catch(() => answer)] : [answer];
      const info = await Promise.race(answers).catch(() => null);
      // It may have ended.
      if (info === null) return;
      if (kernel !== this.kernel || this.comm !== null) return;
      if (!info.content.comms?.[TARGET]) {
        this.known = true;
        this.changed();
        return;
      }
      // Without open(): the kernel has made the other end.
      this.comm = kernel.createComm(TARGET, TARGET);
      this.comm.onMsg = (message) => {
        this.known = true;
        const { variables, missing, ...state } = message.content.data;
        if (variables) Object.assign(this, { variables, missing });
        else this.state = state;
        this.changed();
        // Of a page that is loaded while ranks are paused.
        const paused = state.ranks?.some((one) => one.state === "paused in the debugger");
        if (paused && !this.debugger.pauses.length) void this.askDebugger();
      };
    }
    this.comm.send({});
    // Only idle ranks answer.
    if (this.compares && !this.runs) this.comm.send({ variables: true });
  }

  /** Asks for the comm in a subshell: a kernel whose cell runs does not answer otherwise. */
  async findComm(kernel, content) {
    const from = { username: kernel.username, session: kernel.clientId };
    // Not requestCreateSubshell(): it refuses before the kernel has answered another question.
    const control = (msgType, content) => kernel.sendControlMessage(
      this.createMessage({ ...from, msgType, channel: "control", content }), true,
    ).done;
    const { subshell_id: subshellId } = (await control("create_subshell_request", {})).content;
    const asked = { ...from, msgType: "comm_info_request", channel: "shell", subshellId, content };
    const info = await kernel.sendShellMessage(this.createMessage(asked), true).done;
    void control("delete_subshell_request", { subshell_id: subshellId });
    return info;
  }

  /** Asks the kernel's debugger where the ranks are paused. */
  async askDebugger() {
    const body = await this.debug("allranksPauses").catch(() => null);
    this.debugger = body?.pauses ? body : NO_PAUSES;
    this.changed();
  }

  /** Chooses the rank that the debugger shows, and whether it steps alone. */
  async choose(rank, only) {
    if (!Number.isInteger(rank)) return;
    const expression = `%distributed debug -r ${rank}${only ? " --only" : ""}`;
    await this.debug("evaluate", { expression }).catch((error) => {
      this.text = error.message;
    });
    await this.askDebugger();
  }

  async debug(command, args = {}) {
    const { content } = await this.kernel.requestDebug({ type: "request", seq: 0, command, arguments: args }).done;
    if (!content.success) throw new Error(content.message);
    return content.body;
  }

  /** Ends the running cell: the second interrupt ends ranks that do not react to the first. */
  async endCell() {
    for (let interrupts = 0; this.runs && interrupts < 2; interrupts++) {
      await this.kernel?.interrupt();
      for (let waited = 0; this.runs && waited < MOST_ENDING_MS; waited += LOOK_MS / 4) await after(LOOK_MS / 4);
    }
  }

  /** Runs commands one after the other, and shows what they print; true if none has failed. */
  async type(doing, commands, { endsCell = false } = {}) {
    const kernel = this.kernel;
    if (!kernel || this.doing) return false;
    Object.assign(this, { doing, text: "" });
    this.changed();
    if (endsCell) await this.endCell();
    let failed = false;
    for (const code of commands) {
      const future = kernel.requestExecute({ code, store_history: false, allow_stdin: false });
      future.onIOPub = ({ header, content }) => {
        if (header.msg_type === "stream" && !code.startsWith("%load_ext")) this.text += plain(content.text);
        if (header.msg_type === "error") {
          const interrupted = content.ename === "KeyboardInterrupt";
          this.text += `${interrupted ? "The command was interrupted." : plain(content.evalue) || content.ename}\n`;
        }
        this.changed();
      };
      failed = !(await this.answer(kernel, future));
      if (failed) break;
    }
    this.doing = "";
    this.changed();
    const asked = this.ask();
    if (!failed) await asked; // else the kernel may not answer this either
    return !failed;
  }

  /** Whether a command has succeeded; false too if the kernel is not busy and does not answer. */
  async answer(kernel, future) {
    let ok = null;
    const done = future.done.then(
      ({ content }) => { ok = content.status === "ok"; },
      () => { ok = false; }, // the kernel has ended
    );
    // An interrupt of a kernel that starts may stop it half-way: it runs, and answers nothing.
    for (let quiet = 0; ok === null && quiet < MOST_QUIET_MS; ) {
      await Promise.race([done, after(LOOK_MS)]);
      quiet = kernel.status === "busy" ? 0 : quiet + LOOK_MS;
    }
    if (ok === null) {
      this.text += `The kernel has not answered for ${MOST_QUIET_MS / 1000} s. Restart it: Kernel, Restart Kernel …\n`;
    }
    return ok === true;
  }

  start(options) {
    const load = this.comm === null ? ["%load_ext allranks"] : [];
    // In one cell: the page may be loaded again in between.
    return this.type("starting …", [...load, `%distributed start ${options}\n%distributed on`]);
  }

  restart(options) {
    return this.type("restarting …", [`%distributed restart ${options}`], { endsCell: true });
  }

  stop() {
    return this.type("stopping …", ["%distributed off\n%distributed stop"], { endsCell: true });
  }
}

export const plugins = (packages) => {
  const { ICommandPalette, ILauncher, INotebookTracker, InputDialog, LabIcon, MenuSvg, NotebookActions } = packages;
  const { Dialog, KernelMessage, Notification, Widget, makeChooser, showDialog } = packages;
  const choose = makeChooser(packages);
  const icon = new LabIcon({ name: "allranks:ranks", svgstr: ICON });

  const report = async (ranks, done) => {
    const ok = await done;
    if (ranks.notification) Notification.dismiss(ranks.notification);
    ranks.notification = "";
    if (ok) return;
    const missing = ranks.text.includes("No module named 'allranks'");
    const advice = missing ? "allranks is not installed for this kernel. Type in a cell: %pip install allranks" : "";
    ranks.notification = Notification.error(advice || ranks.text.trim() || "The command has not run.", { autoClose: false });
  };

  /** What the toolbar's menu, the sidebar and the palette have in common. */
  const addCommands = (app, current) => {
    const add = (name, label, execute, more = {}) =>
      app.commands.addCommand(`allranks:${name}`, { label, execute, isEnabled: () => current() !== null, ...more });
    const running = { isEnabled: () => Boolean(current()?.size) && !current().doing };
    // Also in place of ranks that run, but not as many again: that is "restart".
    const startable = {
      isEnabled: ({ n }) => isSize(n) && Boolean(current()?.python) && !current().doing && n !== current().size,
    };

    const interrupts = (ranks) => (ranks.runs ? " The running cell is interrupted." : "");
    const confirm = async (ranks, title, label) => {
      const asked = await showDialog({
        title,
        body: `This deletes all variables on the ranks. Those of the notebook stay.${interrupts(ranks)}`,
        buttons: [Dialog.cancelButton(), Dialog.warnButton({ label })],
      });
      return asked.button.accept;
    };

    const startLabel = ({ n }) => `${current()?.size ? "Restart with" : "Start"} ${n ? `${n} ranks` : "ranks …"}`;
    add("start", startLabel, async ({ n }) => {
      // Lumino does not ask isEnabled before it executes a command.
      if (!isSize(n)) throw new Error(`expected ${SIZES.join(", ")} or no number of ranks. Choose one in the toolbar's menu`);
      const ranks = current();
      const runs = ranks.size > 0;
      let options = n ? `-n ${n}` : "";
      if (!n) {
        const asked = await InputDialog.getText({
          title: runs ? `Restart with other ranks? This deletes all variables on the ranks.${interrupts(ranks)}` : "Start ranks",
          label: "Options of %distributed start, for example: -n 4 --on ssh:h1:2,h2:2",
          text: `-n ${ranks.size || 4}`,
        });
        if (!asked.button.accept) return;
        // Python ends lines at more characters than \s has.
        options = (asked.value ?? "").replace(/[\s\p{Cc}]+/gu, " ");
      } else if (runs && !(await confirm(ranks, `Restart with ${n} ranks?`, "Restart"))) return;
      await report(ranks, runs ? ranks.restart(options) : ranks.start(options));
    }, startable);
    add("every-cell", "Every cell runs on the ranks", async () => {
      const ranks = current();
      await report(ranks, ranks.type("…", [`%distributed ${ranks.state.every_cell ? "off" : "on"}`]));
    }, { ...running, isToggled: () => Boolean(current()?.state?.every_cell) });
    // Also a command, which may wait for a cell or for hosts.
    add("interrupt", "Interrupt the cell", () => current().kernel.interrupt(), {
      isEnabled: () => Boolean(current()?.size || current()?.doing),
    });
    add("restart", "Restart the ranks", async () => {
      const ranks = current();
      if (await confirm(ranks, "Restart the ranks?", "Restart")) await report(ranks, ranks.restart(""));
    }, running);
    add("stop", "Stop the ranks", async () => {
      const ranks = current();
      if (await confirm(ranks, "Stop the ranks?", "Stop")) await report(ranks, ranks.stop());
    }, running);
    add("show", "Show the ranks", () => app.shell.activateById("allranks-ranks"), { isEnabled: () => true });
  };

  const ITEMS = [
    [...SIZES.map((n) => ({ command: "allranks:start", args: { n } })), { command: "allranks:start" }],
    ["every-cell", "interrupt", "restart", "stop"].map((name) => ({ command: `allranks:${name}` })),
    [{ command: "allranks:show" }],
  ];

  const makeMenu = (app) => {
    const menu = new MenuSvg({ commands: app.commands });
    for (const [index, part] of ITEMS.entries()) {
      if (index) menu.addItem({ type: "separator" });
      for (const item of part) menu.addItem(item);
    }
    return menu;
  };

  class Field extends Widget {
    constructor(ranks, open) {
      super();
      this.addClass("jp-ToolbarButton");
      this.button = element("button", { className: "jp-allranks-field", title: "The ranks of this notebook" });
      this.button.setAttribute("aria-haspopup", "menu");
      this.button.onclick = () => {
        open(this.button);
      };
      this.node.append(this.button);
      this.ranks = ranks;
      this.draw = () => {
        this.setHidden(!ranks.python);
        this.button.replaceChildren(icon.element(), element("span", { textContent: ranks.title }));
      };
      ranks.listeners.add(this.draw);
      this.draw();
    }

    dispose() {
      this.ranks.listeners.delete(this.draw);
      super.dispose();
    }
  }

  class Sidebar extends Widget {
    constructor(app, current, others) {
      super();
      Object.assign(this, { app, current, others, id: "allranks-ranks" });
      this.title.icon = icon;
      this.title.caption = "Ranks";
      this.addClass("jp-allranks-sidebar");
      this.node.tabIndex = -1;
      this.node.setAttribute("role", "region");
      this.node.setAttribute("aria-label", "Ranks of the notebook");
      this.draw();
    }

    onAfterShow() {
      void this.current()?.ask();
    }

    draw() {
      if (this.node.matches(":active")) {
        // A click on a button that is replaced between press and release would be lost.
        setTimeout(() => this.draw(), 200);
        return;
      }
      const ranks = this.current();
      const parts = [element("h2", { textContent: ranks ? ranks.context.localPath.split("/").at(-1) : "Ranks" })];
      if (ranks === null) {
        parts.push(element("p", { textContent: "Open a notebook to start ranks." }));
      } else {
        parts.push(element("p", { textContent: ranks.python ? ranks.title : "Ranks need a Python kernel." }), this.buttons(ranks));
        if (ranks.debugger.pauses.length) parts.push(this.pauses(ranks));
        if (ranks.size) parts.push(...this.table(ranks), this.variables(ranks));
        if (ranks.text) {
          const title = element("h3", { textContent: "Last command" });
          parts.push(title, element("pre", { textContent: ranks.text.trim() }));
        }
      }
      const others = this.others();
      if (others.length) parts.push(this.clusters(others));
      // A button keeps the focus, or hands it to the sidebar when it goes.
      const focused = this.node.contains(document.activeElement) ? document.activeElement.textContent : null;
      this.node.replaceChildren(...parts);
      if (focused === null) return;
      const same = [...this.node.querySelectorAll("button, summary")].find((one) => one.textContent === focused);
      (same ?? this.node).focus({ preventScroll: true });
    }

    buttons(ranks) {
      const { commands } = this.app;
      const row = element("div", { className: "jp-allranks-buttons" });
      const add = (label, command, args = {}) => {
        const id = `allranks:${command}`;
        if (commands.isEnabled(id, args)) {
          row.append(element("button", { textContent: label, onclick: () => void commands.execute(id, args) }));
        }
      };
      if (!ranks.size) for (const n of SIZES) add(`Start ${n}`, "start", { n });
      add(ranks.size ? "Restart with …" : "Start …", "start");
      if (ranks.runs || ranks.doing) add("Interrupt", "interrupt");
      add(ranks.state?.every_cell ? "Run cells in the notebook" : "Run every cell on the ranks", "every-cell");
      add("Restart", "restart");
      add("Stop", "stop");
      return row;
    }

    // Ranks of the other notebooks in this page; a click opens the notebook.
    clusters(others) {
      const rows = others.map(([ranks, panel]) => {
        const parts = [ranks.context.localPath.split("/").at(-1), ranks.title].map((text) => element("span", { textContent: text }));
        return element("li", {}, element("button", { onclick: () => this.app.shell.activateById(panel.id) }, ...parts));
      });
      const title = element("h3", { textContent: "Other notebooks with ranks" });
      return element("div", { className: "jp-allranks-list" }, title, element("ul", {}, ...rows));
    }

    // The debugger's list of ranks: a click chooses the one that it shows.
    pauses(ranks) {
      const { pauses, shown, only } = ranks.debugger;
      const list = element("ul");
      for (const { rank, place } of pauses) {
        const parts = [element("span", { textContent: `rank ${rank}` }), element("code", { textContent: place })];
        const button = element("button", { title: place, onclick: () => void ranks.choose(rank, only) }, ...parts);
        button.setAttribute("aria-pressed", rank === shown);
        list.append(element("li", {}, button));
      }
      const steps = element("div", { className: "jp-allranks-buttons" });
      for (const [text, alone] of [["Step all ranks", false], [`Step rank ${shown} only`, true]]) {
        const button = element("button", { textContent: text, onclick: () => void ranks.choose(shown, alone) });
        button.setAttribute("aria-pressed", alone === only);
        if (shown !== null) steps.append(button);
      }
      const title = element("h3", { textContent: "Paused in the debugger" });
      return element("div", { className: "jp-allranks-list" }, title, list, steps);
    }

    // Compared while this part is open.
    variables(ranks) {
      const made = element("details", { open: ranks.compares }, element("summary", { textContent: "Variables" }));
      made.ontoggle = () => {
        if (made.open === ranks.compares) return;
        ranks.compares = made.open;
        if (made.open) void ranks.ask();
      };
      const head = ["name", "value", "ranks"].map((text) => element("th", { textContent: text, scope: "col" }));
      if (ranks.missing) made.append(element("p", { textContent: `Without ${ranks.missing}: no answer.` }));
      const rows = ranks.variables.map(({ name, value, state, each }) => {
        const cells = [name, value, state].map((text) => element("td", { textContent: text, title: `${text}\n${each}` }));
        if (state.startsWith("different") || state.startsWith("only")) cells[2].classList.add("jp-allranks-bad");
        return element("tr", {}, ...cells);
      });
      const table = element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
      made.append(rows.length ? table : element("p", { textContent: "No variables yet." }));
      return made;
    }

    table(ranks) {
      const head = ["rank", "device", "memory", "state"].map((text) => element("th", { textContent: text, scope: "col" }));
      const body = element("tbody");
      const hosts = Map.groupBy(ranks.state.ranks, (one) => one.host);
      for (const [host, there] of hosts) {
        if (hosts.size > 1) body.append(element("tr", {}, element("th", { textContent: host, colSpan: 4, scope: "colgroup" })));
        for (const one of there) {
          const texts = [one.rank, one.device, megabytes(one.nbytes), one.state];
          const cells = texts.map((text) => element("td", { textContent: text, title: text }));
          cells[0].title = `process ${one.pid} on ${host}`;
          if (["dead", "silent", "stopped"].includes(one.state)) cells[3].classList.add("jp-allranks-bad");
          body.append(element("tr", {}, ...cells));
          if (one.line) {
            const line = { textContent: one.line, title: one.line, colSpan: 4, className: "jp-allranks-line" };
            body.append(element("tr", {}, element("td", line)));
          }
        }
      }
      const table = element("table", {}, element("thead", {}, element("tr", {}, ...head)), body);
      return [table, element("h3", { textContent: "Logs" }), element("pre", { textContent: ranks.state.logs })];
    }
  }

  const plugin = {
    id: "allranks:ranks",
    description: "The ranks of a notebook in its toolbar and in a sidebar.",
    autoStart: true,
    requires: [INotebookTracker],
    optional: ILauncher ? [ICommandPalette, ILauncher] : [ICommandPalette],
    activate: (app, tracker, palette, launcher) => {
      const known = new Map();
      const current = () => known.get(tracker.currentWidget) ?? null;
      addCommands(app, current);
      const menu = makeMenu(app);
      for (const item of ITEMS.flat()) palette?.addItem({ ...item, category: "Ranks" });
      // For the keyboard. What is chosen in the menu moves the focus after that.
      let opener = null;
      menu.aboutToClose.connect(() => opener?.focus());
      // Once for a notebook with two views.
      const others = () => [...new Map([...known].map(([panel, ranks]) => [ranks, panel]))].filter(
        ([ranks]) => ranks !== current() && ranks.size,
      );
      const sidebar = new Sidebar(app, current, others);
      app.shell.add(sidebar, "left", { rank: 900, type: "Ranks" });

      const changed = (ranks) => {
        if (ranks !== current()) return sidebar.draw();
        for (const name of ["start", "every-cell", "interrupt", "restart", "stop"]) {
          app.commands.notifyCommandChanged(`allranks:${name}`);
        }
        sidebar.draw();
      };

      tracker.widgetAdded.connect((_, panel) => {
        // Two views of a notebook have one kernel.
        const other = [...known.values()].find((ranks) => ranks.context === panel.context);
        const ranks = other ?? new Ranks(panel.context, KernelMessage.createMessage);
        known.set(panel, ranks);
        ranks.listeners.add(() => {
          panel.toggleClass("jp-allranks-notebook", ranks.size > 0);
          changed(ranks);
        });
        panel.disposed.connect(() => known.delete(panel));
        panel.toolbar.insertBefore("spacer", "allranks", new Field(ranks, (button) => {
          if (tracker.currentWidget !== panel) app.shell.activateById(panel.id);
          const { left, bottom } = button.getBoundingClientRect();
          opener = button;
          menu.open(left, bottom);
        }));
      });
      tracker.widgetAdded.connect(async (_, panel) => {
        await panel.revealed;
        // Also cells that are moved, pasted or undone: they are new to the page.
        const follow = () => panel.isDisposed || panel.content.widgets.forEach(choose);
        panel.content.model.cells.changed.connect(follow);
        follow();
      });
      tracker.currentChanged.connect(() => sidebar.draw());

      // JupyterLab makes the cells of a notebook one by one: some may have come after the last look.
      NotebookActions.executionScheduled?.connect((_, { cell }) => choose(cell));

      // Questions only around cells: they count as activity of the kernel, and an idle kernel may
      // have to be culled.
      NotebookActions.executed.connect((_, { notebook }) => {
        const found = [...known].find(([panel]) => panel.content === notebook);
        void found?.[1].ask();
      });
      setInterval(() => {
        const ranks = current();
        if (!ranks?.comm) return;
        const { ran, runs } = ranks;
        ranks.ran = runs;
        if (runs ? sidebar.isVisible && !document.hidden : ran) void ranks.ask();
      }, LOOK_MS);

      if (launcher) {
        app.commands.addCommand("allranks:new-notebook", {
          label: "4 ranks",
          caption: "A notebook whose cells run on four ranks",
          icon,
          execute: async ({ cwd }) => {
            const { path } = await app.serviceManager.contents.newUntitled({ path: cwd, type: "notebook" });
            const kernel = { name: app.serviceManager.kernelspecs.specs?.default ?? "python3" };
            const panel = await app.commands.execute("docmanager:open", { path, factory: "Notebook", kernel });
            await panel.sessionContext.ready;
            const ranks = known.get(panel);
            await report(ranks, ranks.start("-n 4"));
            return panel;
          },
        });
        // In this category the launcher takes a picture only by its address. Readable in both themes.
        const kernelIconUrl = `data:image/svg+xml,${encodeURIComponent(ICON.replace("#616161", "#1f83c9"))}`;
        launcher.add({ command: "allranks:new-notebook", category: "Notebook", rank: 10, kernelIconUrl });
      }
    },
  };
  return [plugin];
};
