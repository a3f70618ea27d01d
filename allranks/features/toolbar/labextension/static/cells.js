// What the extension reads in cells, and writes into them.

// Any of these starts ranks when all cells of the notebook run in a new kernel.
const STARTS = /^\s*(%distributed\s+(start|attach)\b|%dist_init\b|%%distributed\s(.*\s)?(-n|--on)\b)/m;

/** Whether a cell starts the ranks of its notebook. */
export const startsRanks = (source) => STARTS.test(source);

/** The cell after which every following cell runs on ranks. */
export const startCell = (options) => `%load_ext allranks\n%distributed start ${options}\n%distributed on`;

/** The cells of the notebook that the launcher's card opens. */
export const firstCells = (options) => [
  startCell(options),
  'print("hello from rank", rank, "of", size)\nfor step in range(20):\n    log(loss=(rank + 1) / (step + 1))',
];
