"""A session in a real notebook's kernel."""

from __future__ import annotations

import ast
import base64
import os
import pickle
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.faults.notebook import GONE_SECONDS, Notebook
from tests.fuzz.grammar import Fault
from tests.fuzz.sessions import ENVIRONMENT, HANG_SECONDS, Ended, Session, more
from tests.kernel import ANSI, Cell, KernelDied

_REPORTS = "import sys as _s; print([(r.rank, r.etype, r.waiting) for r in _s.last_value.reports])"
_REPORTED = ("CellFailed", "CellInterrupted", "CellTimeout")
_ONCE = "import numpy\nfrom IPython.display import HTML\nHTML('x' * 200_000)"
"""numpy has threads, and pyzmq starts one when something large is shown; these never end."""
_FORGET = "import gc, sys; sys.last_value = sys.last_traceback = sys.last_exc = None; gc.collect();"
"""IPython keeps the last error, and with it all that was at hand."""
_NBYTES = 3_000_000
"""Far more than the text of a cell may be, whose every change is sent whole."""


class InNotebook(Session):
    """Ranks of ``%%distributed`` cells."""

    kind = "notebook"

    def __init__(self, size: int, folder: Path) -> None:
        super().__init__(size, folder)
        cwd = folder / "notebook"
        cwd.mkdir()
        self.notebook = Notebook(cwd, dict(ENVIRONMENT))
        self.notebook.__enter__()
        try:
            # What is made once, with the first ranks, is made before anything is counted.
            # What a cell here breaks is all lost, so that one seed gives the same session.
            self._must("%distributed heal off")
            self._must("%distributed start -n 1")
            self._must(_ONCE)
            self._must("%distributed stop")
            self._idle = self._held()
            self._must(f"%distributed start -n {size}")
            self.set_up()
        except BaseException:
            self.abandon()
            raise

    def cell(self, source, ranks=None, timeout=None, presses=(), signals=(), wants_values=False):
        options = " -o _values" if wants_values else ""
        options += f" -r {','.join(map(str, ranks))}" if ranks is not None else ""
        options += f" --timeout {timeout:g}" if timeout is not None else ""
        cell = self.notebook.start(f"%%distributed{options}\n{source}")
        # An interrupt that comes before the kernel has begun interrupts nothing.
        self._guarded(cell, lambda: cell.begun or cell.done)
        started = time.monotonic()
        moments = [(moment, -1, 0) for moment in presses] + list(signals)
        for moment, rank, number in sorted(moments):
            # A signal goes out even where the cell has ended: another one has to follow it.
            self._pump(cell, started + moment, even_ended=rank >= 0)
            if rank >= 0:
                with suppress(ProcessLookupError):
                    os.kill(self.pids[rank], number)
            elif not cell.done:
                self.notebook.interrupt()
        ended = self._ended(self._wait(cell))
        if wants_values and ended.how == "ok":
            ended.values = self._value("_values")
        if ended.how in _REPORTED:
            ended.reports = ast.literal_eval(self._must(_REPORTS).stdout)
        return ended

    def push(self, name: str, expression: str) -> Ended:
        return self._ended(self._run(f"{name} = {expression}\n%distributed push {name}"))

    def pull(self, name: str) -> Ended:
        ended = self._ended(self._run(f"_pulled = %distributed pull {name}"))
        if ended.how == "ok":
            ended.values = list(self._value("_pulled").values())
        return ended

    def status(self) -> Ended:
        ended = self._ended(self._run("%distributed status"))
        rows = re.findall(r"rank (\d+)  pid (\d+)  .*?  (\w+)(?:  .*)?$", ended.text, re.MULTILINE)
        ended.values = [(int(pid), state) for _, pid, state in sorted(rows)]
        return ended

    def restart(self, size: int) -> None:
        self._must(f"%distributed restart -n {size}")
        self.size = size

    def stop(self) -> None:
        self._must("%distributed stop")
        # A number of ranks that was asked for is forgotten with them.
        self._must(f"%distributed start -n {self.size}")

    def revive(self) -> None:
        """The next cell starts ranks by itself."""

    def leader(self) -> psutil.Process:
        return psutil.Process(self.notebook.pid)

    def close(self) -> None:
        try:
            self.notebook.note_files()
            self._must("%distributed stop")
            deadline = time.monotonic() + GONE_SECONDS
            while more(held := self._held(), self._idle):
                if time.monotonic() > deadline:
                    raise Fault("left", f"descriptors, threads: {self._idle} before, {held} after")
            try:
                self.notebook.wait_for_no_children(GONE_SECONDS)
                self.notebook.shutdown()
                self.notebook.check_nothing_left()
            except (TimeoutError, AssertionError) as error:
                raise Fault("left", f"{error}{self.notebook.files_left()}") from error
        finally:
            self.abandon()

    def abandon(self) -> None:
        self.notebook.stop()

    def _held(self) -> tuple[int, int]:
        """How many descriptors and threads the kernel holds without ranks."""
        self._must(_FORGET)
        self.notebook.drain(0.3)
        links = []
        for link in Path(f"/proc/{self.notebook.pid}/fd").iterdir():
            with suppress(OSError):
                links.append(os.readlink(link))
        # IPython opens its history as it pleases.
        mine = [link for link in links if ".ipython" not in link]
        return len(mine), self.leader().num_threads()

    def _pump(self, cell: Cell, until: float, even_ended: bool) -> None:
        def over() -> bool:
            return time.monotonic() >= until or (cell.done and not even_ended)

        self._guarded(cell, over)

    def _wait(self, cell: Cell) -> Cell:
        self._guarded(cell, lambda: cell.done)
        return cell

    def _guarded(self, cell: Cell, over: Any) -> None:
        try:
            self.notebook.pump(over, HANG_SECONDS, "the end", cell)
        except TimeoutError as error:
            raise Fault("hang", f"{error}\n{self.processes()}") from error
        except KernelDied as error:
            raise Fault("kernel died", str(error)) from error

    def _run(self, source: str) -> Cell:
        return self._wait(self.notebook.start(source))

    def _must(self, source: str) -> Cell:
        cell = self._run(source)
        if cell.status != "ok":
            raise Fault("refused", f"{source}\n{cell.text}")
        return cell

    def _value(self, name: str) -> Any:
        dumped = f"_b.b64encode(_p.dumps({name})).decode()"
        pickled = f"import base64 as _b, pickle as _p; print({dumped})"
        return pickle.loads(base64.b64decode(self._must(pickled).stdout))

    def _ended(self, cell: Cell) -> Ended:
        if cell.iopub_nbytes > _NBYTES:
            raise Fault("flood", f"{cell.iopub_nbytes:,} bytes went to the front end")
        text = cell.text + ANSI.sub("", cell.error_value)
        how = "ok" if cell.status == "ok" else cell.error_name or cell.status
        return Ended(how, cell.error_value, text, bundles=_bundles(cell), nbytes=cell.iopub_nbytes)

    def processes(self) -> str:
        """Returns what the kernel's processes are doing."""
        return "\n".join(
            f"{process.pid} {process.status()} {' '.join(process.cmdline())[:100]}"
            for process in [self.leader(), *self.notebook.children()]
        )


def _bundles(cell: Cell) -> list[tuple[str, str]]:
    """Returns rich displays with the labels that stand above them."""
    found, label = [], ""
    for data in cell.displays:
        rich = data.get("text/html", "")
        if rich:
            found.append((rich, label))
        else:
            label = data.get("text/plain", "").strip().split("\n")[-1]
    return found
