"""Processes that download a Keras data set at the same time from a slow server."""

from __future__ import annotations

import hashlib
import io
import os
import random
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.horovod.conftest import need_packages

DATA = random.Random(1).randbytes(1 << 20)
FETCH = """
import hashlib, pathlib, sys
import keras
import allranks.tensorflow
print("ready", flush=True)
for line in sys.stdin:
    kind, url, home = line.split()
    name = "data.tar" if kind == "archive" else "data.bin"
    try:
        path = keras.utils.get_file(name, url, cache_dir=home, extract=kind == "archive")
    except Exception:
        print("failed", flush=True)
        continue
    if kind == "archive":
        path = pathlib.Path(path, "folder", "data.bin")
    print("got", hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest(), flush=True)
"""


class Server:
    """Serves half of its bytes at once, and the rest when `go` is set."""

    def __init__(self, data: bytes) -> None:
        self.asked, self.go = threading.Semaphore(0), threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                half = len(data) // 2
                self.wfile.write(data[:half])
                server.asked.release()
                server.go.wait(60)
                self.wfile.write(data[half:])

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/data"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.go.set()
        self.http.shutdown()
        self.http.server_close()


def archive() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        member = tarfile.TarInfo("folder/data.bin")
        member.size = len(DATA)
        tar.addfile(member, io.BytesIO(DATA))
    return packed.getvalue()


@pytest.fixture
def serve() -> Iterator[Callable[[bytes], Server]]:
    """Starts servers that end with the test."""
    with ExitStack() as stack:

        def start(data: bytes) -> Server:
            server = Server(data)
            stack.callback(server.close)
            return server

        yield start


class Downloader:
    """A process with Keras and allranks that downloads on request."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", FETCH],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )

    def ask(self, kind: str, server: Server, home: Path) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{kind} {server.url} {home}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        """Returns the next answer, after the progress bar of Keras."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            for answer in ("ready", "failed", "got "):
                if answer in line:
                    return line[line.index(answer) :].rstrip()
        raise AssertionError("the process has ended")


@pytest.fixture(scope="module")
def both() -> Iterator[list[Downloader]]:
    """Returns two processes, which import at the same time."""
    need_packages()
    made = [Downloader(), Downloader()]
    assert [one.answer() for one in made] == ["ready", "ready"]
    yield made
    for one in made:
        one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize("kind", ["file", "archive"])
def test_a_process_that_comes_in_the_middle_of_a_download_gets_a_whole_file(
    tmp_path, serve, both, kind
):
    server = serve(DATA if kind == "file" else archive())
    for one in both:
        one.ask(kind, server, tmp_path)
        assert server.asked.acquire(timeout=60), "it took half a file for a whole one"
    server.go.set()
    assert {one.answer() for one in both} == {f"got {hashlib.sha256(DATA).hexdigest()}"}
    assert list(tmp_path.rglob("*.part")) == []


def test_a_download_that_fails_leaves_nothing(tmp_path, serve, both):
    server = serve(DATA)
    server.close()
    both[0].ask("file", server, tmp_path)
    assert both[0].answer() == "failed"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
