"""The process that brings up the ranks of one host, watches them, and takes everything down.

The notebook's kernel starts one nursery per cluster, in a session of its own, and holds the other
end of its standard input. The nursery starts the launcher, imports once what every rank needs,
forks ipyparallel's controller and one process for each rank that the launcher calls for, and
reports how each of them ended, exactly, because it is their parent. When its standard input
closes (the kernel stopped, was restarted, or was killed with -9) nothing of the cluster stays.

Standard output carries one JSON event a line (see ``Nursery._tell``), standard input one command
a line (see ``Nursery._obey``).

Where ranks are on several hosts each host has a nursery. That of the first runs the launcher; those
of the others do what the launcher would have ssh do there (see ``allranks.engine.remote_agent``).
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from allranks import launched
from allranks.engine import cuda, doors, filters, pinning, processes
from allranks.engine.remote_agent import RemoteAgent
from allranks.records.config import EVERY_GPU, NurseryConfig

_TICK_SECONDS = 0.5
_TERM_SECONDS = 0.2
_MPI_FILES, _MPI_NBYTES = "OMPI_MCA_btl_sm_backing_directory", 16 << 20
_TRACKER_SECONDS = 1.0
_NO_MORE: Mapping[str, str] = MappingProxyType({})
_IMPORTS = (
    "allranks.engine.controller",
    "allranks.engine.rank",
    # What a first traceback and a first completion would load in every rank again.
    "IPython.core.completer",
    "stack_data",
    "pygments.lexers.python",
    "pygments.formatters.terminal256",
    "pygments.formatters.html",
)


class Nursery:
    """Brings up, watches and ends the processes of one cluster on this host.

    Args:
        config: what to bring up.
        heard: what was said behind it already.
    """

    def __init__(self, config: NurseryConfig, heard: bytes = b"") -> None:
        self.config = config
        self.selector = selectors.DefaultSelector()
        self.ranks: dict[int, int] = {}
        self.places: dict[int, socket.socket] = {}
        self.segments: set[str] = set()
        self.stopping = False
        self.admitted = 0
        self.began = time.time()
        self.gate, self._open_gate = os.pipe()
        self.pid = os.getpid()
        self.parent = os.getppid()
        self.controller = 0
        self.connection: dict[str, Any] = {}
        self.launcher: subprocess.Popen[bytes] | None = None
        self.agent: RemoteAgent | None = None
        self._heard = heard
        processes.adopt_orphans()

    def run(self) -> None:
        """Serves until the kernel is gone or says stop; leaves nothing behind."""
        if not self.config.several_hosts:  # else this host's relay has made it
            os.mkdir(self.config.session_dir, 0o700)  # that there was none says that it is ours
        address = os.path.join(self.config.session_dir, "nursery")
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.door.bind(address)
        self.door.listen(self.config.ranks_here + 8)
        try:
            if self.config.head:
                self._launch(address)
            if self.config.devices == (EVERY_GPU,):
                # Here, as the driver may take longer than the relay can be silent.
                self.config = dataclasses.replace(self.config, devices=pinning.visible())
            processes.share_cores(self.config.ranks_here)
            filters.set_aside()
            for name in _IMPORTS:
                importlib.import_module(name)
            self._preload()
            gc.freeze()  # what is imported by now stays shared between all children
            if self.config.head:
                self._fork_controller()
            self._watch()
        finally:
            self._end()

    def _launch(self, address: str) -> None:
        """Starts the launcher, which starts a stub in every rank, which comes to our door."""
        stub = os.path.join(os.path.dirname(os.path.abspath(__file__)), "stub.py")
        command = [*self.config.launch, sys.executable, "-I", "-S", stub, address]
        if self.config.several_hosts:
            self.agent = RemoteAgent(self.config.session_dir)
        self._start_launcher(command, self.agent.environment if self.agent else _NO_MORE)

    def _start_launcher(self, command: Sequence[str], more: Mapping[str, str] = _NO_MORE) -> None:
        environment = {**os.environ, **self.config.environment, **more}
        environment["TMPDIR"] = self.config.session_dir
        if processes.shared_memory_left() < self.config.ranks_here * _MPI_NBYTES:
            # Open MPI's ranks meet in a file each; one that does not fit ends them by a signal.
            environment.setdefault(_MPI_FILES, self.config.session_dir)
        self.launcher = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self.launcher.stdout is not None
        os.set_blocking(self.launcher.stdout.fileno(), False)

    def _asked(self) -> None:
        """Something is to be run on another host: the notebook knows the way."""
        assert self.agent is not None
        told = self.agent.asked()
        if told is not None:
            self._tell("reach", **told)

    def _preload(self) -> None:
        """Imports once what the ranks were told to begin with: they share it, and its memory.

        What cannot be imported says so in the cell that needs it.
        """
        from allranks.engine import progress
        from allranks.engine.rank import QUIET, QUIET_TORCH

        progress.install()
        if self.config.preload:
            for name, value in QUIET_TORCH.items():
                os.environ.setdefault(name, value)
        if self.config.preload and not self.config.devices:
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", QUIET)
        sys.path.insert(0, "")  # modules beside the notebook, which it finds as well
        for name in self.config.preload:
            self._tell("preloading", module=name)
            try:
                importlib.import_module(name)
            except Exception:
                traceback.print_exc()
            if set(self.config.devices) != {pinning.HIDDEN} and cuda.is_open():
                # Before the first fork: in what is forked from here all of CUDA would fail, which
                # matters to none who are shown no GPU.
                self._tell("opened_cuda", module=name)
                break
        if self.config.preload:
            self._tell("preloading", module="")
        if "" in sys.path:
            sys.path.remove("")

    def _fork_controller(self) -> None:
        from allranks.engine import controller

        engine, client, secret = controller.connection_info(self.config.interface)
        self.connection = engine
        complete, told = os.pipe()
        folder, size = self.config.session_dir, self.config.size

        def live() -> None:
            controller.run(engine, client, secret, folder, size, lambda: os.write(told, b"all"))

        log = os.path.join(self.config.log_dir, "controller.log")
        self.controller = self._fork(live, dict(os.environ), log, keep=[told])
        os.close(told)

        def tell() -> None:
            if os.read(complete, 8):
                self._tell("registered", client=client, engine=engine)
            self.selector.unregister(complete)
            os.close(complete)

        self.selector.register(complete, selectors.EVENT_READ, tell)
        self._tell("connection", client=client, engine=engine)

    def _watch(self) -> None:
        """Serves the door, the launcher's output and the kernel until told to stop."""
        wake, wake_writer = os.pipe()
        os.set_blocking(wake_writer, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopping", True))
        self.selector.register(0, selectors.EVENT_READ, self._hear)
        self.selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 4096))
        if self.config.head:
            self._open_door()
        if self.agent is not None:
            self.selector.register(self.agent.listening, selectors.EVENT_READ, self._asked)
        self._take(b"")
        while not self.stopping:
            for key, _ in self.selector.select(_TICK_SECONDS):
                key.data()
            self._reap()
            if os.getppid() != self.parent:
                return

    def _open_door(self) -> None:
        """Lets ranks in, and hears the launcher that sends them."""
        self.selector.register(self.door, selectors.EVENT_READ, self._admit)
        if self.launcher is not None and self.launcher.stdout is not None:
            self.selector.register(self.launcher.stdout, selectors.EVENT_READ, self._relay)

    def _hear(self) -> None:
        said = os.read(0, 65536)
        self._take(said)
        if not said:
            self.stopping = True

    def _take(self, said: bytes) -> None:
        *lines, self._heard = (self._heard + said).split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            self._obey(word, rest)

    def _obey(self, word: str, rest: str) -> None:
        """Does what the kernel says: ``up``, ``stop``, and, on other hosts, ``join``, ``serve``."""
        if word == "up":
            # A rank that dies takes the list of its mappings along: look while all are alive.
            for pid in self.ranks:
                self.segments |= processes.shared_segments(pid)
        elif word == "stop":
            self.stopping = True
        elif word == "join":  # where ipyparallel's controller is
            self.connection = json.loads(rest)
            if self.launcher is not None:
                self._open_door()
        elif word == "serve":  # what the launcher of the first host wants to run here
            self._start_launcher(["/bin/sh", "-c", json.loads(rest)])
            if self.connection:
                self._open_door()

    def _relay(self) -> None:
        assert self.launcher is not None
        assert self.launcher.stdout is not None
        text = os.read(self.launcher.stdout.fileno(), 65536)
        if text:
            self._tell("launcher", text=text.decode("utf-8", "replace"))
        else:
            self.selector.unregister(self.launcher.stdout)

    def _admit(self) -> None:
        """A stub is at the door: fork the rank that takes its place."""
        from allranks.engine.rank import Rank, log_path

        place, _ = self.door.accept()
        head, received, _, _ = socket.recv_fds(place, 8, 8)
        text = _rest(place, head)
        if text is None:
            # Somebody looked whether anybody is here, or has died on the way.
            place.close()
            for descriptor in received:
                os.close(descriptor)
            return
        self.admitted += 1
        if self.admitted == 1 and self.launcher and not self.config.several_hosts:
            # The launcher has all that it needs of the network: its ranks are on this host.
            doors.close_to_network(self.launcher.pid)
        told = json.loads(text)
        environment: dict[str, str] = told["environment"]
        environment["TMPDIR"] = os.environ.get("TMPDIR", "")
        if not environment["TMPDIR"]:
            del environment["TMPDIR"]
        number = launched.rank(environment)
        if self.config.several_hosts:
            self._tell("admitted", rank=number)

        def live() -> None:
            # While MPI starts its ranks look all the time whether the others are there: more of
            # them than cores would leave no time for those that are still to be forked.
            os.read(self.gate, 1)
            os.close(self.gate)
            for have, wanted in zip(received, told["descriptors"], strict=False):
                os.dup2(have, wanted)
                os.set_inheritable(wanted, True)
            Rank(self.config, self.connection, number).run()

        log = log_path(self.config, number)
        pid = self._fork(live, environment, log, keep=[self.gate, *received, *told["descriptors"]])
        if self.admitted == self.config.ranks_here:
            os.close(self._open_gate)
        for descriptor in received:
            os.close(descriptor)
        self.ranks[pid] = number
        self.places[pid] = place
        self.selector.register(place, selectors.EVENT_READ, lambda: self._leave(pid))

    def _fork(
        self,
        live: Callable[[], None],
        environment: dict[str, str],
        log: str,
        keep: Sequence[int] = (),
    ) -> int:
        """Forks a process that runs ``live``, writes to ``log`` and dies with the nursery."""
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            processes.die_with_parent(self.pid)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(environment)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            processes.close_all_but({0, 1, 2, *keep})
            os.chdir(self.config.work_dir)
            live()
            code = 0
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)

    def _leave(self, pid: int) -> None:
        """The launcher ended a stub: its rank ends too."""
        self._dismiss(pid)
        processes.kill(pid)

    def _dismiss(self, pid: int) -> None:
        place = self.places.pop(pid, None)
        if place is not None:
            self.selector.unregister(place)
            place.close()

    def _reap(self) -> None:
        """Learns how children ended, tells the kernel, and lets the launcher know."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid in self.ranks:
                rank = self.ranks.pop(pid)
                ended_by_launcher = pid not in self.places
                self._tell("exit", rank=rank, code=code, by_launcher=ended_by_launcher)
                if not ended_by_launcher:
                    self.places[pid].sendall((code or 1).to_bytes(8, "little", signed=True))
                    self._dismiss(pid)
            elif self.launcher is not None and pid == self.launcher.pid:
                self.launcher.returncode = code
                self._relay_rest()
                if self.config.head:
                    self._tell("launcher_exit", code=code)
            elif pid == self.controller:
                self._tell("controller_exit", code=code)

    def _relay_rest(self) -> None:
        try:
            self._relay()
        except (BlockingIOError, KeyError, ValueError):
            pass  # nothing is left to read

    def _tell(self, event: str, **fields: Any) -> None:
        """Writes one event for the kernel: a line of JSON; the kernel may be gone."""
        try:
            os.write(1, (json.dumps({"event": event, **fields}) + "\n").encode())
        except OSError:
            self.stopping = True

    def _end(self) -> None:
        """Ends every process of the cluster and removes every file but the logs."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if processes.segments_since(self.began) - self.segments:
            # Somebody's, made since the ranks came up: it takes long to look whose.
            for pid in self.ranks:
                self.segments |= processes.shared_segments(pid)
        for pid in [*self.ranks, self.controller]:
            processes.kill(pid)
        for place in self.places.values():
            place.close()
        if self.agent is not None:
            self.agent.close()
        if self.launcher is not None and self.launcher.returncode is None:
            processes.kill(self.launcher.pid, signal.SIGTERM)
        deadline = time.monotonic() + _TERM_SECONDS
        while processes.reap_all() and time.monotonic() < deadline:
            time.sleep(0.02)
        deadline = time.monotonic() + _TRACKER_SECONDS
        # Whose parent has died is this process's child: with the last child all are gone.
        while processes.reap_all():
            processes.kill_children(spare_trackers=time.monotonic() < deadline)
            time.sleep(0.02)
        for path in self.segments:
            processes.unlink(path)
        shutil.rmtree(self.config.session_dir, ignore_errors=True)
        self._tell("stopped")


def _rest(place: socket.socket, head: bytes) -> bytes | None:
    """What follows a head of eight bytes, which tells its length; None where it does not come."""
    if len(head) < 8:
        return None
    length, text = int.from_bytes(head, "little"), b""
    while len(text) < length:
        more = place.recv(length - len(text))
        if not more:
            return None
        text += more
    return text


def first_line(descriptor: int) -> tuple[bytes, bytes] | None:
    """Returns the first line that comes, and what has come behind it; None where none comes.

    Another host may be so much faster that what it says has passed through the notebook already.
    """
    said = b""
    while b"\n" not in said:
        more = os.read(descriptor, 65536)
        if not more:
            return None
        said += more
    line, _, rest = said.partition(b"\n")
    return line, rest


def main() -> None:
    """Reads the configuration from standard input and serves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    found = first_line(0)
    if found is not None:
        line, rest = found
        Nursery(NurseryConfig.from_json(line.decode()), rest).run()


if __name__ == "__main__":
    main()
