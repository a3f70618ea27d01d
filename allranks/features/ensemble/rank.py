"""Runs the members of an ensemble on a rank: the same cell, each with values of its own."""

from __future__ import annotations

import gc
import pickle
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np

from allranks import collectives
from allranks.collectives import world
from allranks.collectives.host.memory import Segment
from allranks.collectives.ops.keeping import VariableStore
from allranks.collectives.start import under_mpi
from allranks.collectives.world.world import World
from allranks.engine import namespace
from allranks.engine.exceptions import text_of
from allranks.engine.features import Answered, RankContext, RankFeature, Replies
from allranks.records import requests, wire
from allranks.records.wire import Record, Result, RunCell, RunMember

#: A result is sent with the reply up to this size; a larger one waits in shared memory.
_SENT_NBYTES = 64 * 1024
#: A member that took longer than this has its garbage collected before the next one starts.
_LONG_SECONDS = 1.0
_TEXT = 200
_OF_MEMBERS = "member-"


class RankEnsemble(RankFeature):
    """Runs members one after the other; each leaves the rank's variables as they were."""

    dormant = True  # until members have several ranks
    records = (RunMember,)
    requests = frozenset({requests.MEMBERS})
    notebook_magics = ("ensemble",)

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}
        self._left: Segment | None = None
        self._kept: VariableStore | None = None

    def started(self, rank: RankContext) -> None:
        self._context, self._rank = rank, rank.rank
        self._names = rank.shell.user_ns

    def message_received(self, record: Record, payloads: list[bytes]) -> None:
        if isinstance(record, RunMember):
            cell = RunCell(
                cell=record.cell,
                source=record.source,
                number=record.number,
                ranks=(),
                label=record.label,
                want_value=False,
                limit_nbytes=record.limit_nbytes,
            )
            self._context.submit(cell, lambda: self._run(record, cell, payloads))

    def answer(self, name: str, arguments: dict[str, Any], payloads: list[bytes]) -> Answered:
        return self._make_ready(arguments["ranks_each"]), []

    def rank_replaced(self, dead: list[int]) -> str:
        # A replaced rank was in each world of several ranks.
        self._worlds = {each: part for each, part in self._worlds.items() if each == 1}
        return ""

    def _make_ready(self, ranks_each: int) -> dict[str, Any]:
        """Prepares for members of ``ranks_each`` ranks; with 0, drops all variables that they kept.

        Returns the epoch of the world of a member's ranks, and whether it needs another one, as
        after messages of an earlier ensemble.
        Collective over all ranks where ``ranks_each`` is more than 1.
        """
        self._forget()
        if not ranks_each:
            whole: VariableStore | None = world.current().variable_store
            if whole is not None:  # of members, too, whose rank has died after their end
                whole.drop_others(_OF_MEMBERS)
            return {}
        if ranks_each not in self._worlds:
            if ranks_each > 1:  # before: an interrupt must leave no world that is never made again
                self._context.activate(self)
            self._worlds[ranks_each] = under_mpi.divide(ranks_each)
        part = self._worlds[ranks_each]
        return {"epoch": part.epoch, "dirty": part.unfinished or bool(part.traffic)}

    async def _run(self, member: RunMember, cell: RunCell, payloads: list[bytes]) -> Replies:
        # Never raises. The member's ranks have epochs of their own.
        self._forget()
        names = self._names

        def prepare() -> None:
            # Interrupts are not accepted yet: one that ends a renewal here would strand the others.
            if member.epoch > collectives.epoch():
                self._context.begin_epoch(lambda: collectives.renew(member.epoch))
            names.update(namespace.place())
            names.update(pickle.loads(payloads[0]), member=member.member)
            names.pop("result", None)
            names.update(self._found())

        part = self._worlds[member.ranks_each]
        self._kept = part.variable_store = self._keeps(member, part)
        with under_mpi.inside(part), _restored(names):
            first = collectives.rank() == 0
            ((reply, _),) = await self._context.execute(cell, [], prepare)
            value = names.get("result") if reply.status == "ok" and first else None
            result, parts = self._leave(member, value)
        del value
        if reply.seconds > _LONG_SECONDS:
            gc.collect()
        return (result, parts), (reply, [])

    def _keeps(self, member: RunMember, part: World) -> VariableStore | None:
        # Each member has variables of its own, also on the same rank.
        whole: VariableStore | None = world.current().variable_store
        if whole is None or not world.current().shared_by_all:
            return None  # on several hosts the next cluster would not find them
        name = f"{_OF_MEMBERS}{member.ensemble}-{member.member}-"
        return VariableStore(whole.folders, part.rank, part.size, whole.namespace, name)

    def _found(self) -> Mapping[str, Any]:
        found = self._kept.of_cells.load() if self._kept is not None else None
        if found is None:
            return {}
        when = found[0]
        values: dict[str, Any] = found[1]
        self._context.notice(
            f"continues from what it kept {time.time() - when:.0f} s ago: "
            f"{', '.join(sorted(values))}"
        )
        return values

    def _leave(self, member: RunMember, value: Any) -> tuple[Result, list[bytes]]:
        result = Result(self._rank, member.cell, {}, "", 0, "", "")
        if value is None:
            return result, []
        try:
            result = replace(result, numbers=numbers_of(value), text=summary_of(value))
        except BaseException:  # an attribute of an object may raise anything
            result = replace(result, text=type(value).__name__)
        buffers: list[pickle.PickleBuffer] = []
        try:
            head = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        except BaseException as error:  # an object's own way to be pickled may do anything
            return replace(result, problem=f"{type(error).__name__}: {text_of(error)}"), []
        parts = [head, *(buffer.raw() for buffer in buffers)]
        *_, nbytes = wire.lay_out(parts)
        result = replace(result, nbytes=nbytes)
        if member.shared and nbytes > _SENT_NBYTES:
            # No such memory here, or not enough: the result is sent.
            with suppress(OSError, AttributeError):
                # A large result does not pass through the socket: the notebook maps this memory.
                self._left = Segment(nbytes)
                with memoryview(self._left.memory) as target:
                    wire.fill(target, parts)
                return replace(result, address=self._left.address), []
        packed = bytearray(nbytes)
        wire.fill(packed, parts)
        return result, [bytes(packed)]

    def _forget(self) -> None:
        # The last member does not run again, and the notebook has its result or will not take it.
        if self._kept is not None:
            self._kept.drop()
            self._kept = None
        if self._left is not None:
            self._left.memory.close()
            self._left.close()
            self._left = None


@contextmanager
def _restored(names: dict[str, Any]) -> Iterator[None]:
    """Within, names may be set and deleted; afterwards they have their former values."""
    # It stays the same dictionary: functions of earlier cells look their names up in it.
    before = dict(names)
    try:
        yield
    finally:
        names.update(before)
        for name in names.keys() - before.keys():
            del names[name]


def numbers_of(value: Any) -> dict[str, float]:
    """Returns the numbers among the entries of a dictionary, or a number alone as ``result``."""
    entries = value if isinstance(value, Mapping) else {"result": value}
    found = {}
    for name, entry in entries.items():
        number = _number(entry)
        if number is not None:
            found[str(name)] = number
    return found


def _number(entry: Any) -> float | None:
    if isinstance(entry, bool | int | float):
        return entry if _fits(entry) else None
    if isinstance(entry, str | bytes) or getattr(entry, "shape", None) not in ((), (1,)):
        return None
    try:
        scalar = np.asarray(entry).item()
    except Exception:  # another library's scalar may refuse in its own way
        return None
    return scalar if isinstance(scalar, bool | int | float) and _fits(scalar) else None


def _fits(number: Any) -> bool:
    # Whole numbers of Python have no bound.
    return isinstance(number, float) or abs(number) <= sys.float_info.max


def summary_of(value: Any) -> str:
    if isinstance(value, Mapping):
        parts = [f"{name} {_brief(entry)}" for name, entry in value.items()]
        return _cut(", ".join(parts))
    return "" if value is None else _cut(_brief(value))


def _brief(entry: Any) -> str:
    shape, dtype = getattr(entry, "shape", None), getattr(entry, "dtype", None)
    if shape is not None and dtype is not None and tuple(shape):
        return f"array {tuple(shape)} {getattr(dtype, 'name', dtype)}"
    number = _number(entry)
    if number is not None:
        return f"{number:.6g}"
    if isinstance(entry, list | tuple):
        return f"{type(entry).__name__} of {len(entry)}"
    return _cut(entry if isinstance(entry, str) else type(entry).__name__)


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"


FEATURE = RankEnsemble
