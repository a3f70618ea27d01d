"""One class for each library that ``log(…)`` can write to. They run in the notebook's kernel."""

from __future__ import annotations

import importlib.util
import netrc
import os
import re
import socket
import struct
import time
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol
from urllib.parse import urlsplit

from allranks.records.telemetry import Points


class Value(NamedTuple):
    """One value; ``at`` is in seconds since 1970."""

    rank: int
    name: str
    step: int
    value: float
    at: float


def values(points: Points, pairs: bytes) -> list[Value]:
    """Returns the values that a rank has logged."""
    numbers, found, start, at = array("d", pairs), [], 0, time.time()
    for name, member, count in points.series:
        shown = f"{name}/{member}" if member else name
        part = numbers[start : start + 2 * count]
        start += 2 * count
        for step, value in zip(part[::2], part[1::2], strict=True):
            found.append(Value(points.rank, shown, int(step), value, at))
    return found


class Writer(Protocol):
    """One run of a tool. Made, used and closed in one thread.

    ``items`` is what it writes, in messages; ``module`` is imported from ``package``.
    """

    title: ClassVar[str]
    items: ClassVar[str]
    package: ClassVar[str]
    module: ClassVar[str]

    def __init__(self, name: str) -> None: ...

    @staticmethod
    def about(name: str) -> str:
        """Returns where the run ``name`` is, or a command that shows it."""

    def write(self, items: Iterable[Any]) -> None:
        """Writes items; they may be lost if the process is killed before ``close``."""

    def close(self) -> None: ...


_VALUES = "values of log(…)"


class TensorBoard:
    """A folder of event files, one for each rank: TensorBoard shows ranks as runs of one name."""

    title: ClassVar[str] = "TensorBoard"
    items: ClassVar[str] = _VALUES
    package: ClassVar[str] = "tensorboard"
    module: ClassVar[str] = "tensorboard"

    def __init__(self, name: str) -> None:
        self._folder = Path("runs", name).absolute()
        self._files: dict[int, Any] = {}

    @staticmethod
    def about(name: str) -> str:
        return f"tensorboard --logdir {Path('runs', name).absolute()}"

    def write(self, items: Iterable[Value]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for one in items:
            scalar = Summary(value=[Summary.Value(tag=one.name, simple_value=one.value)])
            self._put(one.rank, Event(wall_time=one.at, step=one.step, summary=scalar))
        for file in self._files.values():
            file.flush()

    def _put(self, rank: int, event: Any) -> None:
        # TensorBoard's own writer imports TensorFlow where that is installed: seconds, and memory.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

        if rank not in self._files:
            folder = self._folder / f"rank-{rank}"
            folder.mkdir(parents=True, exist_ok=True)
            host = socket.gethostname()
            path = folder / f"events.out.tfevents.{time.time():.0f}.{host}.{rank}"
            self._files[rank] = path.open("ab")
            self._put(rank, Event(wall_time=time.time(), file_version="brain.Event:2"))
        content = event.SerializeToString()
        length = struct.pack("<Q", len(content))
        for part in (length, content):
            self._files[rank].write(part + struct.pack("<I", masked_crc32c(part)))

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class MLflow:
    """A run at the tracking server that MLflow's variables name, or in its local store."""

    title: ClassVar[str] = "MLflow"
    items: ClassVar[str] = _VALUES
    package: ClassVar[str] = "mlflow"
    module: ClassVar[str] = "mlflow"
    #: The largest batch that MLflow accepts.
    _most = 1000

    def __init__(self, name: str) -> None:
        import mlflow
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = mlflow.MlflowClient()
        experiment = mlflow.set_experiment(_experiment())
        self._run = self._client.create_run(experiment.experiment_id, run_name=name).info.run_id

    @staticmethod
    def about(name: str) -> str:
        return f"the run {name} of the experiment {_experiment()}"

    def write(self, items: Iterable[Value]) -> None:
        metrics = [
            self._metric(
                # Other characters are refused.
                re.sub(r"[^\w\-. /]", "_", f"{one.name}/rank-{one.rank}"),
                one.value,
                int(1000 * one.at),
                one.step,
            )
            for one in items
        ]
        for first in range(0, len(metrics), self._most):
            self._client.log_batch(self._run, metrics[first : first + self._most])

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _experiment() -> str:
    return os.environ.get("MLFLOW_EXPERIMENT_NAME", "allranks")


class WandB:
    """A run of Weights & Biases; its variables choose project, mode and folder."""

    title: ClassVar[str] = "Weights & Biases"
    items: ClassVar[str] = _VALUES
    package: ClassVar[str] = "wandb"
    module: ClassVar[str] = "wandb"

    def __init__(self, name: str) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "allranks"),
            name=name,
            mode="offline" if _is_offline() else None,
            settings=wandb.Settings(console="off", silent=True),
            reinit="create_new",
        )
        # Ranks and cells log the same steps: its own count would refuse all but the first.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    @staticmethod
    def about(name: str) -> str:
        if not _is_offline():
            return f"the run {name}"
        return f"the run {name}, offline. To upload it, type in a shell: wandb sync --sync-all"

    def write(self, items: Iterable[Value]) -> None:
        for one in items:
            self._run.log({f"{one.name}/rank-{one.rank}": one.value, "step": one.step})

    def close(self) -> None:
        self._run.finish()


def _is_offline() -> bool:
    # Without a key wandb would ask for one, and no prompt is possible here.
    if mode := os.environ.get("WANDB_MODE"):
        return mode == "offline"
    if os.environ.get("WANDB_API_KEY"):
        return False
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is None
    except (OSError, netrc.NetrcParseError):
        return True


WRITERS: dict[str, type[Writer]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
"""The libraries, as they are typed."""


def missing(kind: type[Writer]) -> str:
    """Returns the package that has to be installed for a tool; "" if it is."""
    try:
        found = importlib.util.find_spec(kind.module) is not None
    except ModuleNotFoundError:  # a package above it
        found = False
    return "" if found else kind.package
