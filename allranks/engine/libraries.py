"""Settings and changes of libraries in ranks, and the libraries that are imported before the fork.

A rank is shown its own GPU only, before anything can open CUDA. One way for every library:
`CUDA_VISIBLE_DEVICES` with the UUID of a GPU or of a slice. Each then finds one GPU, number 0.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from allranks import python_path
from allranks.engine import processes
from allranks.records.agent import Event, OpenedCuda, Preloading
from allranks.records.config import HostAgentConfig

HIDDEN = "-1"
#: A value of TF_CPP_MIN_LOG_LEVEL for ranks without a GPU: only fatal errors. TensorFlow reports at
#: length that it finds no CUDA.
QUIET = "3"
#: Of a shared GPU's memory. The rest is for CUDA's context and for the libraries' code, which the
#: limits do not count.
_SHARED_PERCENT = 90
_DRIVER_SECONDS = 20.0
_SUCCESS = 0
_DRIVER = "libcuda.so.1"
#: Otherwise each rank would load these for its first traceback and its first completion.
_IMPORTS = (
    "IPython.core.completer",
    "stack_data",
    "pygments.lexers.python",
    "pygments.formatters.terminal256",
    "pygments.formatters.html",
)
#: Libraries that run beside the cells, in the same process.
_BESIDE_CELLS = r"(ipykernel|jupyter_client|tornado|traitlets|zmq)(\.|$)"
_EVERY_WARNING = ("ignore", None, Warning, None, 0)


def preload(config: HostAgentConfig, tell: Callable[[Event], object]) -> None:
    """Imports modules once for all ranks: those that each rank needs, and those of ``--preload``.

    An import that fails here fails again, with its error, in the cell that needs the module.
    """
    for name in _IMPORTS:
        importlib.import_module(name)
    _prepare_tracebacks()
    if config.preload:
        _preload(config, tell)


def _preload(config: HostAgentConfig, tell: Callable[[Event], object]) -> None:
    set_quiet(config.devices)
    # The notebook finds modules beside it, too.
    value = config.environment.get(python_path.NAME, "")
    more = ["", *python_path.with_current_folder((), value)]
    more = [folder for folder in more if folder not in sys.path]
    sys.path[:0] = more
    for name in config.preload:
        tell(Preloading(name))
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()
        if set(config.devices) != {HIDDEN} and is_cuda_open():
            # Ranks are forked from this process, and CUDA would fail in them. That does not matter
            # where no rank is shown a GPU.
            tell(OpenedCuda(name))
            break
    tell(Preloading(""))
    sys.path[:] = [folder for folder in sys.path if folder not in more]


def seed_anew() -> None:
    """Seeds numpy's generator, of which each forked process has a copy.

    One that a preloaded module has seeded stays, as if the rank had imported that module itself.
    Python does the same for ``random``.
    """
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None and numpy.get_bit_generator().seed_seq is not None:  # None after a seed
        numpy.seed()


def _prepare_tracebacks() -> None:
    from IPython.core.ultratb import VerboseTB

    try:
        # Loads and compiles the code that each rank would need for its first traceback.
        raise ValueError
    except ValueError as error:
        with suppress(Exception):  # ranks handle it if IPython cannot
            VerboseTB().structured_traceback(ValueError, error, error.__traceback__)


def ignore_warnings() -> None:
    # With ``PYTHONWARNINGS=error``, a deprecation in a library would end every rank at its start.
    warnings.simplefilter("ignore")


def restore_warnings() -> None:
    warnings.filters.remove(_EVERY_WARNING)  # type: ignore[attr-defined]
    # This call also invalidates Python's cache of filters.
    warnings.filterwarnings("ignore", module=_BESIDE_CELLS)


def keep_temporary_files_in(folder: str) -> None:
    """Has multiprocessing write temporary files to the session's folder.

    It removes them at the exit of the process, but a rank is killed.
    """
    import multiprocessing

    multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]


@contextmanager
def mpi_files_in(folder: str) -> Iterator[None]:
    """While MPI starts, it makes its files in the session's folder, whatever happens.

    The launcher names that folder. If it has died by then, Open MPI makes one in `TMPDIR`, and a
    rank that is killed leaves it.
    """
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        del os.environ["TMPDIR"]
        if before is not None:
            os.environ["TMPDIR"] = before


def share_cores(ranks: int) -> None:
    """Limits numeric libraries to one rank's share of this host's cores."""
    # They read these variables as they are loaded: before a fork, if they are preloaded.
    share = str(max(1, processes.cores() // ranks))
    os.environ.setdefault("OMP_NUM_THREADS", share)
    # TensorFlow's own threads: without these every rank makes one a core, twice.
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", share)
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")


def set_quiet(devices: Sequence[str]) -> None:
    if not devices:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", QUIET)


def visible_gpus() -> tuple[str, ...]:
    """Returns the values of ``CUDA_VISIBLE_DEVICES`` for one GPU each; none without a driver.

    A scheduler that gives a job some of a host's GPUs sets that variable.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(filter(None, (part.strip() for part in given.split(","))))
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_DRIVER_SECONDS,
            check=True,
        )
    except FileNotFoundError:
        return ()
    except (OSError, subprocess.SubprocessError) as error:
        problem = f"expected nvidia-smi to name the GPUs, found {error}: ranks are pinned to none"
        print(problem, file=sys.stderr)
        return ()
    return tuple(asked.stdout.split())


#: "GPU-" or "MIG-", and the first eight digits, which CUDA_VISIBLE_DEVICES takes too.
_UUID_START = 12


def sharers(devices: Sequence[str], local: int, local_size: int) -> tuple[int, ...]:
    # Ranks take the devices in turn.
    return tuple(range(local % len(devices), local_size, len(devices))) if devices else (local,)


def pinning(devices: Sequence[str], local: int, local_size: int) -> tuple[str, dict[str, str]]:
    """Returns a rank's device, as ``cuda:0 NVIDIA H200`` or ``cpu``, and the variables that pin it.

    Ranks take the host's ``devices``, UUIDs, in turn; ``-1`` hides all of them.
    """
    if not devices:
        return "cpu", {}
    uuid = devices[local % len(devices)]
    if uuid == HIDDEN:
        return "cpu", {"CUDA_VISIBLE_DEVICES": HIDDEN}
    limits = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    together = len(sharers(devices, local, local_size))
    if together > 1:
        limits |= {
            "CUPY_GPU_MEMORY_LIMIT": f"{_SHARED_PERCENT // together}%",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{_SHARED_PERCENT / together / 100:.2f}",
        }
    return device_text(uuid, devices), {"CUDA_VISIBLE_DEVICES": uuid} | limits


def device_text(uuid: str, devices: Sequence[str] = ()) -> str:
    """Returns ``cuda:0`` with the GPU's name, and with its UUID where the host's ``devices`` are
    several, or the driver does not say the name.
    """
    name = _gpu_name(uuid)
    others = [other for other in set(devices) if other != uuid]
    if name and not others:
        return f"cuda:0 {name}"
    short = uuid[:_UUID_START]
    if any(other.startswith(short) for other in others):
        short = uuid
    return " ".join(filter(None, ("cuda:0", name, f"({short if name else uuid})")))


def _gpu_name(uuid: str) -> str:
    try:
        # It opens no CUDA. Without the package, or a driver, there is no name.
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

        pynvml.nvmlInit()
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except Exception:
        return ""
    return name.decode() if isinstance(name, bytes) else str(name)


def set_variables(environment: MutableMapping[str, str], settings: Mapping[str, str]) -> None:
    for name, value in settings.items():
        if name == "CUDA_VISIBLE_DEVICES":
            environment[name] = value
        else:
            # A limit that the user has set stays.
            environment.setdefault(name, value)


def is_cuda_open() -> bool:
    """Whether this process has initialised CUDA; a library that merely loaded it has not.

    A process that is forked from one that has initialised CUDA cannot use a GPU: all calls of CUDA
    fail there with cudaErrorInitializationError. Source: CUDA driver API, cuInit, which every other
    call needs.
    """
    try:
        # Only where it has been loaded already.
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        count = driver.cuDeviceGetCount
    except (OSError, AttributeError):
        return False
    # A stub of the driver, or one that finds no GPU, fails too: then there is no state to lose.
    return int(count(ctypes.byref(ctypes.c_int()))) == _SUCCESS
