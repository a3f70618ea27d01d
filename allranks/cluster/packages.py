"""The doctor's checks of installed packages and GPUs: versions, and wrong combinations."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from allranks.cluster import devices
from allranks.cluster.findings import ABSENT, OK, WRONG, Finding

_TENSORFLOW = "pip install 'allranks[tensorflow]'"
_CUDA = {12: ("cupy-cuda12x", "nvidia-nccl-cu12"), 13: ("cupy-cuda13x", "nvidia-nccl-cu13")}


def check_python() -> Iterator[Finding]:
    """Reports this Python, and checks what allranks requires."""
    have = _installed()
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("Python", OK, f"{python}, {sys.executable}, allranks {have.get('allranks', '')}")
    yield from _requirements(have)


def check_libraries() -> Iterator[Finding]:
    """Checks TensorFlow, torch, JAX and Horovod."""
    have = _installed()
    reported = {one.about for one in _requirements(have)}
    yield from (one for one in _libraries(have) if one.about not in reported)


def check_gpus() -> Iterator[Finding]:
    """Checks GPUs, and the packages that move their data."""
    yield from _gpus(_installed(), driver())


def _libraries(have: Mapping[str, str]) -> Iterator[Finding]:
    yield from _tensorflow(have)
    yield _one(have, "torch", "pip install torch")
    if "jax" in have:
        yield Finding("jax", OK, have["jax"])
    if "horovod" in have:
        both = f"{have['horovod']} is installed, and is imported in place of allranks"
        yield Finding("horovod", WRONG, both, "pip uninstall horovod")


def _installed() -> dict[str, str]:
    """Returns the versions of all installed packages; of two, the first one on the path counts."""
    have: dict[str, str] = {}
    for one in metadata.distributions():
        name, version = one.metadata["Name"], one.version
        if name and version:
            have.setdefault(canonicalize_name(name), version)
    return have


def _requirements(have: Mapping[str, str]) -> Iterator[Finding]:
    """Checks what allranks requires, and what its extras require of packages that are installed."""
    reported: set[str] = set()
    for text in metadata.requires("allranks") or () if "allranks" in have else ():
        try:
            needed = Requirement(text)
            extra = needed.marker is not None and "extra" in str(needed.marker)
            applies = needed.marker is None or extra or needed.marker.evaluate()
            name = canonicalize_name(needed.name)
            version = have.get(name, "")
            fits = not version or needed.specifier.contains(Version(version), prereleases=True)
        except (InvalidRequirement, InvalidVersion):
            continue
        if not applies or name in reported or (fits and (version or extra)):
            continue
        reported.add(name)
        found = f"{version}, expected {needed.specifier}" if version else "not installed"
        yield Finding(name, WRONG, found, f"pip install '{name}{needed.specifier}'")


def _one(have: Mapping[str, str], name: str, remedy: str) -> Finding:
    if name in have:
        return Finding(name, OK, have[name])
    return Finding(name, ABSENT, "not installed", remedy)


def _tensorflow(have: Mapping[str, str]) -> Iterator[Finding]:
    name = next((name for name in ("tensorflow", "tensorflow-cpu") if name in have), "tensorflow")
    yield _one(have, name, _TENSORFLOW)
    if name not in have:
        return
    if "keras" not in have:
        yield Finding("keras", WRONG, "not installed", "pip install keras")
    else:
        yield Finding("keras", OK, have["keras"])
    old, version = have.get("tf-keras"), have[name]
    install = f"pip install 'tf-keras=={_series(version)}.*'"
    if os.environ.get("TF_USE_LEGACY_KERAS") == "1" and old is None:
        found = "not installed, and TF_USE_LEGACY_KERAS=1 asks for it"
        yield Finding("tf-keras", WRONG, found, install)
    elif old is not None and _series(old) != _series(version):
        found = f"{old}, expected that of TensorFlow {version}"
        yield Finding("tf-keras", WRONG, found, install)


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])


def driver() -> int | None:
    """Returns the newest CUDA that the driver supports, as 12; None without a driver."""
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

        pynvml.nvmlInit()
    except Exception:  # no package, or no driver
        return None
    try:
        return int(pynvml.nvmlSystemGetCudaDriverVersion()) // 1000
    except (pynvml.NVMLError, AttributeError):  # an older package has no such function
        return None
    finally:
        pynvml.nvmlShutdown()


def _gpus(have: Mapping[str, str], newest: int | None) -> Iterator[Finding]:
    gpus = devices.visible_gpus()
    if gpus:
        of_driver = f", of a driver for CUDA {newest}" if newest else ""
        yield Finding("GPUs", OK, f"{len(gpus)} for ranks{of_driver}")
    elif devices.overlooked():
        yield Finding(
            "GPUs", WRONG, "a driver, but no package that finds the GPUs", devices.INSTALL
        )
    else:
        yield Finding("GPUs", ABSENT, devices.why_none())
    wheels = {cuda: [name for name in names if name in have] for cuda, names in _CUDA.items()}
    both = [name for names in wheels.values() for name in names]
    if all(wheels.values()):
        found = f"{', '.join(both)}: for CUDA 12 and 13, which overwrite each other's files"
        keep = 12 if newest == 12 else 13
        remedy = f"pip uninstall {' '.join(both)}, and then: pip install 'allranks[cuda{keep}]'"
        yield Finding("NCCL", WRONG, found, remedy)
        return
    for cuda, (cupy, nccl) in _CUDA.items():
        if not wheels[cuda]:
            continue
        missing = [name for name in (cupy, nccl) if name not in have]
        found = ", ".join(f"{name} {have[name]}" for name in wheels[cuda])
        install = f"pip install 'allranks[cuda{cuda}]'"
        if newest is not None and newest < cuda:
            found += f", which the driver, for CUDA {newest}, does not support"
            remedy = f"pip uninstall {' '.join(both)}, and then: pip install 'allranks[cuda12]'"
            yield Finding("NCCL", WRONG, found, remedy)
        elif missing and gpus:
            yield Finding("NCCL", WRONG, f"{found}, without {' and '.join(missing)}", install)
        else:
            yield Finding("NCCL", OK, found)
    if not both:
        install = f"pip install 'allranks[cuda{min(newest or 12, 13)}]'"
        if gpus:
            found = "no cupy and no NCCL: arrays of GPUs go through the host"
            yield Finding("NCCL", WRONG, found, install)
        else:
            yield Finding("NCCL", ABSENT, "no cupy and no NCCL, which are for GPUs")
