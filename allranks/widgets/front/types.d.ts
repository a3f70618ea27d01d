// The records that the kernel and the panel exchange, for the checks of types only.

export type Selected = number | null;

export interface Settings {
  closed?: string[];
  selected?: Selected;
  tiles?: boolean;
  range?: [number, number] | null;
  axes?: Record<string, { x?: boolean; y?: boolean }>;
  steps?: [number, number] | null;
  mean?: boolean;
  smoothing?: number;
  query?: string;
  fold?: boolean;
  sorted?: string | null;
  down?: boolean;
}

export interface Tile {
  rank: number;
  host: string;
  device: string;
  pid: number;
  /** What the rank does: the word of its state, with its mark and its class, and the text for people. */
  state: string;
  mark: string;
  look: string;
  doing: string;
  line: string;
  rss_nbytes: number;
  cpu_percent: number;
  gpu_nbytes?: number;
  gpu_own_nbytes?: number;
  gpu_total_nbytes?: number;
  gpu_percent?: number;
  gpu_celsius?: number;
  step: number | null;
  member: number | null;
}

/** A step and a value; a value that is not finite, as text, where `broken`. */
export type Point = [number, number];

export interface SeriesHead {
  number: number;
  name: string;
  rank: number;
  member: string;
  count: number;
  anew?: boolean;
  stride: number;
  broken?: [number, string] | null;
}

export interface Series {
  number: number;
  name: string;
  rank: number;
  member: string;
  steps: number[];
  values: number[];
  stride: number;
  broken: [number, string] | null;
  last: Point;
}

export type Parameter = number | string | boolean;

export interface Member {
  number: number;
  state: string;
  error: string;
  rank: number | null;
  metric: number | null;
  seconds: number | null;
  parameters: Record<string, Parameter>;
  at: number;
}

export interface Ensemble {
  metric?: string;
  lower?: boolean;
  order?: string;
  missing?: number;
  said?: string;
}

export interface CallRow {
  op: string;
  name: string;
  dtype: string;
  nbytes: number;
  calls: number;
  wait_seconds: number;
  transfer_seconds: number;
  busbw_gbps: number | null;
  best_gbps: number | null;
  /** The bus bandwidth in each part of the cell; empty where it is not known. */
  recent: number[];
}

export interface RankRow {
  rank: number;
  calls: number;
  wait_seconds: number;
  transfer_seconds: number;
}

export interface Timings {
  ranks: RankRow[];
  calls: CallRow[];
  straggler: string;
  cause?: string;
}

export type Pairs<T> = [T, number][];

export interface StripsMessage {
  rows: [number, number, number, number, number, number[], Pairs<number>, Pairs<string>][];
  bins: string;
}

export interface Where { line?: string; activity?: string; text?: string }

export interface LogHead { rank: number; spans: Point[]; skipped: number }

/** What changes: any part of it may be missing. */
export interface Message {
  seq: number;
  anew?: boolean;
  elapsed?: number;
  ended?: boolean;
  withLogs?: boolean;
  ranks?: Tile[];
  said?: string;
  timings?: Timings | null;
  strips?: StripsMessage | null;
  memory?: string;
  sections?: Record<string, string>;
  buttons?: { text: string; title: string }[];
  noted?: string;
  answer?: string;
  members?: (Ensemble & { rows: Member[] }) | null;
  where?: Where & { rank: number; what?: string };
  curves?: SeriesHead[];
  logs?: LogHead[];
}

export interface State extends Message {
  key: string;
  mode: string;
  watched?: boolean;
  paths: Record<string, string>;
  noun?: string;
  title: string;
  settings?: Settings;
  points?: DataView | null;
}

/** What a saved notebook has. */
export interface KeptState extends Omit<State, "curves" | "logs"> {
  apart: string[];
  curves: (Omit<Series, "last" | "values"> & { values: (number | null)[] })[];
  logs: { rank: number; skipped: number; pieces: [string, boolean][] }[];
}

/** Jupyter's side of a widget, as far as a page has it: its classes have no types here. */
/** JupyterLab's. */
export interface StatusSignal {
  connect(act: (kernel: unknown, status: string) => void): void;
  disconnect(act: (kernel: unknown, status: string) => void): void;
}

export interface Kernel {
  interrupt?: () => void;
  statusChanged?: StatusSignal;
}

export interface Model {
  get(name: string): any;
  on(name: string, act: (message: any, buffers: DataView[]) => void): void;
  send(message: object): void;
  widget_manager?: { context?: any; kernel?: Kernel };
}

export interface Line { xs: number[]; ys: number[] }

export interface Column { x: number; low: number; mean: number; high: number }

export interface PlotLine extends Line {
  label: string;
  rank: number;
  /** Of the colour, and of the dashes. */
  index: number;
  dash: number;
  faint: boolean;
  strong: boolean;
  last: number;
}

export interface PlotBand { label: string; index: number; dash: number; count: number; columns: Column[]; last: number }

/** What one chart shows. */
export interface Plot {
  name: string;
  xName: string;
  log: { x: boolean; y: boolean };
  range: [number, number] | null;
  lines: PlotLine[];
  bands: PlotBand[];
  marks: number[];
  /** Whether names stand beside the lines or bands. */
  named: boolean;
}

export interface PlotChoice {
  owners: Map<string, number>;
  noun: string;
  groups: Groups | null;
  mean: boolean;
  smoothing: number;
  selected: Selected;
  log: { x: boolean; y: boolean };
  range: [number, number] | null;
}

/** Ends are logarithms where an axis is logarithmic; `first` and `last` are steps. */
export interface Scale {
  x0: number;
  x1: number;
  y0: number;
  y1: number;
  first: number;
  last: number;
  left: number;
  right: number;
  top: number;
  bottom: number;
  /** What is written beside the axis. */
  heights: number[];
  beside: string[];
  x(value: number): number;
  y(value: number): number;
  step(pixel: number): number;
}

export interface LineStyle { colour: string; alpha: number; width: number; dash: number[] }

export interface Groups { name: string; labels: string[]; of: Map<number, number>; counts: number[] }

/** A section of the panel. */
export interface Panel {
  element: HTMLElement;
  readonly filled: boolean;
  draw(): void;
}

declare global {
  var allranksChosen: Map<string, Settings>;
  var allranksNotebooks: Set<any>;
  var allranksViews: Map<string, (box: HTMLElement) => boolean>;
}
