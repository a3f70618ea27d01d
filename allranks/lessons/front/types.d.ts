// The records that the kernel sends the player, for the checks of types only.

export interface Sent {
  sender: number;
  receiver: number;
  chunk: number;
  start: number;
  stop: number;
  adds: boolean;
  before: string[];
  received: string[];
  after: string[];
}

export interface Frame {
  phase: string;
  words: string;
  values: string[][];
  shares: number[][];
  messages: Sent[];
}

export interface Answer { said: string; right: boolean; why: string; chunk: number | null }

export interface Question { asked: string; rank: number; answers: Answer[] }

export interface State {
  place: string;
  title: string;
  cost: string;
  problem: string;
  algorithm: string;
  algorithms: string[];
  mostRanks: number;
  mostValues: number;
  chunks: [number, number, number][];
  questions: Question[][];
  frames: Frame[];
}

export interface Ink {
  paper: string;
  ink: string;
  soft: string;
  path: string;
  fill: string;
  edge: string;
  adds: string;
  replaces: string;
}

/** The path of what travels between two ranks. */
export interface Way {
  path: string;
  end: number[];
  toward: number[];
  at(share: number): number[];
}
