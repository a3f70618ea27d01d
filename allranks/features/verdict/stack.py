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
def look() -> tuple[Path, Doing]:
    """Returns the lines of the cell and of the user's functions that it has called.

    There are none within a collective, and where the main thread runs no cell. Where another thread
    calls the user's code to read data, as those of TensorFlow do, its lines follow.
    """
    if world.current().within is not None:
        return (), Doing.COLLECTIVE
    frames = frames_of_threads()
    main = frames.pop(threading.main_thread().ident or 0, None)
    path, doing = _walked(main)
    frames.pop(threading.get_ident(), None)
    if doing in (Doing.COMPUTE, Doing.CALL):
        for frame in frames.values():
            theirs, what = _walked(frame)
            if theirs and what is Doing.INPUT:
                return path + theirs, Doing.FEED
    return path, doing


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
