"""What every cell needs and one has broken is put right when that one ends, and said.

Python's own functions, the standard descriptors and the standard streams. What a cell replaces in
other modules stays replaced: the rank has taken what it needs of them before the first cell.
"""

from __future__ import annotations

import builtins
import os

from allranks.engine.output.streams import same_file
from allranks.engine.output.transcript import Transcript

#: Programs replace these with good reason: something that can be called stays.
_OFTEN_REPLACED = {
    *("print", "input", "open", "help", "exit", "quit", "breakpoint", "__import__"),
    *("copyright", "credits", "license", "display", "get_ipython"),
}
_NAMES = vars(builtins)
_CALLABLE = {name: value for name, value in _NAMES.items() if callable(value)}
_OWN = tuple((name, _CALLABLE[name]) for name in _CALLABLE.keys() - _OFTEN_REPLACED)
_OTHERS = tuple((name, _CALLABLE[name]) for name in _CALLABLE.keys() & _OFTEN_REPLACED)
#: So many replaced names are told.
_NAMED = 5
_STANDARD = ("standard input", "standard output", "standard error")


class Mender:
    """Compares what every cell needs with what it was before the first one.

    Args:
        transcript: where standard output and standard error belong.
    """

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._replaced: list[str] = []
        self._input = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(self._input, 0)

    def builtins(self) -> None:
        """Puts Python's own functions back, before anything else is done after a cell."""
        # Nothing that may have been replaced can be called here.
        for name, value in _OWN:
            if _NAMES.get(name) is not value:
                _NAMES[name] = value
                self._replaced.append(name)
        for name, value in _OTHERS:
            if not callable(_NAMES.get(name)):
                _NAMES[name] = value
                self._replaced.append(name)

    def rest(self) -> list[str]:
        """Puts descriptors 0, 1 and 2 and the streams back; returns what to say of it all."""
        said = []
        replaced, self._replaced = self._replaced, []
        if replaced:
            names = ", ".join(sorted(replaced)[:_NAMED]) + (" …" if len(replaced) > _NAMED else "")
            said.append(
                f"this cell replaced {names}, which all of Python uses. The originals are restored."
            )
        closed = self._standard()
        if closed:
            said.append(f"this cell closed or redirected {', '.join(closed)}: restored.")
        return said

    def _standard(self) -> list[str]:
        moved = self._transcript.streams.mend_descriptors()
        if not same_file(0, self._input):
            os.dup2(self._input, 0)
            moved.insert(0, 0)
        names = [f"{_STANDARD[number]} (descriptor {number})" for number in moved]
        return names + self._transcript.streams.mend_python()
