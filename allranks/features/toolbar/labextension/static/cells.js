// What the extension reads in cells, and writes into them.

// Any of these starts ranks when all cells of the notebook run in a new kernel.
const STARTS = /^\s*(%distributed\s+(start|attach)\b|%dist_init\b|%%distributed\s(.*\s)?(-n|--on)\b)/m;
const ON_RANKS = /^%%(distributed|rank|ensemble|px)\b/;

/**
 * Whether a cell starts the ranks of its notebook.
 *
 * @param {string} source
 */
export const startsRanks = (source) => STARTS.test(source);

/**
 * Whether a cell runs on ranks; `every_cell` and `local`, the beginnings of cells that do not, come from the kernel.
 *
 * @param {string} source @param {{ every_cell: boolean, local: string[] }} state
 */
export const runsOnRanks = (source, { every_cell: everyCell, local }) => {
  const first = source.split("\n").find((line) => line.trim())?.trim() ?? "";
  if (ON_RANKS.test(first)) return true;
  return everyCell && first !== "" && !local.some((beginning) => first.startsWith(beginning));
};

/**
 * The cell after which every following cell runs on ranks.
 *
 * @param {string} options
 */
export const startCell = (options) => `%load_ext allranks\n%distributed start ${options}\n%distributed on`;

/**
 * The cells of the notebook that the launcher's card opens.
 *
 * @param {string} options
 */
export const firstCells = (options) => [
  startCell(options),
  'print("hello from rank", rank, "of", size)\nfor step in range(20):\n    log(loss=(rank + 1) / (step + 1))',
];
