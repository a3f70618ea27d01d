"""10,000 malformed messages at each door: it answers the next good one, and keeps little of them.

Each message is made of a good one, from a seed. Where a door has a function that decides, most
messages go to it directly, and some through the socket.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import zmq
from tornado.httpserver import HTTPServer
from tornado.web import Application, HTTPError, RequestHandler

from allranks import doors
from allranks.cluster import cluster
from allranks.cluster.features import NotebookHooks
from allranks.cluster.launchers.addresses import ANY_PORTS, LOOPBACK
from allranks.cluster.options import ClusterOptions
from allranks.cluster.sockets import EventQueue, FromRank, ListeningSockets, RankSockets
from allranks.cluster.state import ClusterState
from allranks.command import agents
from allranks.engine.host.events import NotebookSaid, Terminated
from allranks.errors import UsageError, WireError
from allranks.features.attach.attachment import Attachment
from allranks.features.attach.caretaker_state import (
    CaretakerState,
    HostGreeted,
    HostSent,
    KeptHost,
    OwnerLeft,
    ShowRunning,
)
from allranks.features.attach.records import WATCHERS_DOOR, CaretakerConfig, Keep, Running
from allranks.features.attach.sharing import WatcherFeed, unpack
from allranks.features.classroom import board, door, hub_service, states
from allranks.features.hosts.relay import received
from allranks.features.hosts.relay_state import Begun, RanksRead, RelayState, ToAgent, ToNotebook
from allranks.features.toolbar import notebook as toolbar
from allranks.records.agent import End, read_command, to_line
from allranks.records.config import NOTEBOOKS_DOOR, HostAgentConfig
from allranks.records.wire import (
    SENDERS,
    Hello,
    Output,
    Reply,
    RunCell,
    decode,
    decode_all,
    encode,
    join_messages,
)
from tests.kernel import wait_until
from tests.ports import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the doors need Linux")
COUNT, SOME = 10_000, 200
_MOST_NBYTES = 64 << 20
HOSTILE = [
    None,
    True,
    -1,
    2**31,
    int("9" * 400),
    0.5,
    float("nan"),
    float("inf"),
    "",
    "a\nIn[9]  failed\x1b[2J\u202e\x00\r\u2028",
    "\ud83d",
    "x" * 5000,
    [],
    [1],
    {},
    {"rank": {"rank": []}},
    [[[[]]]],
]
#: What no reader of JSON accepts, or what costs one the most.
TEXTS = [
    b"",
    b"\x00",
    b"\xff\xfe",
    b"{",
    b"[" * 40_000,
    b'{"a":' * 3000,
    b'{"cell": ' + b"9" * 5000 + b"}",
    b"[]" + b",[]" * 9000,
    b'"' + b"\\ud800" * 5000 + b'"',
    b"NaN",
    b"null",
    b" " * 9000,
]


class Malformed:
    """Messages that differ from good ones in a field, in a few bytes or entirely."""

    def __init__(self, *good: Any) -> None:
        self._random = random.Random(f"doors {good}")
        self._good = good

    def value(self) -> Any:
        return self._random.choice(HOSTILE)

    def choose(self, *choices: Any) -> Any:
        return self._random.choice(choices)

    def message(self) -> Any:
        good = self._random.choice(self._good)
        kind = self._random.randrange(4)
        if kind == 0 or not isinstance(good, dict):
            return self.value()
        if kind == 1:
            left_out = self._random.choice([*good])
            return {name: value for name, value in good.items() if name != left_out}
        return {**good, self._random.choice([*good]): self.value()}

    def line(self) -> bytes:
        kind = self._random.randrange(4)
        if kind == 0:
            return bytes(self._random.choice(TEXTS))
        text = json.dumps(self.message()).encode()
        if kind == 1:
            return text[: self._random.randrange(len(text))]
        if kind == 2:
            at = self._random.randrange(len(text))
            return text[:at] + self._random.randbytes(3) + text[at:]
        return text

    def frames(self) -> list[bytes]:
        return [self.line() for _ in range(self._random.randrange(5))]


@contextmanager
def little_memory(pid: int | None = None) -> Iterator[Callable[[], None]]:
    """Gives a function to call now and then: it fails if the door has taken too much memory.

    The door is in this process, or in another one.
    """
    process = psutil.Process(pid)
    before = process.memory_info().rss

    def look() -> None:
        taken = process.memory_info().rss - before
        assert taken < _MOST_NBYTES, f"{taken / 1e6:.0f} MB"

    yield look
    look()


def each(count: int, look: Callable[[], None]) -> Iterable[int]:
    for number in range(count):
        if number % 500 == 0:
            look()
        yield number


def at_socket(path: str, line: bytes) -> socket.socket:
    visitor = socket.socket(socket.AF_UNIX)
    visitor.connect(path)
    with suppress(BrokenPipeError):
        visitor.sendall(line)
    return visitor


def test_the_session_socket(tmp_path):
    config = HostAgentConfig(2, (), {}, str(tmp_path), "", "", (), "", "", "")
    attachment = Attachment(config, [0, 0])
    attachment.listen()
    assert attachment.door is not None
    path = str(tmp_path / NOTEBOOKS_DOOR)
    malformed = Malformed({"want": "about", "notebook": "/a.ipynb"}, {"want": "attach"})
    watched: list[None] = []

    def answer_to(line: bytes) -> bytes:
        with at_socket(path, line) as visitor:
            visitor.shutdown(socket.SHUT_WR)
            assert attachment.visited(lambda: watched.append(None)) is None
            with suppress(ConnectionResetError):  # it has not read all of the line
                return visitor.recv(1 << 16)
        return b""

    with attachment.door, little_memory() as look:
        for _ in each(COUNT, look):
            answer_to(malformed.line())
        assert json.loads(answer_to(b'{"want": "about"}\n'))["size"] == 2


def test_the_share_socket(tmp_path):
    feed = WatcherFeed(ClusterState(1))
    hello = Hello(0, 1, 0, 1, "h", 7, "cpu", "e", "MPI", "")
    feed.take(hello, encode(hello))
    feed.open(str(tmp_path))
    path = str(tmp_path / WATCHERS_DOOR)
    malformed = Malformed({"want": "watch", "seen": 7}, {"want": "lend"})
    try:
        with little_memory() as look:
            for number in each(COUNT, look):
                visitor = at_socket(path, malformed.line())
                if number % 50:
                    visitor.close()
                else:
                    # Another line from one that may watch by now.
                    with visitor, suppress(BrokenPipeError, ConnectionResetError):
                        visitor.sendall(b'{"want": "lend"}')
            with at_socket(path, b'{"want": "watch", "seen": 0}') as watcher:
                assert b"Hello" in watcher.recv(1 << 16)
    finally:
        feed.close()


def test_one_watcher_too_many_is_refused_and_those_before_stay(tmp_path):
    feed = WatcherFeed(ClusterState(1))
    hello = Hello(0, 1, 0, 1, "h", 7, "cpu", "e", "MPI", "")
    feed.take(hello, encode(hello))
    feed.open(str(tmp_path))
    path = str(tmp_path / WATCHERS_DOOR)
    with ExitStack() as ends:
        ends.callback(feed.close)
        watchers = []
        for _ in range(30):
            watchers.append(ends.enter_context(at_socket(path, b'{"want": "watch", "seen": 0}')))
            assert b"Hello" in watchers[-1].recv(1 << 16)
        with at_socket(path, b"") as refused:
            assert refused.recv(1) == b""
        feed.take(hello, encode(hello))
        for watcher in watchers:
            assert b"Hello" in watcher.recv(1 << 16)


def test_a_connection_for_which_there_is_no_descriptor_is_closed(tmp_path):
    """Else a selector reports it to the thread of a door again and again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # what other tests have left frees no descriptor later
    with ExitStack() as ends:
        listener = ends.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(tmp_path / "door"))
        listener.listen()
        visitors = [ends.enter_context(at_socket(str(tmp_path / "door"), b"")) for _ in range(3)]
        ends.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        highest = max(map(int, os.listdir("/dev/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(highest + 8, hard), hard))
        taken: list[int] = []
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for visitor in visitors[:2]:
            with pytest.raises(OSError, match="Too many open files"):
                doors.accept(listener)
            assert visitor.recv(1) == b""
        for descriptor in taken:
            os.close(descriptor)
        with doors.accept(listener) as accepted:
            accepted.sendall(b"x")
            assert visitors[2].recv(1) == b"x"


def test_a_watcher_gets_a_reply_that_it_can_read_without_its_value(tmp_path):
    feed = WatcherFeed(ClusterState(1))
    cell = RunCell(1, "", 1, (0,), "In[1]", True, 0)
    reply = Reply(0, 1, "ok", 0.5, False, True, "", None)
    feed.open(str(tmp_path))
    feed.take(cell, encode(cell))
    feed.take(reply, encode(reply, b"a pickle"))
    try:
        with at_socket(str(tmp_path / WATCHERS_DOOR), b'{"want": "watch", "seen": 0}') as one:
            sent = one.makefile("rb")

            async def read(nbytes: int) -> bytes:
                return sent.read(nbytes)

            _, frames = asyncio.run(unpack(read))
    finally:
        feed.close()
    record, payloads = decode(frames)
    assert isinstance(record, Reply)
    assert (record.has_value, payloads) == (False, [])


def test_a_watcher_that_comes_during_a_cell_gets_the_cell_and_the_replies_so_far(tmp_path):
    roster = ClusterState(2)
    feed, cell = WatcherFeed(roster), RunCell(1, "f()", 1, (0, 1), "cell In[1]", True, 0)
    roster.begin_cell(1, (0, 1), 1)
    roster.sent = cell, time.monotonic() - 60
    assert roster.cell is not None
    roster.cell.apply(Reply(0, 1, "ok", 0.5, False, True, "", None))
    feed.open(str(tmp_path))
    try:
        assert feed.running == "In[1]"
        with at_socket(str(tmp_path / WATCHERS_DOOR), b'{"want": "watch", "seen": 0}') as one:
            sent = one.makefile("rb")

            async def read(nbytes: int) -> bytes:
                return sent.read(nbytes)

            (head, frames), (_, reply) = (asyncio.run(unpack(read)) for _ in range(2))
    finally:
        feed.close()
    assert head["ago"] >= 60
    assert decode(frames)[0] == cell
    assert (decode(reply)[0].rank, decode(reply)[0].has_value) == (0, False)


def test_a_watcher_that_comes_between_two_cells_gets_none(tmp_path):
    roster = ClusterState(1)
    feed, cell = WatcherFeed(roster), RunCell(1, "f()", 1, (0,), "cell In[1]", True, 0)
    roster.begin_cell(1, (0,), 1)
    roster.sent = cell, time.monotonic()
    roster.end_cell()
    feed.open(str(tmp_path))
    try:
        assert feed.running == ""
    finally:
        feed.close()


STATE = {
    "user": "zoe",
    "notebook": "a.ipynb",
    "exercise": "1",
    "state": "failed",
    "error": "E",
    "waits": "rank 0 waits",
    "ranks": "2 ranks\n├── rank 0",
    "cell": 7,
    "seconds": 0.5,
    "shows_panel": True,
}


def test_the_class(tmp_path, monkeypatch):
    malformed = Malformed(STATE, "a panel")
    with little_memory() as look:
        student = board.Student("zoe", "zoe", 7)
        for number in each(COUNT, look):
            student.panels_asked = malformed.choose(0, 2)
            try:
                student.receive(malformed.line() + malformed.choose(b"\n", b"\n\n", b""))
            except states.RefusedMessage:
                student = board.Student("zoe", "zoe", 7)
            if number % 100 == 0:
                assert len(board.as_text([student]).splitlines()) == 1
                assert board.as_text([student]).isprintable()
                board.as_html([student]).encode()
                (board.ranks_html(student) + board.panel_html(student)).encode()
    monkeypatch.setenv("ALLRANKS_CLASS_DIR", str(tmp_path))
    monkeypatch.setattr(door, "_CONNECT_SECONDS", 60)
    opened = board.ClassBoard(None)
    try:
        for _ in range(SOME):
            with door.connect(door.own_account()) as connection, suppress(OSError):
                connection.sendall(malformed.line() + b"\n" + malformed.line())
        with door.connect(door.own_account()) as connection:
            door.send(connection, {"cell": 4711})
            wait_until(lambda: any(one.cell == 4711 for one in opened.students()))
    finally:
        opened.close()


class FakeHub(RequestHandler):
    def get(self) -> None:
        self.write({"kind": "user", "name": "ana"})


def test_the_service_of_a_hub():
    malformed = Malformed(STATE, {"opened": "ana/1"})
    answers = Malformed({"students": [], "panel": None}, {"students": [{}]}, {"students": [STATE]})
    with little_memory() as look:
        for _ in each(COUNT, look):
            with suppress(HTTPError):
                hub_service.read_body(malformed.line() + malformed.choose(b"", b"\n", b'\n"p"'))
            with suppress(HTTPError):
                hub_service.read_opened(malformed.line())
            with suppress(states.RefusedMessage):
                states.read_class(answers.message())
            with suppress(states.RefusedMessage):
                states.read_admission(answers.line())

    async def run() -> None:
        ports = free_port(), free_port()
        made = hub_service.application(f"http://127.0.0.1:{ports[0]}/hub/api")
        servers = (
            HTTPServer(Application([("/hub/api/user", FakeHub)])),
            hub_service.ClassServer(made),
        )
        for server, port in zip(servers, ports, strict=True):
            server.listen(port, "127.0.0.1")

        async def answer_to(request: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", ports[1])
            try:
                writer.write(request)
                writer.write_eof()
                return await reader.read(1 << 16)
            except ConnectionError:
                return b""
            finally:
                writer.close()

        def post(body: bytes) -> bytes:
            head = "POST /class HTTP/1.1\r\nHost: h\r\nConnection: close\r\nAuthorization: token t"
            return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

        try:
            for _ in range(SOME // 5):
                await answer_to(malformed.line())
                await answer_to(post(malformed.line()))
                await answer_to(post(b"{}")[: malformed.choose(20, 60, 100)])
            assert b"200 OK" in await answer_to(post(b"{}"))
        finally:
            for server in servers:
                server.stop()
                await server.close_all_connections()

    asyncio.run(run())


def test_the_relay(tmp_path):
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    rank, told = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    told.bind(f"ipc://{tmp_path}/events")
    rank.connect(f"ipc://{tmp_path}/events")
    output = encode(Output(0, 1, (["out", "good"],), 0, 0, 9))
    name, fields = json.loads(output[0])
    malformed = Malformed(fields, [name, fields])
    refused: list[int] = []
    good = 0
    relay = RelayState()
    relay.apply(Begun(), 0)

    def apply(event: Any) -> None:
        nonlocal good
        for command in relay.apply(event, 0):
            if isinstance(command, ToAgent):
                end = read_command(command.line)
                assert isinstance(end, End)
                refused.append(end.pid)
            elif isinstance(command, ToNotebook):
                # As the notebook reads it.
                frames = [bytes(frame) for frame in command.frames]
                read = decode_all(frames[2:] if frames[0] == SENDERS else frames)
                good += sum(isinstance(record, Output) for _, record in read)

    def read_all() -> None:
        for message in received(told):
            apply(message)
        apply(RanksRead())

    try:
        with little_memory() as look:
            for number in each(COUNT, look):
                frames = malformed.frames()
                frames = malformed.choose(
                    frames or [b""],
                    [b"batch", *frames],
                    [b"batch", b"[%d]" % len(frames), *frames],
                    [json.dumps([name, malformed.message()]).encode()],
                )
                rank.send_multipart(frames)
                with suppress(WireError):
                    decode_all(frames)
                if number % 100 == 0:
                    rank.send_multipart(join_messages([output, output]))
                    read_all()

            def all_came() -> bool:
                read_all()
                return good >= 2 * COUNT // 100

            apply(Terminated())  # after which nothing waits
            wait_until(all_came)
        assert set(refused) == {os.getpid()}
    finally:
        context.destroy(0)


def test_the_notebooks_sockets_for_other_hosts():
    inbox = EventQueue()
    wire = RankSockets(inbox, NotebookHooks(()), ListeningSockets.open(LOOPBACK, ANY_PORTS))
    wire.listen()
    relay = wire._context.socket(zmq.PUSH)
    relay.curve_serverkey = wire.key.encode()
    relay.curve_publickey, relay.curve_secretkey = zmq.curve_keypair()
    relay.connect(wire.events_url)
    output = encode(Output(0, 1, (["out", "good"],), 0, 0, 9))
    name, fields = json.loads(output[0])
    malformed = Malformed(fields, [name, fields])
    read: list[Any] = []

    def good_came() -> bool:
        read[:] = [one for one in inbox.wait(0.1) if isinstance(one, FromRank)] or read
        return bool(read)

    try:
        with little_memory() as look:
            for number in each(COUNT, look):
                frames = malformed.frames()
                relay.send_multipart(
                    malformed.choose(
                        frames or [b""],
                        [malformed.choose(b"beat", b"begin", b"host"), b"h1", *frames],
                        [b"host", b"h1", b"%d" % (number + 1), b"agent", malformed.line()],
                        [b"host", b"h1", b"%d" % (number + 1), b"senders", *frames],
                        [b"host", b"h1", b"%d" % (number + 1), b"batch", *frames],
                    )
                )
                if number % 100 == 99:
                    relay.send_multipart(output)
                    read.clear()
                    wait_until(good_came)
    finally:
        relay.close(0)
        wire.close()


def test_the_caretaker():
    ranks = json.loads(
        HostAgentConfig(2, (), {}, "", "", "", (), "", "", "", can_replace=True).to_json()
    )
    state = CaretakerState(CaretakerConfig("", ranks, "", "", 30.0, (0, 0)))
    known = {"hosts": [["h2", 2]], "starts_again": False, "ended": ["h1"], "dead": []}

    def apply(event: Any) -> list[Any]:
        return state.apply(event, 0.0)

    apply(NotebookSaid(Keep({**known, "replaced": []})))
    apply(OwnerLeft(stays=True, owner=b""))
    state._hosts["h1"] = KeptHost(b"", 0.0)
    exit_event = {"event": "exit", "rank": 0, "code": 1, "pid": 7, "by_launcher": False}
    ended = {"event": "launcher_exit", "code": 1}
    malformed = Malformed(exit_event, {"event": "running", "cell": 3}, ended)
    with little_memory() as look:
        for number in each(COUNT, look):
            frames = malformed.frames()
            frames = malformed.choose(
                frames,
                [malformed.choose(b"beat", b"begin", b"host"), b"h1", *frames],
                [b"host", b"h1", b"%d" % (number + 1), b"agent", malformed.line()],
                [b"host", b"h1", malformed.line(), b"agent", malformed.line()],
            )
            apply(HostSent(frames))
            apply(HostGreeted(malformed.choose(frames, [b"h1", *frames])))
            if not state._hosts["h1"].is_up:
                state._hosts["h1"] = KeptHost(b"", 0.0)
    assert not state.has_ended
    event = [b"host", b"h2", b"1", b"agent", to_line(Running(4711))]
    assert apply(HostSent(event)) == [ShowRunning(4711)]


class FakeCluster:
    """Runs no cell, and answers at once."""

    cells = property(lambda self: self)
    roster = SimpleNamespace(have_left={})
    state, size, hellos, log_dir = "running", 2, dict.fromkeys(range(2)), ""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def interrupt(self) -> None: ...

    def begin(self, source: str, **_: Any) -> None:
        raise UsageError(f"no cell: {source}")

    def call(self, *_: Any, **__: Any) -> Any:
        raise UsageError("no values")

    def status(self) -> list[Any]:
        return []

    def ask_soon(self, *_: Any) -> None: ...


def test_the_tools_for_agents(monkeypatch):
    monkeypatch.setattr(agents, "_Transcript", lambda hellos, log_dir: SimpleNamespace(parts=[]))
    tools = agents.AgentTools(ClusterOptions(2), 60)
    monkeypatch.setattr(tools, "_cluster", FakeCluster())
    named = {tool.__name__: tool for tool in tools.tools()}
    malformed = Malformed("x")
    texts = [one for one in HOSTILE if isinstance(one, str)]
    numbers = [one for one in HOSTILE if isinstance(one, int)]
    floats = [one for one in HOSTILE if isinstance(one, float)]
    with little_memory() as look:
        for _ in each(COUNT, look):
            text, number = malformed.choose(*texts), malformed.choose(*numbers)
            tool, arguments = malformed.choose(
                ("run", (text, malformed.choose(*texts), malformed.choose(*floats, -1.0))),
                ("output", (number, malformed.choose(*numbers))),
                ("error", (number, malformed.choose(*numbers))),
                ("values", (text,)),
                ("timings", (number,)),
                ("state", ()),
                ("interrupt", ()),
            )
            assert len(named[tool](*arguments)) < 7000
    assert "no cell: 1" in named["run"]("1")
    tools.close()


def test_the_protocol_of_agents():
    command = [sys.executable, "-m", "allranks.command.main", "mcp", "-n", "2"]
    about = {"protocolVersion": "2025-03-26", "capabilities": {}}
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": about}
    hello["params"] = {**about, "clientInfo": {"name": "test", "version": "1"}}
    malformed = Malformed(hello)
    lines = [malformed.line().replace(b"\n", b" ") for _ in range(COUNT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        source, answers = process.stdin, process.stdout
        assert source is not None
        assert answers is not None

        def ask(number: int, *before: bytes) -> None:
            asked = json.dumps({**hello, "id": number}).encode()
            source.write(b"\n".join([*before, asked, b""]))
            source.flush()

        def answer_to(number: int) -> None:
            wanted = b'"id":%d,' % number
            assert any(
                wanted in line and b"serverInfo" in line for line in iter(answers.readline, b"")
            )

        ask(4710)
        answer_to(4710)
        with little_memory(process.pid):
            asks = threading.Thread(target=ask, args=(4711, *lines))  # both pipes may be full
            asks.start()
            answer_to(4711)
            asks.join()
        source.close()


def test_the_requests_of_a_page(monkeypatch):
    feature = toolbar.Toolbar()
    asked: list[Any] = []
    feature.context = SimpleNamespace(send=lambda *sent: asked.append(sent))  # type: ignore[assignment]
    running = SimpleNamespace(size=2, hellos={}, roster=SimpleNamespace(dead={}))
    session = SimpleNamespace(hooks=SimpleNamespace(features=[feature]))
    monkeypatch.setattr(cluster, "session", session)
    monkeypatch.setattr(cluster, "running", lambda: running)
    monkeypatch.setattr(toolbar, "_ANSWER_SECONDS", 3600.0)  # no answer is due within the test
    monkeypatch.setattr(toolbar, "_VARIABLES_SECONDS", 3600.0)
    threads = threading.active_count()
    malformed = Malformed({"variables": True})
    with little_memory() as look:
        for _ in each(COUNT, look):
            toolbar._asked({"content": {"data": malformed.message()}})
            assert threading.active_count() <= threads + 4
    monkeypatch.setattr(cluster, "running", lambda: None)
    feature.stopped()
    assert asked


def test_a_page_gets_one_answer_to_requests_that_wait(monkeypatch):
    feature = toolbar.Toolbar()
    asked: Future[Any] = Future()
    feature.context = SimpleNamespace(send=lambda *sent: asked.set_result(sent))  # type: ignore[assignment]
    running: Any = SimpleNamespace(size=2, hellos={}, roster=SimpleNamespace(dead={}))
    monkeypatch.setattr(cluster, "running", lambda: running)
    for _ in range(3):
        feature.ask_all(running, "status", lambda *_: None, 60.0)
    ranks, _ = asked.result(0)
    assert ranks == (0, 1)
    feature._finish(next(iter(feature._questions)))
    feature.context = None
    feature.ask_all(running, "status", lambda *_: None, 60.0)
    assert not feature._pending
