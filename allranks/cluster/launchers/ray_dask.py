"""Ranks on hosts of a running Dask or Ray: ``--on dask:tcp://h1:8786``, ``--on ray``.

An actor of that system runs the relay on each host. `actors` has what runs outside the kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from allranks import python_path
from allranks.cluster.launchers import actors
from allranks.cluster.launchers.actors import ActorNode, Order
from allranks.cluster.launchers.addresses import address_towards
from allranks.cluster.launchers.batch import parse_batch
from allranks.cluster.launchers.job import RELAY, Host, Job, Tell, last_lines, other_version
from allranks.cluster.launchers.launcher import MultiHostLauncher
from allranks.errors import MissingDependency, StartFailed, UsageError
from allranks.records import limits
from allranks.records.config import Invitation


class ActorLauncher(MultiHostLauncher):
    """Starts ranks on the nodes of a system with actors.

    Without ``--nodes`` and ``--ntasks-per-node`` it uses all nodes, with a rank for each CPU.
    """

    takes_where = True
    takes_options = True
    system: ClassVar[str]
    #: The package that connects to the system. The extra has the launcher's name.
    package: ClassVar[str]
    #: What to type where the system is not found.
    remedy: ClassVar[str]
    #: Whether a node cannot have more ranks than the system counts CPUs there.
    counts_cpus: ClassVar[bool] = False

    def __init__(self, where: str = "", options: Sequence[str] = ()) -> None:
        super().__init__(where, options)
        self.check()
        self._ranks: list[int] = []
        self._gpus = 0
        self._connection: ActorConnection | None = None

    @classmethod
    def check(cls) -> None:
        if importlib.util.find_spec(cls.package) is None:
            raise MissingDependency(
                f"expected the package {cls.package} for --on {cls.name}, found none. "
                f'Type: pip install "allranks[{cls.name}]"'
            )
        super().check()

    @property
    def where_to(self) -> str:
        """Returns the address for the system's own client."""
        return self.where

    def _connect(self) -> ActorConnection:
        if self._connection is None:
            self._connection = ActorConnection(self.name, self.where_to, self._not_found)
        return self._connection

    def _not_found(self, what: str) -> StartFailed:
        where = f" at {self.where_to}" if self.where else ""
        return StartFailed(f"expected {self.system}{where}, found {what}. {self.remedy}")

    def size(self, n: int | None) -> int:
        nodes = self._connect().nodes
        asked = parse_batch([f"--nodes={len(nodes)}", *self.options], self.example)
        self._gpus = self.gpus(asked.more)
        needs = [f"{self._gpus} GPUs"] if self._gpus else []
        able = [node for node in nodes if node.gpus >= self._gpus]
        if n is None and asked.ntasks is None and asked.ntasks_per_node is None:
            self._ranks = [node.cpus for node in able[: asked.nodes]]
        else:
            asked.size(n)
            self._ranks = [asked.each] * asked.nodes
            if self.counts_cpus:
                able = [node for node in able if node.cpus >= asked.each]
                needs.append(f"{asked.each} CPUs")
        if len(able) < asked.nodes:
            wanted = f" with {' and '.join(needs)} each" if needs else ""
            found = ", ".join(f"{it.host} ({it.cpus} CPUs, {it.gpus} GPUs)" for it in nodes)
            raise UsageError(
                f"expected {asked.nodes} nodes of {self.system}{wanted}, found {found}. "
                f"Type for example: {self.example} --nodes {len(nodes)} --ntasks-per-node "
                f"{min(node.cpus for node in nodes)}"
            )
        return sum(self._ranks)

    def gpus(self, more: Sequence[str]) -> int:
        """Returns the GPUs of each node. Raises UsageError for other options."""
        if more:
            raise UsageError(
                f"expected --nodes and --ntasks-per-node, found {more[0]}. "
                f"Type for example: {self.example} --nodes 2 --ntasks-per-node 2"
            )
        return 0

    def address(self) -> str:
        return address_towards(*(node.address for node in self._connect().nodes))

    def run(self, invitation: Invitation, log_dir: str, tell: Tell) -> Job:
        connection, self._connection = self._connect(), None
        order = Order(tuple(self._ranks), self._gpus, RELAY, dataclasses.asdict(invitation))
        return ActorJob(connection, order, tell, self.system)


class DaskLauncher(ActorLauncher):
    """Starts ranks on the hosts of Dask's workers.

    ``where`` is the scheduler's address, or the path of its file.
    """

    name = "dask"
    example = "--on dask:tcp://h1:8786"
    about = "the hosts of Dask's workers"
    system = "Dask"
    package = "distributed"
    remedy = "Check the address, or start the scheduler there: dask scheduler"


class RayLauncher(ActorLauncher):
    """Starts ranks on Ray's nodes.

    ``where`` is an address for `ray.init`. Without one, this machine must be a node of Ray.
    """

    name = "ray"
    example = "--on ray"
    about = "the nodes of Ray, also --on ray://h1:10001"
    where_is_optional = True
    system = "Ray"
    package = "ray"
    remedy = (
        "Make this machine a node of Ray: ray start --address HEAD:6379, or type the address of "
        "its client server: --on ray://HEAD:10001"
    )
    counts_cpus = True

    @property
    def where_to(self) -> str:
        # Of ray://h1:10001, the launcher's name is the first word.
        return f"ray:{self.where}" if self.where.startswith("//") else self.where

    def gpus(self, more: Sequence[str]) -> int:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument("--gpus-per-node", type=int, default=0)
        try:
            found, more = parser.parse_known_args(list(more))
        except argparse.ArgumentError as error:
            raise UsageError(
                f"expected a number of GPUs, found {error}. Type for example: --gpus-per-node 2"
            ) from error
        super().gpus(more)
        return int(found.gpus_per_node)


class ActorConnection:
    """The process that is connected to the system, and the ``nodes`` there, the largest first.

    It ends its actors, and itself, once its standard input is closed, also by the end of this
    process.
    """

    def __init__(self, name: str, address: str, not_found: Callable[[str], StartFailed]) -> None:
        self._written = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", actors.__name__, name, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._written,
            env=python_path.without_current_folder(os.environ),
            # A session of its own: an interrupt goes to the kernel's whole process group.
            start_new_session=True,
        )
        try:
            first = next(self.lines(), {})
            if "nodes" not in first:
                raise not_found(first.get("failed") or self.last_lines() or "no answer")
            found = [ActorNode(*node) for node in first["nodes"]]
            able = (node for node in found if node.cpus)
            self.nodes = sorted(able, key=lambda node: (-node.cpus, node.host))
            if not self.nodes:
                raise not_found("no node that has a CPU")
        except BaseException:
            self.close()
            raise

    def lines(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        return map(json.loads, self._process.stdout)

    def last_lines(self) -> str:
        """Returns what the process has written to its standard error."""
        self._written.seek(0)
        return last_lines(self._written.read().decode("utf-8", "replace"))

    def send(self, order: Order) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which its output shows
            self._process.stdin.write(json.dumps(dataclasses.asdict(order)).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        actors.end_by_input(self._process, limits.ACTORS_SECONDS)  # the system ends its actors


class ActorJob(Job):
    """The relays in actors; a thread listens to the process that watches them."""

    def __init__(self, connection: ActorConnection, order: Order, tell: Tell, system: str) -> None:
        self._connection = connection
        self._tell = tell
        self._system = system
        self._waits = ""
        self._problem = ""
        connection.send(order)
        threading.Thread(target=self._listen, name=f"allranks-{system}", daemon=True).start()

    def _listen(self) -> None:
        for fields in self._connection.lines():
            if hosts := fields.get("hosts"):
                self._hosts = [Host(name, ranks) for name, ranks in hosts]
            elif ended := fields.get("ended"):
                host, why = ended
                why += other_version(why, "It has")
                self._tell(host, f"was lost by {self._system}: {why}")
            self._waits = fields.get("waits", "")
            self._problem = fields.get("failed", self._problem)
        self._problem = self._problem or self._connection.last_lines() or "no answer"
        for host in self._hosts:
            self._tell(host.name, f"was lost by {self._system}: {self._problem}")

    def hosts(self) -> Sequence[Host]:
        if self._problem and not self._hosts:
            raise StartFailed(
                f"expected {self._system} to start the host agents of the ranks, found "
                f"{self._problem}. Its nodes need the same Python with allranks at the same path"
            )
        return self._hosts

    def waits(self) -> str:
        return self._waits and f"{self._waits}. Interrupt to end the wait."

    def close(self) -> None:
        self._connection.close()
