"""What a rank has recorded of a cell, as it crosses the wire. Standard library only."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import IntEnum
from itertools import chain, islice
from typing import Any, NamedTuple

from allranks.records.frozen import frozen


class Kind(NamedTuple):
    """What some calls have in common; ``source`` is the line, if the name is a line's."""

    op: str
    name: str
    nbytes: int
    ranks: int
    source: str
    dtype: str = ""

    def meets(self, size: int) -> bool:
        """Whether all ranks of the cell take part; a message has two ranks, which need not meet."""
        return self.ranks == size and not any(word in self.op.lower() for word in ("send", "recv"))

    @property
    def is_of_torch(self) -> bool:
        """Whether it has torch's name, as ``all_reduce``, which allranks spells in one word."""
        return self.op.startswith(("all_", "reduce_scatter"))

    @property
    def is_made_in_torch(self) -> bool:
        """Whether the line does not make the call itself: DistributedDataParallel does, at
        ``loss.backward()``, and so do trainers.
        """
        return self.is_of_torch and self.op not in self.source

    @property
    def place(self) -> str:
        return f"{self.op} at {self.name}" + (f" `{self.source}`" if self.source else "")


class EndedCall(NamedTuple):
    """A call: its kind, its end, how long the rank waited and transferred, and the last rank."""

    kind: int
    ended: float
    wait: float
    transfer: float
    last: int


class CodeLine(NamedTuple):
    """A line of the user: its place, as ``In[3]:9``, its function, and its source."""

    place: str
    function: str
    source: str

    def __str__(self) -> str:
        return f"{self.place} `{self.source}`" if self.source else self.place


class Sample(NamedTuple):
    """The counters of a rank's process at a time, all in seconds but the memory.

    ``run``: the time in which its threads ran. ``ready``: that in which they could run and had no
    core. ``main_ready`` is that of the main thread, which runs the cells. ``idle``: that in which
    no program ran on the cores that the process may use, a sum over these; NaN if it is not known.
    """

    at: float
    run: float
    ready: float
    main_ready: float
    rss_nbytes: float
    idle: float = 0.0


class Doing(IntEnum):
    """What a rank does when it is looked at.

    ``INPUT``: the main thread is in a library that reads data. ``FEED``: another thread is, and
    calls the user's code there. ``COMPILE``: a library traces or compiles. ``AWAIT``: a collective
    needs its input, which a library still computes, as those of jax may; its line is unknown.
    ``CALL``: the user's line has called a function that begins or ends a collective.
    """

    COMPUTE, CALL, COLLECTIVE, FEED, INPUT, COMPILE, AWAIT = range(7)


class Look(NamedTuple):
    """Where the main thread was at a time: the number of its lines, -1 in a collective.

    ``main_used`` are the seconds in which it has run or could have run, NaN if they are not known,
    ``used`` those in which all threads have run. ``late``: how long the look was due and had to
    wait for the interpreter or for a core. The main thread may have been elsewhere then.
    ``rss_nbytes`` is the memory of the process. ``readers_used``: the seconds for which threads ran
    that were found to read data, here or before. ``reading``: how many cores those use that read
    now, also beside a collective.
    """

    at: float
    path: int
    doing: Doing = Doing.COMPUTE
    main_used: float = 0.0
    used: float = 0.0
    late: float = 0.0
    rss_nbytes: float = 0.0
    readers_used: float = 0.0
    reading: float = 0.0


class BroughtNumbers(NamedTuple):
    """What a rank brought to a sum or an average, by a checksum of some of its numbers.

    ``call`` counts such calls of a group in the cell. ``varied``: they are not all the same number.
    """

    group: int
    call: int
    nbytes: int
    checksum: int
    varied: bool


class LastNotFinite(NamedTuple):
    """The last calls of a kind, to all of which a rank brought NaN or infinity.

    ``call`` is the number of the first of them, as in `BroughtNumbers`; ``begun`` its time,
    ``calls`` how many they are.
    """

    group: int
    call: int
    begun: float
    calls: int
    op: str
    name: str
    nbytes: int


@frozen
class Model:
    """The arrays that an optimizer has updated in a cell, on one rank.

    ``checksums`` are those of some numbers of each array, by how many steps the optimizer had made;
    ``before`` are those at the beginning of the next step, as after an average of the weights.
    ``numbers`` are these numbers after ``sampled`` steps: at the cell's end, or before the model
    was gone. ``settings`` are those of the optimizer before its first step, as its learning rate.
    """

    names: Sequence[str]
    nbytes: Sequence[int]
    steps: int
    sampled: int
    checksums: Mapping[int, Sequence[int]]
    numbers: Sequence[Sequence[float]]
    before: Mapping[int, Sequence[int]] = field(default_factory=dict)
    settings: str = ""

    @property
    def arrays(self) -> list[tuple[str, int]]:
        return list(zip(self.names, self.nbytes, strict=True))


@frozen
class RankPart:
    """One rank's part of a cell. Times are by one clock for each host.

    ``number`` is that which the notebook shows, -1 if the rank has not run the cell. ``cores`` is
    how many its process may use, also a part of one, and ``gpu`` whether it has a GPU. ``grown``
    has the first and the last length of global lists, dictionaries and sets that have grown.
    ``left_out`` counts earlier calls of the cell. ``paths`` are the lines at which the ``looks``
    have found the rank, the outermost line of each first. ``gradients``: the cell computes some
    that no optimizer uses which is followed. ``updated``: the variables that it updates with them,
    without a count of the steps.
    """

    rank: int
    number: int
    host: str
    cores: float
    kinds: Sequence[Kind]
    calls: Sequence[EndedCall]
    samples: Sequence[Sample]
    grown: dict[str, tuple[int, int]] = field(default_factory=dict)
    left_out: int = 0
    looks: Sequence[Look] = ()
    paths: Sequence[tuple[CodeLine, ...]] = ()
    gpu: bool = False
    brought: Sequence[BroughtNumbers] = ()
    not_finite: Sequence[LastNotFinite] = ()
    models: Sequence[Model] = ()
    updated: Sequence[Model] = ()
    gradients: bool = False

    def message(self) -> tuple[dict[str, Any], list[bytes]]:
        """Returns the content and the payloads of an answer."""
        models = [*self.models, *self.updated]
        content = {
            "number": self.number,
            "host": self.host,
            "cores": self.cores,
            "kinds": [list(kind) for kind in self.kinds],
            "grown": {name: list(lengths) for name, lengths in self.grown.items()},
            "left_out": self.left_out,
            "gpu": self.gpu,
            "gradients": self.gradients,
            "paths": [[list(line) for line in path] for path in self.paths],
            "not_finite": [list(one) for one in self.not_finite],
            "models": [
                [
                    list(one.names),
                    list(one.nbytes),
                    one.steps,
                    one.sampled,
                    *(
                        [[step, list(sums)] for step, sums in row.items()]
                        for row in (one.checksums, one.before)
                    ),
                    [len(numbers) for numbers in one.numbers],
                    one.settings,
                ]
                for one in models
            ],
            "updated": len(self.updated),
        }
        numbers = [row for one in models for row in one.numbers]
        rows = self.calls, self.samples, self.looks, self.brought, numbers
        return content, [array("d", chain(*row)).tobytes() for row in rows]

    @classmethod
    def read(cls, rank: int, content: dict[str, Any], payloads: Sequence[bytes]) -> RankPart:
        *tables, numbers = payloads
        lengths = (len(kind._fields) for kind in (EndedCall, Sample, Look, BroughtNumbers))
        calls, samples, looks, brought = (
            zip(*[iter(array("d", payload))] * length, strict=True)
            for length, payload in zip(lengths, tables, strict=True)
        )
        rest = iter(array("d", numbers))
        models = [
            Model(
                names=names,
                nbytes=nbytes,
                steps=steps,
                sampled=sampled,
                checksums=dict(sums),
                numbers=[[*islice(rest, n)] for n in lengths],
                before=dict(before),
                settings=settings,
            )
            for names, nbytes, steps, sampled, sums, before, lengths, settings in content["models"]
        ]
        followed = len(models) - content["updated"]
        return cls(
            rank=rank,
            number=content["number"],
            host=content["host"],
            cores=content["cores"],
            kinds=[Kind(*kind) for kind in content["kinds"]],
            calls=[
                EndedCall(int(kind), ended, wait, transfer, int(last))
                for kind, ended, wait, transfer, last in calls
            ],
            samples=[Sample(*row) for row in samples],
            grown={name: (first, last) for name, (first, last) in content["grown"].items()},
            left_out=content["left_out"],
            gpu=content["gpu"],
            gradients=content["gradients"],
            looks=[
                Look(at, int(path), Doing(int(doing)), *rest) for at, path, doing, *rest in looks
            ],
            paths=[tuple(CodeLine(*line) for line in path) for path in content["paths"]],
            brought=[
                BroughtNumbers(int(group), int(call), int(nbytes), int(checksum), bool(varied))
                for group, call, nbytes, checksum, varied in brought
            ],
            not_finite=[LastNotFinite(*one) for one in content["not_finite"]],
            models=models[:followed],
            updated=models[followed:],
        )


class NotANumber(NamedTuple):
    """A logged value that is NaN on a rank from a step on, until the cell's end.

    ``always``: it never was a number, as one that is not measured in this cell. ``passing``: in how
    many steps it was NaN, if it was a number in the others, also later.
    """

    name: str
    rank: int
    step: float
    member: str = ""
    always: bool = False
    passing: int = 0


@frozen
class CellParts:
    """All that was recorded of a cell.

    ``logged`` is how many steps the ranks have logged, and ``well`` whether all of them have ended
    the cell well. ``left`` are the ranks that had left the
    cell when another one waited in its line ``waits_at``.
    """

    number: int
    ranks: Sequence[RankPart]
    logged: int = 0
    not_numbers: Sequence[NotANumber] = ()
    left: tuple[int, ...] = ()
    waits_at: int | None = None
    well: bool = True
