// How charts look: colours, each with one meaning: ranks (or members), and what a rank spends its time on, and
// dashes, for more curves than there are colours. From the
// worst member to the best, lines are greys.
// The values are JSON, because the pictures without scripts have the same: see palette.py.

/** @typedef {{ light: string[], dark: string[] }} Colours */

/** @type {{ ranks: Colours, dashes: number[][], kinds: string[], time: Colours, worstToBest: { light: number[], dark: number[] } }} */
export const PALETTE = {
  "ranks": {
    "light": ["#0072b2", "#c27300", "#00855f", "#b5478a", "#2b8cbe", "#c04a00", "#7d6c00", "#6a51a3"],
    "dark": ["#56b4e9", "#f0a830", "#22c79a", "#e08fbf", "#9ad0f5", "#f0794a", "#e3d540", "#b3a2e0"]
  },
  "dashes": [[], [6, 3], [2, 2], [8, 3, 2, 3]],
  "kinds": ["start-up", "importing", "computing", "waiting", "transfer"],
  "time": {
    "light": ["#331b06", "#8d4f0c", "#40436d", "#ed5790", "#7978fb"],
    "dark": ["#fcf5e3", "#b0c75d", "#5d767f", "#fd7ad6", "#b62dfc"]
  },
  "worstToBest": {
    "light": [144, 16],
    "dark": [120, 255]
  }
};
