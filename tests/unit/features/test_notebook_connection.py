"""What a host and the notebook send each other arrives whole, whatever happens to connections."""

import dataclasses
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from allranks.cluster.features import NotebookHooks
from allranks.cluster.launchers.addresses import ANY_PORTS, LOOPBACK
from allranks.cluster.sockets import EventQueue, FromRank, ListeningSockets, RankSockets
from allranks.features.hosts import notebook_connection
from allranks.features.hosts.link_state import Command, Connected, Event
from allranks.features.hosts.notebook_connection import NotebookConnection
from allranks.records.config import Invitation
from allranks.records.limits import LEASE_SECONDS
from allranks.records.numbered import PIECE_NBYTES
from allranks.records.wire import Answer, encode
from tests.kernel import wait_until

COUNT = 600


class Network:
    """Passes connections on to a port, and can end all of them at once."""

    def __init__(self, url: str) -> None:
        self._port = urlsplit(url).port
        self._listening = socket.create_server((LOOPBACK, 0))
        self.url = f"tcp://{LOOPBACK}:{self._listening.getsockname()[1]}"
        self._open: list[socket.socket] = []
        #: How many of the next connections are accepted, and nothing else.
        self.silent = 0
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                if self.silent:
                    self.silent -= 1
                    self._open.append(near)
                    continue
                far = socket.create_connection((LOOPBACK, self._port))
                self._open += [near, far]
                for ends in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=ends))
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)
        self._end(source, target)

    def _end(self, *ends: socket.socket) -> None:
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def interrupt(self) -> None:
        self._end(*self._open)

    def close(self) -> None:
        # To the relay, the notebook then has ended.
        self._end(self._listening)
        self._threads.pop(0).join()
        self.interrupt()
        for thread in self._threads:
            thread.join()
        for one in (self._listening, *self._open):
            one.close()


class Host:
    """A relay's connection in a thread, which counts, and keeps the commands that come."""

    def __init__(self, invitation: Invitation) -> None:
        self.commands: list[int] = []
        #: How many connections for commands were made.
        self.connected = 0
        self.connection: NotebookConnection
        self._thread = threading.Thread(target=self._run, args=(invitation,))
        self._thread.start()

    def _run(self, invitation: Invitation) -> None:
        context = zmq.Context()
        self.connection = made = NotebookConnection(context, invitation, "h1")
        apply = made.state.apply

        def counted(event: Event, now: float) -> list[Command]:
            self.connected += event == Connected(of_commands=True)
            return apply(event, now)

        # The end of a connection and the next one may be handled at once.
        made.state.apply = counted  # type: ignore[method-assign]
        poller = zmq.Poller()
        for source in made.sources():
            poller.register(source, zmq.POLLIN)
        sent = 0
        while not made.state.over:
            for source, _ in poller.poll(1):
                self.commands += [int(line) for _, line in made.serve(source)]
            made.tick()
            if sent < COUNT:
                sent += 1
                made.send([b"agent", json.dumps({"n": sent, "filler": "x" * 1000}).encode()])
        context.destroy(linger=0)

    def wait(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture
def inbox():
    return EventQueue()


@pytest.fixture
def notebook(inbox):
    listening = ListeningSockets.open(LOOPBACK, ANY_PORTS)
    wire = RankSockets(inbox, NotebookHooks(()), listening)
    wire.listen()
    yield wire
    wire.close()


@pytest.fixture
def hosts():
    """Those that a test starts; they end with their networks."""
    started: list[Host] = []
    yield started
    for host in started:
        host.wait()


@pytest.fixture
def networks(notebook, hosts):
    """The networks of both connections to the notebook."""
    commands, events = Network(notebook.commands_url), Network(notebook.events_url)
    yield commands, events
    for network in (commands, events):
        network.close()


def invitation_to(notebook, networks) -> Invitation:
    urls = [network.url for network in networks]
    return Invitation(*urls, notebook.key, "h1", LEASE_SECONDS)


def test_messages_of_both_sides_survive_their_connections_once_and_in_order(
    notebook, networks, hosts
):
    heard: list[int] = []
    notebook.deliver_host = lambda host, line: heard.append(json.loads(line)["n"])
    host = Host(invitation_to(notebook, networks))
    hosts.append(host)
    wait_until(lambda: heard)
    for n in range(1, COUNT + 1):
        notebook.command("h1", "count", str(n))
        if n % 200 == 0:
            connected = host.connected
            for network in networks:
                network.interrupt()
            wait_until(lambda before=connected: host.connected > before)
    everything = list(range(1, COUNT + 1))
    wait_until(lambda: len(heard) >= COUNT and len(host.commands) >= COUNT)
    assert (heard, host.commands) == (everything, everything)


@contextmanager
def _connections_of(one: zmq.Socket[bytes]) -> Iterator[Callable[[int], None]]:
    """Within, ``await_event(event)`` waits for the next connection, or end of one."""
    watched = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    with one.get_monitor_socket(watched) as monitor:

        def await_event(event: int) -> None:
            assert monitor.poll(60_000)
            assert recv_monitor_message(monitor)["event"] == event

        yield await_event
        one.disable_monitor()


def test_two_connections_that_a_host_makes_between_two_beats_are_one_host(notebook, inbox):
    told: list[str] = []
    notebook.deliver_host = lambda host, line: told.append(host)
    with zmq.Context() as context, _connections_of(notebook._commands) as await_event:

        def connect(kind: int, url: str) -> zmq.Socket[bytes]:
            made = context.socket(kind)
            made.setsockopt(zmq.IDENTITY, b"h1")
            made.curve_serverkey = notebook.key.encode()
            made.curve_publickey, made.curve_secretkey = zmq.curve_keypair()
            made.connect(url)
            return made

        events = connect(zmq.PUSH, notebook.events_url)
        beat = [b"beat", b"h1", b"0", b""]
        events.send_multipart(beat)
        wait_until(lambda: told)
        notebook.command("h1", "say", "hello")
        # The first connection ends before the notebook has read what came on it.
        with connect(zmq.DEALER, notebook.commands_url) as first:
            first.send_multipart([b"0", b""])
            await_event(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        await_event(zmq.EVENT_DISCONNECTED)
        with connect(zmq.DEALER, notebook.commands_url) as second:
            second.send_multipart([b"0", b""])
            await_event(zmq.EVENT_HANDSHAKE_SUCCEEDED)

            def said() -> bool:
                events.send_multipart(beat)
                # The number of the message is its first frame; a confirmation comes before it.
                return bool(second.poll(50)) and second.recv_multipart()[1:] == [b"say", b"hello"]

            wait_until(said)
        events.close()
    assert (inbox.wait(0), set(told)) == ([], {"h1"})


@pytest.mark.parametrize(
    "nbytes", [0, PIECE_NBYTES - 1, PIECE_NBYTES, PIECE_NBYTES + 1, 2 * PIECE_NBYTES, 20_000_000]
)
def test_a_payload_of_any_size_arrives_whole(notebook, inbox, nbytes):
    """The notebook refuses large frames, so they come in pieces."""
    payload = os.urandom(nbytes)
    with zmq.Context() as context:
        invitation = Invitation(notebook.commands_url, notebook.events_url, notebook.key, "h1")
        host = NotebookConnection(context, invitation, "h1")
        host.send([*encode(Answer(1, 0, {}, "")), zmq.Frame(payload), b"the next one"])
        (event,) = inbox.wait(60)
        context.destroy(linger=0)
    assert isinstance(event, FromRank)
    assert event.payloads == [payload, b"the next one"]


@pytest.mark.leases
def test_a_connection_that_nobody_serves_is_made_again_within_the_lease(notebook, networks, hosts):
    host = Host(invitation_to(notebook, networks))
    hosts.append(host)
    wait_until(lambda: host.connected)
    networks[0].silent = 1
    networks[0].interrupt()
    wait_until(lambda: host.connected > 1 or host.connection.state.over)
    assert not host.connection.state.over
    notebook.command("h1", "count", "1")
    wait_until(lambda: host.commands == [1])


def test_a_relay_that_stood_still_finds_the_connection_that_was_made_meanwhile(
    notebook, networks, monkeypatch
):
    clock = SimpleNamespace(now=lambda: seconds)
    monkeypatch.setattr(notebook_connection, "AwakeClock", lambda: clock)
    seconds, context = 0.0, zmq.Context()
    made = NotebookConnection(context, invitation_to(notebook, networks), "h1")

    def serve_until(true) -> None:
        def served():
            for source in made.sources():
                while source.poll(0) and not true():
                    list(made.serve(source))
            return true()

        wait_until(served)

    serve_until(lambda: made.state.is_up)
    networks[0].interrupt()
    serve_until(lambda: not made.state.is_up)
    wait_until(lambda: made.sources()[1].poll(0))
    seconds = 2 * LEASE_SECONDS
    made.tick()
    assert not made.state.over
    serve_until(lambda: made.state.is_up)
    context.destroy(linger=0)


@pytest.mark.leases
def test_an_interruption_for_the_lease_ends_the_connection():
    with socket.create_server((LOOPBACK, 0)) as silent:
        url = f"tcp://{LOOPBACK}:{silent.getsockname()[1]}"
        invitation = Invitation(url, url, zmq.curve_keypair()[0].decode(), "h1")
        host = Host(dataclasses.replace(invitation, lease_seconds=1.5))
        host.wait()
    assert host.connection.state.over == "it was interrupted for 1.5 s"
    assert not host.commands
