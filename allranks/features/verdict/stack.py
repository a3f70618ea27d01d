"""The user's lines at which the main thread is, and what it does there."""

from __future__ import annotations

import os
import threading
from functools import cache
from types import FrameType

from allranks.collectives import world
from allranks.collectives.calls import sites
from allranks.collectives.calls.frames import frames_of_threads, no_collection
from allranks.engine.cell import CellRunner
from allranks.features.verdict.records import Doing

_CALL = CellRunner._call.__code__
_DEEPEST = 300
#: `queue.Queue.get` waits in functions of `threading`.
_DEEPEST_WAIT = 5
_QUEUES = ("/queue.py", "/multiprocessing/queues.py")
_COLLECTIVES = f"{os.sep}collectives{os.sep}"
_INPUTS_OF_COLLECTIVES = f"{_COLLECTIVES}arrays{os.sep}"
#: Beside them, and a part of the transfer.
_ARITHMETIC = f"{_INPUTS_OF_COLLECTIVES}reductions"
#: The files of torch's functions that call a process group.
_CALLERS = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/c10d_logger.py")
#: Parts of the files of libraries that read data, and of those that trace or compile.
_INPUT = ("/torch/utils/data/", "/tensorflow/python/data/", "/keras/src/trainers/data_adapters/")
_COMPILERS = (
    # Not all of torch._dynamo: the forward pass of DistributedDataParallel has frames of it.
    "/torch/_dynamo/convert_frame.py",
    "/torch/_dynamo/symbolic_convert.py",
    "/torch/_inductor/",
    "/jax/_src/compiler.py",
    "/jax/_src/interpreters/mlir.py",
)
#: Functions of TensorFlow and of jax that trace.
_TRACERS = frozenset(
    {
        "trace_function",
        "func_graph_from_py_func",
        "_maybe_define_function",
        "trace_to_jaxpr_dynamic",
    }
)
#: In the names of files into which TensorFlow translates the user's functions.
_AUTOGRAPH = "__autograph_generated_file"

#: Lines of the user's code, the outermost first: of each its file, its number, and the name of its
#: function, which is empty for a cell's own lines.
Path = tuple[tuple[str, int, str], ...]


@no_collection()
def look(beside_collectives: bool) -> tuple[Path, Doing, list[int]]:
    """Returns the lines of the cell and of the user's functions that it has called.

    There are none within a collective, and where the main thread runs no cell. Where other threads
    call the user's code to read data, as those of TensorFlow do, the lines of one of them follow,
    and the threads are returned, within a collective only ``beside_collectives``.
    """
    within = world.current().makes_call
    if within and not beside_collectives:
        return (), Doing.COLLECTIVE, []
    frames = frames_of_threads()
    main = frames.pop(threading.main_thread().ident or 0, None)
    frames.pop(threading.get_ident(), None)
    found = {thread: _walked(frame) for thread, frame in frames.items()}
    reading = {
        thread: path for thread, (path, what) in found.items() if path and what is Doing.INPUT
    }
    if within:
        return (), Doing.COLLECTIVE, [*reading]
    path, doing = _walked(main)
    if path and _waits_in_a_queue(main):
        # What fills it may read or compute: only a wait without work is one for data.
        doing = max(doing, Doing.FEED)
    if reading and doing in (Doing.COMPUTE, Doing.CALL, Doing.FEED, Doing.INPUT):
        return path + next(iter(reading.values())), max(doing, Doing.FEED), [*reading]
    return path, doing, [*reading]


def _waits_in_a_queue(frame: FrameType | None) -> bool:
    """Whether the user's line itself has called ``get`` of a queue, which another thread fills."""
    called = None
    for _ in range(_DEEPEST_WAIT):
        if frame is None:
            break
        code = frame.f_code
        if sites.kind_of(code.co_filename) == sites.USER:
            return called is not None and _is_get_of_a_queue(called.co_filename, called.co_name)
        called, frame = code, frame.f_back
    return False


@cache
def _is_get_of_a_queue(file: str, function: str) -> bool:
    is_queue = sites.kind_of(file) == sites.LIBRARY and file.replace(os.sep, "/").endswith(_QUEUES)
    return is_queue and function == "get"


def _walked(frame: FrameType | None) -> tuple[Path, Doing]:
    found: list[tuple[str, int, str]] = []
    doing = Doing.COMPUTE
    for _ in range(_DEEPEST):
        if frame is None or frame.f_code is _CALL:
            break
        code = frame.f_code
        kind, what = _known(code.co_filename, code.co_name)
        if what in (Doing.COLLECTIVE, Doing.AWAIT):
            return (), what
        if kind == sites.USER:
            name = "" if code.co_name == "<module>" else code.co_name
            found.append((code.co_filename, frame.f_lineno or 0, name))
        elif what > doing and not (what is Doing.CALL and found):
            doing = what
        frame = frame.f_back
    return tuple(reversed(found)), doing


@cache
def _known(file: str, function: str) -> tuple[int, Doing]:
    kind, place = sites.kind_of(file), file.replace(os.sep, "/")
    if _AUTOGRAPH in file:
        return sites.LIBRARY, Doing.COMPUTE
    if kind == sites.OURS:
        if _INPUTS_OF_COLLECTIVES in file and _ARITHMETIC not in file:
            return kind, Doing.AWAIT
        return kind, Doing.COLLECTIVE if _COLLECTIVES in file else Doing.CALL
    if kind == sites.LIBRARY:
        if function in _TRACERS or any(part in place for part in _COMPILERS):
            return kind, Doing.COMPILE
        if any(part in place for part in _INPUT):
            return kind, Doing.INPUT
        if place.endswith(_CALLERS):
            return kind, Doing.CALL
    return kind, Doing.COMPUTE
