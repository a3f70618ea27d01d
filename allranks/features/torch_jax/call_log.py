"""The calls that the members of a process group of torch's own have begun, and their comparison.

A rank writes each call to memory that the members on its host share, before torch makes it, and
waits for no other rank. All of them compare: at the beginning of a call with the members that have
begun it, at the end of its wait, and in the thread that watches the rank's waits. A rank whose data
a result may contain has written its call before it sent them, so the end of a wait sees its call.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any, cast

from allranks.collectives import world as worlds
from allranks.collectives.calls.call import Agreement, Call, Members, Pause, PointCall
from allranks.collectives.calls.mismatches import mismatch_text
from allranks.collectives.calls.sites import Site
from allranks.collectives.calls.specs import Packed, Spec, pack_text
from allranks.collectives.calls.specs import unpack_text as unpacked
from allranks.collectives.host.memory import ORDERED, fence
from allranks.errors import CollectiveMismatch, RankLeft
from allranks.features.torch_jax import torch_state
from allranks.features.torch_jax.calls import TorchCall

AGAIN = "call init_process_group() again, and wrap models again."
ADVICE = f"torch's process groups are closed on all ranks: {AGAIN}"
#: Other ranks are about to make the call: after a moment the report of a mismatch names them too.
_ARRIVING_SECONDS = 0.3
#: As many fingerprints of a member can be read, and as many texts. Members may be that many
#: asynchronous calls apart; a member that is further ahead compares with those that are behind.
_PRINTS, _TEXTS = 4096, 64
_PRINTS_AT, _TEXT_BYTES = 64, 768
_TEXTS_AT = _PRINTS_AT + 8 * _PRINTS
_PAGE = _TEXTS_AT + _TEXTS * _TEXT_BYTES
_PRINT_BITS = 48


class CallLog:
    """The calls of a group's members on this host.

    A member's page has the numbers of its last call and of the last that torch has refused, a word
    for each of its last calls with number and fingerprint, and the texts of fewer. A reader that
    finds another number compares nothing.

    Args:
        members: the ranks of the group, in the order of torch's ranks.
        here: those on this host, the same on each of them.
        memory: what they share (`nbytes`).
    """

    def __init__(self, members: Members, here: tuple[int, ...], memory: mmap.mmap) -> None:
        self.members, self.memory = members, memory
        self.words = memoryview(memory).cast("Q")
        pages = {rank: place * _PAGE for place, rank in enumerate(here)}
        self._mine = pages.pop(members.rank)
        self._others = tuple(pages.items())
        self.number = 0
        """The number of this rank's last call."""
        self._compared = dict.fromkeys(pages, 0)
        self._own: dict[int, Call] = {}
        self._different = 0
        self._lock = threading.Lock()

    @staticmethod
    def nbytes(members: int) -> int:
        return members * _PAGE

    def post(self, call: Call) -> None:
        """Publishes a call that torch is about to make."""
        number = call.number = self.number + 1
        at = _text_at(self._mine, number)
        text = pack_text(call.packed.text, call.site)[:_TEXT_BYTES]
        self.memory[at : at + len(text)] = text
        self.words[_print_at(self._mine, number)] = _word(number, call.packed)
        if not ORDERED:
            fence()
        with self._lock:
            self._own[number] = call
            self._own.pop(number - _PRINTS, None)
        # The number last: a reader that sees it finds the fingerprint and the text.
        self.number = self.words[self._mine >> 3] = number

    def refuse(self, call: Call) -> None:
        """Publishes that torch has refused a call on this rank. It counts: others refuse it too."""
        self.words[(self._mine >> 3) + 1] = call.number

    def mismatch(self) -> str:
        """The text of the first call in which another member differs; "" if there is none."""
        if not self._different:
            own, words = self.number, self.words
            for rank, page in self._others:
                both = min(own, words[page >> 3])
                if self._compared[rank] < both:
                    self._compare(rank, page, both)
            if not self._different:
                return ""
        return mismatch_text(self._brought(self._different))

    def _compare(self, rank: int, page: int, last: int) -> None:
        if not ORDERED:
            fence()
        with self._lock:
            for number in range(self._compared[rank] + 1, last + 1):
                call = self._own.get(number)
                word = self.words[_print_at(page, number)]
                known = call is not None and word >> _PRINT_BITS == number & 0xFFFF
                if known and call is not None and word != _word(number, call.packed):
                    self._different = self._different or number
                    return
                self._compared[rank] = number
            # Calls that all members have compared are forgotten, but the last one: it has the line.
            done = min(self._compared.values())
            while self._own and (first := next(iter(self._own))) <= done and first != self.number:
                del self._own[first]

    def begun_by_all(self) -> bool:
        """Whether all members have begun this rank's last call, or differ in an earlier one."""
        number = self._different or self.number
        return all(self.words[page >> 3] >= number for _, page in self._others)

    def begun(self) -> tuple[int, ...]:
        """The other members on this host that have begun this rank's last call."""
        return tuple(rank for rank, page in self._others if self.words[page >> 3] >= self.number)

    def missing(self, call: Call) -> tuple[int, ...]:
        """The members that have not begun a call, or where torch has refused it."""
        number, words = call.number, self.words
        return tuple(
            rank
            for rank, page in self._others
            if words[page >> 3] < number or words[(page >> 3) + 1] == number
        )

    def unfinished(self, number: int) -> tuple[int, ...]:
        return ()

    def sites(self, call: Call) -> dict[int, Site]:
        return {rank: site for rank, (_, site) in self._brought(call.number, call).items()}

    def _brought(self, number: int, call: Call | None = None) -> dict[int, tuple[Spec, Site]]:
        found: dict[int, tuple[Spec, Site]] = {}
        call = call or self._own.get(number)
        if call is not None:
            found[self.members.rank] = call.spec, call.site
        for rank, page in self._others:
            if number <= self.words[page >> 3] < number + _TEXTS:
                at = _text_at(page, number)
                found[rank] = unpacked(self.memory[at : at + _TEXT_BYTES])
        return dict(sorted(found.items()))


def _print_at(page: int, number: int) -> int:
    return (page + _PRINTS_AT >> 3) + number % _PRINTS


def _text_at(page: int, number: int) -> int:
    return page + _TEXTS_AT + number % _TEXTS * _TEXT_BYTES


def _word(number: int, packed: Packed) -> int:
    # In one word, so that a reader never sees the fingerprint of another call.
    low = packed.fingerprint & ((1 << _PRINT_BITS) - 1)
    return (number & 0xFFFF) << _PRINT_BITS | low


class PostedCall(TorchCall):
    """A collective of a group of torch's own, as one rank has begun it."""

    #: Whether the main thread waits for it.
    awaited = False
    on_gpu = False

    def __init__(self, log: CallLog, packed: Packed) -> None:
        # It is never waited for by the agreement, only compared.
        super().__init__(cast(Agreement, log), packed, 0)
        self.log = log

    def patience(self) -> float:
        # The rank may compute while the call is under way: then it blocks no other rank.
        return 0.0 if self.awaited else math.inf


class PostedTransfer(PointCall):
    """A send or a receive in such a group."""

    #: The thread that watches it makes no calls itself, see `Watch`.
    ordered = True
    awaited = on_gpu = False
    posted = True  # for its patience: its data may be on their way

    def __init__(self, log: CallLog, spec: Spec, peers: tuple[int, ...], nbytes: int) -> None:
        super().__init__(cast(Agreement, log), spec, None, peers)
        self.log, self.nbytes = log, nbytes

    def patience(self) -> float:
        known = worlds.current().left_behind | {threading.main_thread()}
        # Without threads of C++ that Python has met once, as autograd's: they send nothing by
        # themselves, and stay in this list.
        own = (t for t in threading.enumerate() if not isinstance(t, threading._DummyThread))
        several = not known.issuperset(own)
        if not self.awaited or several or len(self.peers) > 1:
            return math.inf  # another rank, or another thread there, may go on
        return super().patience()


class RankCalls:
    """This rank's calls in groups of torch's own: those under way, and why they cannot end."""

    def __init__(self) -> None:
        self.awaited: PostedCall | PostedTransfer | None = None
        """The call that the main thread waits for."""
        self.reason: CollectiveMismatch | RankLeft | None = None
        """Why the waits of this cell were ended."""
        self.failed: Call | None = None
        """The last call whose wait has raised."""
        self._polled = -math.inf
        # Few, as they hold tensors.
        self._pending: deque[tuple[PostedCall, Any]] = deque(maxlen=64)
        self.instead_of: Callable[[BaseException], BaseException] = lambda error: error
        """Returns the error of the cell for one that torch has raised."""

    def begin(self) -> None:
        """A cell begins."""
        self.awaited = self.reason = self.failed = None

    def forget(self) -> None:
        """torch's groups are gone."""
        self._pending.clear()

    def post(self, log: CallLog, call: PostedCall) -> None:
        """Publishes a call, and compares it.

        Raises:
            CollectiveMismatch: another member has begun another call.
        """
        if self.reason is not None:
            raise self.reason
        log.post(call)
        if log.mismatch():
            raise self.end(log)

    def check(self, call: PostedCall | PostedTransfer) -> None:
        """Compares, once the wait for a call has ended."""
        if self.reason is not None:
            raise self.reason
        if call.log.mismatch():
            raise self.end(call.log)

    def end(self, log: CallLog) -> CollectiveMismatch:
        """Ends the groups on all ranks, and returns the reason: a mismatch."""
        pause = Pause()
        while not log.begun_by_all() and pause() < _ARRIVING_SECONDS:
            pass
        reason = self.reason = CollectiveMismatch(with_advice(text := log.mismatch()))
        # First: whose wait ends with its connection looks for it.
        worlds.current().spoil(text, deadlock=True)
        torch_state.close(worlds.current().scope.number)
        return reason

    def keep(self, call: PostedCall, work: Any) -> None:
        """Holds a call that may end later.

        Args:
            work: its handle; None for a call on a GPU. Nothing asks CUDA for the end of that call,
                because a question would spoil a graph that is being captured. It can end once all
                members have begun it.
        """
        self.unfinished()
        self._pending.append((call, work))

    def unfinished(self) -> list[PostedCall]:
        """The calls under way that nothing in Python waits for."""
        pending = self._pending
        with suppress(IndexError):  # another thread does this too
            while pending and _has_ended(*pending[0]):
                pending.popleft()
        return [call for call, work in list(pending) if not _has_ended(call, work)]

    def note_poll(self) -> None:
        """Python code asks again and again whether a call has ended."""
        if self.reason is not None:
            raise self.reason
        self._polled = monotonic()

    def is_polled(self) -> bool:
        return monotonic() - self._polled < 1.0


def _has_ended(call: PostedCall, work: Any) -> bool:
    if work is None:
        return not call.missing() and not call.log.mismatch()
    try:
        return bool(work.is_completed())
    except RuntimeError:
        return True


def with_advice(text: str) -> str:
    if ADVICE in text:
        return text
    first, line, rest = text.partition("\n")
    return f"{first} {ADVICE}{line}{rest}"


rank_calls = RankCalls()
