// What the extension reads in cells, and writes into them.

// Any of these starts ranks when all cells of the notebook run in a new kernel.
const STARTS = /^\s*(%distributed\s+(start|attach)\b|%dist_init\b|%%distributed\s(.*\s)?(-n|--on)\b)/m;
const LOADS = /^\s*%(re)?load_ext\s+allranks\b/m;
const EVERY_CELL = /^\s*(%distributed\s+on\b|%dist_init\b)/m;
const ON_RANKS = /^%%(distributed|rank|ensemble)\b/;
const PX = /^%%px\b/;
const NOT_FOUND = /magic (?:function )?`(%%?(?:distributed|rank|ensemble))` not found/;

export const LOAD_LINE = "%load_ext allranks";

/**
 * Whether a cell starts the ranks of its notebook.
 *
 * @param {string} source
 */
export const startsRanks = (source) => STARTS.test(source);

/**
 * Whether a cell alone starts the ranks in a new kernel.
 *
 * @param {string} source @param {boolean} everyCell whether every following cell runs on them
 */
export const isWholeStart = (source, everyCell) =>
  LOADS.test(source) && STARTS.test(source) && (!everyCell || EVERY_CELL.test(source));

/**
 * Whether a cell runs on ranks; `every_cell` and `local`, the beginnings of cells that do not, come from the kernel,
 * which has no state before it has loaded allranks.
 *
 * @param {string} source @param {{ every_cell: boolean, local: string[] } | null} state
 */
export const runsOnRanks = (source, state) => {
  const first = source.split("\n").find((line) => line.trim())?.trim() ?? "";
  if (ON_RANKS.test(first)) return true;
  // Without allranks, it is ipyparallel's.
  if (state && PX.test(first)) return true;
  return Boolean(state?.every_cell) && first !== "" && !state?.local.some((beginning) => first.startsWith(beginning));
};

/**
 * Whether outputs are from ranks, also in a notebook that was saved.
 *
 * @param {any} outputs JupyterLab's model of the outputs of a cell; null of a cell that was deleted
 */
export const areFromRanks = (outputs) => {
  for (let at = 0; at < (outputs?.length ?? 0); at++) if (outputs.get(at).metadata?.allranks) return true;
  return false;
};

/**
 * The magic of allranks that a cell has not found, because it was not loaded; empty if there is none.
 *
 * @param {any[]} outputs as a notebook has them
 */
export const unknownMagic = (outputs) => NOT_FOUND.exec(JSON.stringify(outputs))?.[1] ?? "";

/**
 * Whether a cell has not found a name in the notebook. An error on the ranks has another name there.
 *
 * @param {any[]} outputs as a notebook has them
 */
export const hasNameError = (outputs) => outputs.some(({ output_type, ename }) => output_type === "error" && ename === "NameError");

/**
 * The cell that starts ranks in a new kernel.
 *
 * @param {string} options @param {boolean} everyCell whether every following cell runs on them
 */
export const startCell = (options, everyCell) =>
  `${LOAD_LINE}\n%distributed start ${options}${everyCell ? "\n%distributed on" : ""}`;

/**
 * The cells of the notebook that the launcher's card opens.
 *
 * @param {string} options
 */
export const firstCells = (options) => [
  startCell(options, true),
  'print("hello from rank", rank, "of", size)\nfor step in range(20):\n    log(loss=(rank + 1) / (step + 1))',
];
