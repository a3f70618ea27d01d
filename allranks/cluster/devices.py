"""Which GPUs this machine's ranks may use, found without touching CUDA.

NVML ignores ``CUDA_VISIBLE_DEVICES``, so the visible GPUs are computed here, by CUDA's
rules: entries are indices, UUIDs or unique beginnings of UUIDs, and the first one that names no GPU
ends the list.

Source: CUDA C++ Programming Guide, "CUDA Environment Variables"; NVIDIA Multi-Instance GPU User
Guide, "CUDA Device Enumeration".
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from allranks.errors import UsageError
from allranks.records.config import EVERY_GPU

#: The ``CUDA_VISIBLE_DEVICES`` that shows none.
HIDDEN = "-1"
INSTALL = "pip install nvidia-ml-py"


class Gpu(NamedTuple):
    """A GPU, or a slice of one (MIG), that ranks may be pinned to."""

    #: Its place among those that are visible here.
    number: int
    uuid: str


def visible_gpus() -> tuple[Gpu, ...]:
    """Returns the GPUs and slices in ``CUDA_VISIBLE_DEVICES``; none without a driver."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and chosen.strip() in ("", HIDDEN):
        return ()
    found = _physical()
    if chosen is None:
        # CUDA shows the slices of a GPU with MIG, else the GPU.
        uuids = [uuid for gpu, slices in found for uuid in (slices or [gpu])]
    else:
        uuids = _shown(chosen, found)
    return tuple(Gpu(number, uuid) for number, uuid in enumerate(uuids))


@contextmanager
def asking_driver() -> Iterator[Any]:
    """Within, NVIDIA's driver answers the module pynvml.

    Raises ImportError without that module, and the driver's error if it does not answer.
    """
    import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _physical() -> list[tuple[str, list[str]]]:
    """Every GPU's UUID with those of its slices, in the driver's order."""
    found: list[tuple[str, list[str]]] = []
    with ExitStack() as opened:
        try:
            pynvml = opened.enter_context(asking_driver())
        except Exception:  # no package, or no driver: no GPUs
            return found
        for index in range(pynvml.nvmlDeviceGetCount()):
            with suppress(pynvml.NVMLError):  # the driver has lost this GPU
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                found.append((_text(pynvml.nvmlDeviceGetUUID(handle)), _slices(pynvml, handle)))
    return found


def _slices(pynvml: Any, handle: Any) -> list[str]:
    """The UUIDs of a GPU's slices; none if it has none or cannot have any."""
    found: list[str] = []
    try:
        if not pynvml.nvmlDeviceGetMigMode(handle)[0]:
            return found
        most = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:
        return found
    for index in range(most):
        with suppress(pynvml.NVMLError):  # an empty place
            piece = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            found.append(_text(pynvml.nvmlDeviceGetUUID(piece)))
    return found


def _text(uuid: str | bytes) -> str:
    return uuid.decode() if isinstance(uuid, bytes) else uuid


def _shown(chosen: str, found: Sequence[tuple[str, list[str]]]) -> list[str]:
    shown: list[str] = []
    for entry in (part.strip() for part in chosen.split(",")):
        uuid = _named(entry, found)
        if uuid is None:
            break
        if uuid not in shown:
            shown.append(uuid)
    return shown


def _named(entry: str, found: Sequence[tuple[str, list[str]]]) -> str | None:
    """The one GPU or slice that an entry names; None if it names none, or several."""
    if entry.isdecimal():
        if int(entry) >= len(found):
            return None
        gpu, slices = found[int(entry)]
        return slices[0] if slices else gpu
    if entry.startswith("MIG-GPU-"):
        # The form of drivers before 470: the GPU's UUID, and two numbers.
        parent = entry.removeprefix("MIG-").partition("/")[0]
        return entry if any(gpu == parent and slices for gpu, slices in found) else None
    if not entry.upper().startswith(("GPU-", "MIG-")):
        return None
    every = [uuid for gpu, slices in found for uuid in (gpu, *slices)]
    matching = [uuid for uuid in every if uuid.lower().startswith(entry.lower())]
    if len(matching) != 1:
        return None
    cut = next((slices for gpu, slices in found if gpu == matching[0]), [])
    return cut[0] if cut else matching[0]


def choose(gpus: str | None) -> tuple[Gpu, ...]:
    """Returns the GPUs to pin ranks to, in order of local rank. Indices count the visible GPUs."""
    if gpus == "none":
        return ()
    visible = visible_gpus()
    if gpus is None or gpus == EVERY_GPU:
        return visible
    if not visible:
        raise UsageError(
            f"--gpus {gpus} needs a GPU, and none is visible here: {why_none()}. "
            "Type for example: --gpus none"
        )
    indices = gpus.replace(" ", "").split(",")
    if not all(index.isdecimal() and int(index) < len(visible) for index in indices):
        raise UsageError(
            f"expected --gpus with indices below {len(visible)}, the number of GPUs visible here, "
            f"found {gpus!r}. Type for example: --gpus none"
        )
    return tuple(visible[int(index)] for index in dict.fromkeys(indices))


def numbers(gpus: str | None) -> tuple[str, ...]:
    """Returns the numbers of GPUs on other hosts, as ``0,2``; none for ``all`` and None."""
    if gpus is None or gpus == EVERY_GPU:
        return ()
    found = tuple(dict.fromkeys(gpus.replace(" ", "").split(",")))
    if not all(number.isdecimal() for number in found):
        raise UsageError(
            f"expected --gpus with numbers of GPUs, such as 0,2, found {gpus!r}. "
            "Type for example: --gpus none"
        )
    return found


def why_none() -> str:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        with asking_driver() as pynvml:
            count = pynvml.nvmlDeviceGetCount()
    except ImportError:
        return f"the package pynvml, which finds them, is missing ({INSTALL})"
    except Exception as error:
        return (
            f"NVIDIA's driver does not answer ({type(error).__name__}: {error}); nvidia-smi shows "
            "whether it is installed and runs"
        )
    if count and chosen is not None:
        return f"CUDA_VISIBLE_DEVICES={chosen!r} shows none of this host's {count}"
    return "the driver finds none"


def overlooked() -> str:
    """A line for a host with a driver but without the package that finds its GPUs; else ""."""
    if not os.path.exists("/dev/nvidiactl"):
        return ""
    try:
        import pynvml  # noqa: F401
    except ImportError:
        return (
            "NVIDIA's driver is installed, but not the package that finds its GPUs, so ranks are "
            f"not pinned to them. {INSTALL}"
        )
    return ""


def check_exclusive(gpus: Sequence[Gpu], size: int) -> None:
    if size > len(gpus):
        more = f"type: -n {len(gpus)}, or leave" if gpus else "Leave"
        raise UsageError(
            f"{size} ranks need {size} GPUs, this host has {len(gpus)}. "
            f"{more[0].upper() + more[1:]} --exclusive out."
        )


def notices(gpus: Sequence[Gpu], size: int) -> list[str]:
    """Returns lines for the user: shared GPUs, and GPUs that were not found."""
    return [line for line in (shared(gpus, size), overlooked()) if line]


def shared(gpus: Sequence[Gpu], size: int) -> str:
    """Returns a line about the shared GPUs; "" if none is."""
    if not gpus or size <= len(gpus):
        return ""
    counts = {gpu: len(range(index, size, len(gpus))) for index, gpu in enumerate(gpus)}
    said = [f"{n} ranks share GPU {gpu.number}" for gpu, n in counts.items() if n > 1]
    way = "are staged through the host"
    if len(gpus) == 1:
        way = "move small arrays through the host, and large ones in memory on the GPU"
    return f"{', '.join(said)}; collectives {way}"
