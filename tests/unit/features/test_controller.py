"""ipyparallel's controller as the host agent runs it."""

import json
import subprocess
import sys
import time
from contextlib import contextmanager

import ipyparallel
import pytest
import zmq
from ipyparallel.engine.app import Heart
from ipyparallel.error import RemoteError
from jupyter_client.session import Session

from allranks.features.ipyparallel import controller as app
from tests.attacks import run_as_another

CONTROLLER = """
import json, sys
from allranks.features.ipyparallel import controller as app
engine, client, secret, app.LARGEST_LOG_NBYTES = json.loads(sys.argv[1])
app.run(engine, client, secret, sys.argv[2], 1, lambda: print("complete", flush=True), 0)
"""
#: The beginning of a connection without a key, in the protocol of ZeroMQ.
NO_KEY = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
GARBAGE = b"\x00\x40" + b"a message" * 7
#: Connects to each port, sends garbage, and prints the greeting, or what comes until the connection
#: ends.
ATTACK = """
import socket, sys
for port in sys.argv[2:]:
    with socket.create_connection(("127.0.0.1", int(port))) as attacker:
        got = b""
        try:
            attacker.sendall(bytes.fromhex(sys.argv[1]))
            while len(got) < 64 and (more := attacker.recv(64)):
                got += more
        except ConnectionError:
            pass
        print(got)
"""


class Controller:
    """A controller, and the connection of an engine to its port for registrations."""

    identity = b"an-engine"

    def __init__(self, ended: subprocess.Popen, engine: dict, client: dict, registrar) -> None:
        self.ended, self.engine, self.client, self.registrar = ended, engine, client, registrar
        self.session = Session(key=engine["key"].encode())
        self.engines = []
        public, secret = zmq.curve_keypair()
        self.keys = {
            "curve_serverkey": engine["curve_serverkey"].encode(),
            "curve_publickey": public,
            "curve_secretkey": secret,
        }
        for name, key in self.keys.items():
            setattr(registrar, name, key)

    def start_engine(self, identity: bytes, pid: int) -> None:
        """Registers an engine as rank 0, which gets requests and never answers them."""
        places = [self.registrar.context.socket(zmq.DEALER) for _ in range(2)]
        for place, name in zip(places, ("registration", "mux"), strict=True):
            for option, value in {**self.keys, "identity": identity, "linger": 0}.items():
                setattr(place, option, value)
            place.connect(self.url(name))
        self.engines += places
        Heart(self.url("hb_ping"), self.url("hb_pong"), heart_id=identity, **self.keys).start()
        content = {"uuid": identity.decode(), "id": 0, "pid": pid}
        self.session.send(places[0], "registration_request", content=content)

    def end_engine(self, pid: int) -> None:
        """Tells the controller what the host agent tells it of an engine's death."""
        self.ended.stdin.write(f"0 {pid}\n")
        self.ended.stdin.flush()

    def url(self, name: str) -> str:
        return f"{self.engine['interface']}:{self.engine[name]}"

    def has_read_all(self) -> bool:
        """Waits for the answer to one more message, behind all that were sent before."""
        self.session.send(self.registrar, "connection_request")
        return bool(self.registrar.poll(60_000))


@contextmanager
def controller(folder, log_nbytes=app.LARGEST_LOG_NBYTES):
    engine, client, secret, held = app.connection_info()
    told = json.dumps([engine, client, secret, log_nbytes])
    words = [sys.executable, "-c", CONTROLLER, told, str(folder)]
    with open(folder / "log", "ab") as log:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        ended = subprocess.Popen(words, cwd=folder, text=True, **pipes)
    context = zmq.Context()
    registrar = context.socket(zmq.DEALER)
    registrar.setsockopt(zmq.IDENTITY, Controller.identity)
    registrar.setsockopt(zmq.LINGER, 0)
    found = Controller(ended, engine, client, registrar)
    registrar.connect(found.url("registration"))
    try:
        yield found
    finally:
        for place in held:  # until now, so that no other program has taken the ports
            place.close()
        ended.kill()
        ended.wait()
        ended.stdin.close()
        ended.stdout.close()
        context.destroy(linger=0)


def test_an_engine_whose_heart_is_heard_before_its_registration_is_registered(tmp_path):
    with controller(tmp_path) as found:
        ping, pong = found.url("hb_ping"), found.url("hb_pong")
        Heart(ping, pong, heart_id=found.identity, **found.keys).start()
        # The controller must be there, or the registration would wait in the socket as well.
        assert found.has_read_all()
        time.sleep(10 * app.HEARTBEAT_MS / 1000)
        content = {"uuid": found.identity.decode(), "id": 0}
        found.session.send(found.registrar, "registration_request", content=content)
        assert found.ended.stdout.readline() == "complete\n"


def test_the_death_of_an_engine_ends_its_requests_and_frees_its_id(tmp_path):
    with controller(tmp_path) as found:
        assert found.has_read_all()
        # The client first: it misses the notifications of the moment at which it connects.
        with ipyparallel.Client(found.client) as client:
            found.start_engine(b"first", pid=11)
            client.wait_for_engines(1, interactive=False)
            request = client[0].apply_async(str)
            found.end_engine(pid=11)
            with pytest.raises(RemoteError, match="EngineError"):
                request.get()
            assert client.ids == []
            found.start_engine(b"second", pid=12)
            client.wait_for_engines(1, interactive=False)
            found.end_engine(pid=11)  # late news of the first one
            found.end_engine(pid=13)
            assert found.has_read_all()
            assert client.ids == [0]


def test_another_account_without_the_key_reads_and_writes_nothing(tmp_path):
    with controller(tmp_path) as found:
        assert found.has_read_all()
        ports = {
            port
            for info in (found.engine, found.client)
            for value in info.values()
            for port in (value if isinstance(value, list) else [value])
            if isinstance(port, int)
        }
        answers = run_as_another(ATTACK, (NO_KEY + GARBAGE).hex(), *map(str, ports))
        # With "NULL", the controller would accept connections without a key.
        assert len(answers) == len(ports)
        assert not [answer for answer in answers if "NULL" in answer]
        assert found.has_read_all()
        assert "ERROR" not in (tmp_path / "log").read_text()


def test_the_log_of_messages_that_cannot_be_read_is_limited(tmp_path):
    with controller(tmp_path, log_nbytes=20_000) as found:
        other = Session(key=b"another key")
        for _ in range(200):
            other.send(found.registrar, "connection_request")
        assert found.has_read_all()
        assert (tmp_path / "log").stat().st_size == 20_000
