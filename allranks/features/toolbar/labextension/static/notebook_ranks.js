// The ranks of one notebook, as the kernel describes them. Commands are typed into the kernel as
// %distributed commands; the state comes over a comm that allranks/features/toolbar/notebook.py has
// registered.

// JupyterLab's own classes have no types here.
/** @typedef {any} Kernel */
/** @typedef {any} Trans */

/**
 * @typedef {object} Row one rank, or several that hardly differ
 * @property {string} ranks
 * @property {string} processes
 * @property {string} host
 * @property {string} device
 * @property {[number, number]} nbytes the least and the most memory
 * @property {string} state
 * @property {string} detail
 * @property {boolean} is_bad
 */
/**
 * @typedef {object} State what the kernel sends; without ranks only the size and which cells run on ranks
 * @property {number} size
 * @property {number} [starting]
 * @property {string[]} hosts
 * @property {string} summary
 * @property {Row[]} [rows]
 * @property {boolean} [is_busy] whether some rank runs something, also while the notebook's kernel is idle
 * @property {string} [interrupt] what another interrupt does, where the first one has not ended everything
 * @property {boolean} asks whether some rank waits for a person
 * @property {string} logs
 * @property {boolean} every_cell
 * @property {string[]} local
 * @property {string[]} [ran] the cells, by their ids, that ranks have run since the last state
 */
/** @typedef {{ name: string, value: string, state: string, each: string }} Variable */
/** @typedef {{ rank: number, text: string }} Log */
/** @typedef {{ pauses: { rank: number, place: string }[], shown: number | null, only: boolean, notice: string }} Pauses */
/** @typedef {InstanceType<ReturnType<typeof makeNotebookRanks>>} Ranks */

const TARGET = "allranks.ranks";
const LOOK_MS = 1000;
const MOST_QUIET_MS = 20_000;
const MOST_ENDING_MS = 5_000;
/** @type {Pauses} */
const NO_PAUSES = { pauses: [], shown: null, only: false, notice: "" };

// A new kernel does not know of the ranks that ended with the one before, so the tab of the browser keeps them.
const lostKey = (/** @type {any} */ context) => `allranks:lost:${context.path}`;

/** @param {any} context @returns {{ size: number, every_cell: boolean } | null} */
const keptLost = (context) => {
  try {
    const { size, every_cell: everyCell } = JSON.parse(sessionStorage.getItem(lostKey(context)) ?? "{}");
    return Number.isInteger(size) ? { size, every_cell: Boolean(everyCell) } : null;
  } catch { // a browser that stores nothing for this page, as within a page of another server
    return null;
  }
};

/** @param {any} context @param {State | null} lost */
const keepLost = (context, lost) => {
  try {
    if (lost === null) sessionStorage.removeItem(lostKey(context));
    else sessionStorage.setItem(lostKey(context), JSON.stringify({ size: lost.size, every_cell: lost.every_cell }));
  } catch { /* refused, or full: then the page that is loaded again does not know of them */ }
};

const isSize = (/** @type {string} */ options) => /^(-n \d+)?$/.test(options);

// A kernel colours what it prints.
const plain = (/** @type {string} */ text) => text.replace(/\x1b\[[0-9;]*m/g, "");

const after = (/** @type {number} */ ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** @param {Record<string, any>} packages */
export const makeNotebookRanks = (packages) => {
  const { KernelMessage, Signal, areFromRanks, hasNameError, isWholeStart, runsOnRanks, startCell, startsRanks, unknownMagic } = packages;
  /** The ranks of one notebook. `state` is null until the kernel has loaded allranks; `known` is whether it has. */
  return class NotebookRanks {
    /** @param {any} context @param {Trans} trans @param {() => boolean} compares whether the page shows the variables of the ranks */
    constructor(context, trans, compares) {
      this.context = context;
      this.trans = trans;
      this.compares = compares;
      this.changed = new Signal(this);
      this.disposed = new Signal(this);
      this.isDisposed = false;
      this.python = false;
      this.known = true;
      /** @type {State | null} */
      this.state = null;
      this.doing = "";
      this.text = "";
      this.notification = "";
      // The notification about a cell that has failed without ranks: one for all cells.
      this.advice = "";
      this.options = "";
      this.offers = false;
      /** @type {{ size: number, every_cell: boolean } | null} those that ended with their kernel, until others run; also in a page that is loaded again */
      this.lost = keptLost(context);
      /** @type {Variable[]} */
      this.variables = [];
      this.missing = "";
      this.debugger = NO_PAUSES;
      /** @type {any} */
      this.comm = null;
      /** @type {Set<string>} the cells, by their ids, that ranks have run */
      this.ran = new Set();
      /** @type {Map<number, Window | null>} tabs of the browser that wait for a log, by rank */
      this.pages = new Map();
      const { sessionContext } = context;
      sessionContext.statusChanged.connect(this.onStatus, this);
      sessionContext.kernelChanged.connect(this.look, this);
      sessionContext.iopubMessage.connect(this.onMessage, this);
      context.disposed.connect(this.dispose, this);
      void sessionContext.ready.then(() => this.look());
    }

    dispose() {
      if (this.isDisposed) return;
      this.isDisposed = true;
      this.comm?.dispose();
      this.disposed.emit();
      Signal.clearData(this);
    }

    /** @param {unknown} _ @param {string} status */
    onStatus(_, status) {
      if (["restarting", "autorestarting", "dead", "terminating"].includes(status)) this.forget();
      // A page may be loaded, or a cell run by another extension, while no cell was scheduled here.
      else if (status === "busy" && this.runs) this.changed.emit();
    }

    /** @param {unknown} _ @param {any} message */
    onMessage(_, { header, content }) {
      if (header.msg_type === "debug_event" && this.comm !== null) void this.askDebugger();
      // Ranks are being started by a cell that has loaded allranks, for which no question was asked.
      const isFirst = header.msg_type === "comm_msg" && content.comm_id === TARGET && this.comm === null;
      if (isFirst && this.kernel) {
        this.connect(this.kernel);
        this.take(content.data);
      }
    }

    /** Looks at a kernel that is new to this notebook. */
    async look() {
      if (this.isDisposed) return;
      this.forget();
      const kernel = this.kernel;
      // A kernel whose cell runs does not give its language.
      const language = (await kernel?.spec)?.language ?? (await kernel?.info)?.language_info.name;
      this.python = language?.toLowerCase() === "python";
      this.known = !this.python;
      this.changed.emit();
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

    /** Whether ranks run something that the kernel does not wait for, as `%%px --noblock`. */
    get busyBeside() {
      return Boolean(this.state?.is_busy) && !this.runs && !this.doing;
    }

    get size() {
      return this.state?.size ?? 0;
    }

    /** How many ranks are being started. */
    get starting() {
      return this.state?.starting ?? 0;
    }

    /** @param {number} n */
    count(n) {
      return this.trans._n("%1 rank", "%1 ranks", n, n);
    }

    get title() {
      const { state } = this;
      if (this.starting) return this.trans.__("starting %1 …", this.count(this.starting));
      if (this.doing) return this.doing;
      if (!this.known) return "…";
      if (!state?.size) return this.trans.__("no ranks");
      return `${this.count(state.size)} · ${state.every_cell ? this.trans.__("every cell") : "%%distributed"}`;
    }

    get place() {
      const hosts = this.state?.hosts ?? [];
      return this.trans.__("%1 on %2", this.count(this.size), hosts.length > 2 ? this.trans.__("%1 hosts", hosts.length) : hosts.join(", "));
    }

    /** Where the ranks are, and which cells run on them. */
    get description() {
      if (!this.state?.size) return this.trans.__("The ranks of this notebook");
      const cells = this.state.every_cell ? this.trans.__("Every cell runs on them") : this.trans.__("Cells that begin with %1 run on them", "%%distributed");
      return `${this.place}. ${cells}.`;
    }

    /**
     * Whether a cell of the notebook runs on ranks when it is run.
     *
     * @param {any} cell
     */
    runsCell({ type, sharedModel }) {
      return this.python && type === "code" && runsOnRanks(sharedModel.source, this.state);
    }

    /**
     * Whether ranks ran a cell when it was last run.
     *
     * @param {any} cell
     */
    ranCell({ type, id, outputs }) {
      return type === "code" && (this.ran.has(id) || areFromRanks(outputs));
    }

    // Of the kernel "allranks", which starts ranks by itself.
    get isKernelOfRanks() {
      return Boolean(this.kernel?.name.startsWith("allranks"));
    }

    /** Whether no cell starts the ranks, so that a new kernel cannot run the notebook. */
    get isUnwritten() {
      if (!this.size || this.isKernelOfRanks) return false;
      // A cell that came before %load_ext has started nothing.
      return !this.codeCells.some(({ sharedModel, outputs }) => startsRanks(sharedModel.source) && !unknownMagic(outputs.toJSON()));
    }

    /** @returns {any[]} their models */
    get codeCells() {
      return [...this.context.model.cells].filter(({ type }) => type === "code");
    }

    get startLines() {
      const { size, every_cell: everyCell } = (this.size ? this.state : this.lost) ?? { size: 0, every_cell: true };
      return startCell(isSize(this.options) ? `-n ${size}` : this.options, everyCell);
    }

    /** The model of the cell that starts, in a new kernel, ranks like those that ended. */
    get wholeStart() {
      return this.codeCells.find(({ sharedModel }) => isWholeStart(sharedModel.source, Boolean(this.lost?.every_cell))) ?? null;
    }

    /**
     * Whether a cell has failed because the ranks ended with their kernel, and no other cell starts them.
     *
     * @param {any[]} outputs as a notebook has them
     */
    lacksRanks(outputs) {
      if (!this.lost || this.size || this.starting || this.isKernelOfRanks) return false;
      if (this.lost.every_cell) return hasNameError(outputs) || unknownMagic(outputs) !== "";
      const starts = this.codeCells.some(({ sharedModel }) => startsRanks(sharedModel.source));
      return unknownMagic(outputs) !== "" && (this.wholeStart !== null || !starts);
    }

    writeStart() {
      this.context.model.sharedModel.insertCell(0, { cell_type: "code", metadata: {}, source: this.startLines });
      this.changed.emit();
    }

    forget() {
      this.comm?.dispose();
      if (this.state?.size) {
        this.lost = this.state;
        keepLost(this.context, this.state);
      }
      Object.assign(this, { state: null, comm: null, known: true, doing: "", text: "", variables: [], missing: "" });
      this.debugger = NO_PAUSES;
      this.changed.emit();
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
          this.changed.emit();
          return;
        }
        this.connect(kernel);
      }
      this.comm.send({});
      // Only idle ranks answer.
      if (this.size && !this.runs && !this.busyBeside && this.compares()) this.comm.send({ variables: true });
    }

    /** @param {Kernel} kernel */
    connect(kernel) {
      // Without open(): the kernel has made the other end.
      this.comm = kernel.createComm(TARGET, TARGET);
      this.comm.onMsg = (/** @type {any} */ message) => this.take(message.content.data);
    }

    /**
     * Takes what the kernel sends about its ranks.
     *
     * @param {any} data a state, or variables, or a log
     */
    take({ variables, missing, log, ...state }) {
      this.known = true;
      for (const id of state.ran ?? []) this.ran.add(id);
      if (log) this.showLog(log);
      else if (variables) Object.assign(this, { variables, missing });
      else this.state = state;
      if (this.size && this.lost) {
        this.lost = null;
        keepLost(this.context, null);
      }
      this.changed.emit();
      // Of a page that is loaded while ranks are paused.
      if (state.asks && !this.debugger.pauses.length) void this.askDebugger();
    }

    /**
     * Opens the log of a rank as text, in a tab of the browser: at once, because later a browser may refuse.
     *
     * @param {number} rank
     */
    openLog(rank) {
      if (this.comm === null) return;
      this.pages.get(rank)?.close();
      this.pages.set(rank, window.open("", "_blank"));
      this.comm.send({ log: rank });
    }

    /** @param {Log} log */
    showLog({ rank, text }) {
      const page = this.pages.get(rank);
      // Another page of the notebook may have asked.
      if (!page) return;
      this.pages.delete(rank);
      page.location.href = URL.createObjectURL(new Blob([text], { type: "text/plain;charset=utf-8" }));
    }

    /**
     * Asks for the comm in a subshell: a kernel whose cell runs does not answer otherwise.
     *
     * @param {Kernel} kernel @param {object} content
     */
    async findComm(kernel, content) {
      const from = { username: kernel.username, session: kernel.clientId };
      // Not requestCreateSubshell(): it refuses before the kernel has answered another question.
      const control = (/** @type {string} */ msgType, /** @type {object} */ content) => kernel.sendControlMessage(
        KernelMessage.createMessage({ ...from, msgType, channel: "control", content }), true,
      ).done;
      const { subshell_id: subshellId } = (await control("create_subshell_request", {})).content;
      const asked = { ...from, msgType: "comm_info_request", channel: "shell", subshellId, content };
      const info = await kernel.sendShellMessage(KernelMessage.createMessage(asked), true).done;
      void control("delete_subshell_request", { subshell_id: subshellId });
      return info;
    }

    /** Asks the kernel's debugger where the ranks are paused. */
    async askDebugger() {
      const body = await this.debug("allranksPauses").catch(() => null);
      this.debugger = body?.pauses ? body : NO_PAUSES;
      this.changed.emit();
    }

    /**
     * Chooses the rank that the debugger shows, and whether it steps alone.
     *
     * @param {number} rank @param {boolean} only
     */
    async choose(rank, only) {
      if (!Number.isInteger(rank)) return;
      const expression = `%distributed debug -r ${rank}${only ? " --only" : ""}`;
      await this.debug("evaluate", { expression }).catch((error) => {
        this.text = error.message;
      });
      await this.askDebugger();
    }

    /** @param {string} command @param {object} args */
    async debug(command, args = {}) {
      const { content } = await this.kernel.requestDebug({ type: "request", seq: 0, command, arguments: args }).done;
      if (!content.success) throw new Error(content.message);
      return content.body;
    }

    /** Interrupts the running cell, or what the ranks do beside it. */
    interrupt() {
      return this.busyBeside ? this.comm?.send({ interrupt: true }) : this.kernel?.interrupt();
    }

    /** Ends the running cell: the second interrupt ends ranks that do not react to the first. */
    async endCell() {
      for (let interrupts = 0; this.runs && interrupts < 2; interrupts++) {
        await this.kernel?.interrupt();
        for (let waited = 0; this.runs && waited < MOST_ENDING_MS; waited += LOOK_MS / 4) await after(LOOK_MS / 4);
      }
    }

    /**
     * Runs commands one after the other, and shows what they print; true if none has failed.
     *
     * @param {string} doing @param {string[]} commands
     */
    async type(doing, commands, { endsCell = false } = {}) {
      const kernel = this.kernel;
      if (!kernel || this.doing) return false;
      Object.assign(this, { doing, text: "" });
      this.changed.emit();
      if (endsCell) await this.endCell();
      let failed = false;
      for (const code of commands) {
        const future = kernel.requestExecute({ code, store_history: false, allow_stdin: false });
        future.onIOPub = (/** @type {any} */ { header, content }) => {
          if (header.msg_type === "stream" && !code.startsWith("%load_ext")) this.text += plain(content.text);
          if (header.msg_type === "error") {
            const interrupted = content.ename === "KeyboardInterrupt";
            this.text += `${interrupted ? this.trans.__("The command was interrupted.") : plain(content.evalue) || content.ename}\n`;
          }
          this.changed.emit();
        };
        failed = !(await this.answer(kernel, future));
        if (failed) break;
      }
      this.doing = "";
      this.changed.emit();
      const asked = this.ask();
      if (!failed) await asked; // else the kernel may not answer this either
      return !failed;
    }

    /**
     * Whether a command has succeeded; false too if the kernel is not busy and does not answer.
     *
     * @param {Kernel} kernel @param {any} future
     */
    async answer(kernel, future) {
      /** @type {boolean | null} */
      let ok = null;
      const done = future.done.then(
        (/** @type {any} */ { content }) => { ok = content.status === "ok"; },
        () => { ok = false; }, // the kernel has ended
      );
      // An interrupt of a kernel that starts may stop it half-way: it runs, and answers nothing.
      for (let quiet = 0; ok === null && quiet < MOST_QUIET_MS; ) {
        await Promise.race([done, after(LOOK_MS)]);
        quiet = kernel.status === "busy" ? 0 : quiet + LOOK_MS;
      }
      if (ok === null) {
        const quiet = this.trans.__("The kernel has not answered for %1 s. Restart it: Kernel, Restart Kernel …", MOST_QUIET_MS / 1000);
        this.text += `${quiet}\n`;
      }
      return ok === true;
    }

    /** @param {string} options */
    async start(options) {
      const load = this.comm === null ? ["%load_ext allranks"] : [];
      // In one cell: the page may be loaded again in between.
      const [, n] = /^-n (\d+)$/.exec(options) ?? [];
      const doing = this.trans.__("starting %1 …", n ? this.count(Number(n)) : this.trans.__("ranks"));
      const started = await this.type(doing, [...load, `%distributed start ${options}\n%distributed on`]);
      if (started) Object.assign(this, { options, offers: true });
      this.changed.emit();
      return started;
    }

    /** @param {string} options */
    async restart(options) {
      const done = await this.type(this.trans.__("restarting …"), [`%distributed restart ${options}`], { endsCell: true });
      // As the kernel has them: over those before.
      if (done && options) this.options = isSize(options) && isSize(this.options) ? options : `${this.options} ${options}`.trim();
      return done;
    }

    stop() {
      return this.type(this.trans.__("stopping …"), ["%distributed off\n%distributed stop"], { endsCell: true });
    }
  };
};
