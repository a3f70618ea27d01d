"""What ranks were doing, and printing, when they died: for the reports of their deaths."""

from __future__ import annotations

from allranks.cluster.failures import (
    DEATH,
    IN_CELL,
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
    """The last known line of each rank, in ``lines``, and which part of its log it has sent."""

    def __init__(self, ranks: ClusterState) -> None:
        self._ranks = ranks
        self.lines: dict[int, str] = {}
        self._lines_of = 0
        #: The cells, as ``In[3]``, by the file names of their code.
        self._names: dict[str, str] = {}
        self._sent_nbytes: dict[int, int] = {}
        #: How long each rank's log was when its last cell ended, or it came.
        self._nbytes_before: dict[int, int] = {}
        #: What was read of logs before their ranks come, or count as dead.
        self._lengths: dict[int, int] = {}
        self._tails: dict[int, str] = {}

    def measure_log(self, hello: Hello) -> None:
        """Reads the length of a log, on a disk that may be slow: `begin` needs it next."""
        self._lengths[hello.rank] = log_length(hello.log)

    def read_log(self, rank: int) -> None:
        """Reads the end of a log, on a disk that may be slow: `death_text` needs it next."""
        if rank in self._ranks.hellos:
            self._tails[rank] = self._last_words(rank)

    def begin(self, hello: Hello) -> None:
        """Handles a new process, or one that another notebook has started."""
        self.lines.pop(hello.rank, None)
        length = self._lengths.pop(hello.rank, 0)
        self._sent_nbytes[hello.rank] = self._nbytes_before[hello.rank] = length

    def begin_cell(self, cell: int) -> None:
        self._lines_of = cell
        self.lines.clear()

    def end_cell(self, rank: int) -> None:
        """Handles the reply of a rank."""
        self._nbytes_before[rank] = self._sent_nbytes.get(rank, 0)

    def name_cell(self, source: str, number: int) -> None:
        self._names[code_name(source)] = f"In[{number}]"

    def note_line(self, cell: int, rank: int, line: str) -> None:
        """Notes the line that a rank is at; that of an earlier cell may come late."""
        if line and cell >= self._lines_of:
            self.lines[rank] = line

    def note_sent(self, rank: int, nbytes: int) -> None:
        """Notes how much of its log a rank has sent."""
        self._sent_nbytes[rank] = nbytes

    def unsent_output(self, rank: int) -> str:
        # The part of its output that the rank did not get to send.
        unsent = log_end(self._ranks.hellos[rank].log, self._sent_nbytes.get(rank, 0))
        return with_numbers(unsent, self._names)

    def _last_words(self, rank: int) -> str:
        # The end of its output since its last cell.
        words = log_tail(self._ranks.hellos[rank].log, self._nbytes_before.get(rank, 0))
        return with_numbers(words, self._names)

    def death_text(self, end: ProcessExit) -> str:
        """Returns how a rank died, in words that follow its name."""
        line = self.lines.get(end.rank, "")
        where = f", last seen at {line}" if line else ""
        words = self._tails.pop(end.rank, "").splitlines()[-_LAST_LINES:]
        last = f"; its last lines: {' │ '.join(words)[-_LAST_CHARACTERS:]}" if words else ""
        return f"{end.how(explain=False)}{where}{last}"

    def report(self, end: ProcessExit) -> Report:
        """Returns the report of a cell on a rank that died in it, with its last words."""
        hello, words = self._ranks.hellos[end.rank], self._last_words(end.rank)
        place, _, source = self.lines.get(end.rank, "").partition("  ")
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
