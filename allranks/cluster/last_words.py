"""What ranks were doing, and printing, when they died: for the reports of their deaths."""

from __future__ import annotations

from allranks.cluster.failures import (
    DEATH,
    IN_CELL,
    SHOWN_NBYTES,
    ProcessExit,
    death_lines,
    log_end,
    log_length,
    log_tail,
)
from allranks.cluster.state import ClusterState
from allranks.errors import Report
from allranks.records.code_names import code_name, with_numbers
from allranks.records.wire import Hello

_LAST_LINES, _LAST_CHARACTERS = 3, 300


class LastWords:
    """What is needed to say it: noted with each cell, and looked at only when a rank dies."""

    def __init__(self, ranks: ClusterState) -> None:
        self._ranks = ranks
        #: The last known line of each rank, and the cell in which it was there.
        self._lines: dict[int, tuple[int, str]] = {}
        self.numbers: dict[str, int] = {}
        """The numbers of cells in the notebook, by their sources; see `name_cells`."""
        #: The cells, as ``In[3]``, by the file names of their code.
        self._names: dict[str, str] = {}
        self.sent_nbytes: dict[int, int] = {}
        """How much of its log each rank has sent."""
        self.nbytes_before: dict[int, int] = {}
        """How much it had sent when its last cell ended, or how long the log was when it came."""
        #: What was read of logs before their ranks come, or count as dead.
        self._lengths: dict[int, int] = {}
        self._tails: dict[int, str] = {}

    def measure_log(self, hello: Hello) -> None:
        """Reads the length of a log, on a disk that may be slow: `begin` needs it next."""
        self._lengths[hello.rank] = log_length(hello.log)

    def read_log(self, rank: int) -> None:
        """Reads the end of a log, on a disk that may be slow: `death_text` needs it next."""
        # Another thread may start all ranks again meanwhile.
        if (hello := self._ranks.hellos.get(rank)) is not None:
            self._tails[rank] = self._last_words(hello)

    def begin(self, hello: Hello) -> None:
        """Handles a new process, or one that another notebook has started."""
        self._lines.pop(hello.rank, None)
        length = self._lengths.pop(hello.rank, 0)
        self.sent_nbytes[hello.rank] = self.nbytes_before[hello.rank] = length

    def note_line(self, cell: int, rank: int, line: str) -> None:
        """Notes the line that a rank is at; that of an earlier cell may come late."""
        if line:
            self._lines[rank] = cell, line

    def _line(self, rank: int) -> str:
        cell, line = self._lines.get(rank, (0, ""))
        return line if cell >= self._ranks.begun else ""

    def name_cells(self) -> None:
        """Keeps the names of the cells so far in place of their sources, which may be long."""
        for source, number in self.numbers.copy().items():  # another thread may begin a cell
            self._names[code_name(source)] = f"In[{number}]"
            if self.numbers.get(source) == number:  # else that cell has the same source
                self.numbers.pop(source, None)

    def _with_numbers(self, text: str) -> str:
        if not text:
            return ""  # as of most deaths
        self.name_cells()
        return with_numbers(text, self._names)

    def unsent_output(self, rank: int) -> str:
        # The part of its output that the rank did not get to send.
        log, sent = self._ranks.hellos[rank].log, self.sent_nbytes.get(rank, 0)
        unsent = self._with_numbers(log_end(log, sent))
        hidden = log_length(log) - sent - SHOWN_NBYTES
        if unsent and hidden > 0:
            return f"… {hidden:,} bytes are not shown; {log} has them …\n{unsent}"
        return unsent

    def _last_words(self, hello: Hello) -> str:
        # The end of its output since its last cell.
        words = log_tail(hello.log, self.nbytes_before.get(hello.rank, 0))
        return self._with_numbers(words)

    def death_text(self, end: ProcessExit) -> str:
        """Returns how a rank died, in words that follow its name."""
        line = self._line(end.rank)
        where = f", last seen at {line}" if line else ""
        words = self._tails.pop(end.rank, "").splitlines()[-_LAST_LINES:]
        last = f"; its last lines: {' │ '.join(words)[-_LAST_CHARACTERS:]}" if words else ""
        return f"{end.how(explain=False)}{where}{last}"

    def report(self, end: ProcessExit) -> Report:
        """Returns the report of a cell on a rank that died in it, with its last words."""
        hello = self._ranks.hellos[end.rank]
        words = self._last_words(hello)
        place, _, source = self._line(end.rank).partition("  ")
        number = place.rpartition(":")[2]
        # The stack of a crash is exact. The last state that the rank has sent may be older.
        if crashed := IN_CELL.search(words):
            number, source = crashed[1], ""
        return Report(
            rank=end.rank,
            host=hello.host,
            device=hello.device,
            etype=DEATH,
            message=end.how(explain=False),  # the traceback explains the signal
            traceback=(
                (f"Host {end.host} {end.why}",)
                if end.why
                else (
                    f"pid {hello.pid} {end.how()}. The log is {hello.log}",
                    *([f"Its last lines:\n{words}"] if words and end.code < 0 else []),
                )
            ),
            line=int(number) if number.isdigit() else None,
            source_line=source.strip(),
            waiting=False,
        )

    def deaths_text(self) -> str:
        """Returns which ranks have died without replacement, and how."""
        dead = self._ranks.dead.copy()  # another thread may add one
        if any(end.why for end in dead.values()):
            return death_lines(dead.values())
        hellos = self._ranks.hellos
        return "; ".join(
            f"rank {rank} ({hellos[rank].host}, pid {hellos[rank].pid}) {end.how()}"
            for rank, end in sorted(dead.items())
        )
