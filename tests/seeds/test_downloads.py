"""Processes that download a Keras data set at once, from a server that takes its time."""

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

from tests.seeds.conftest import need_packages

DATA = random.Random(1).randbytes(1 << 20)
FETCH = """
import hashlib, pathlib, sys
import keras
import allranks.tensorflow
url, home, extract = sys.argv[1], sys.argv[2], sys.argv[3] == "extract"
print("ready", flush=True)
input()
name = "data.tar" if extract else "data.bin"
path = keras.utils.get_file(name, url, cache_dir=home, extract=extract)
if extract:
    path = pathlib.Path(path, "folder", "data.bin")
print("got", hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest(), flush=True)
"""


class Server:
    """Serves some bytes: half of them at once, the rest when `go` is set."""

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


@pytest.fixture
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


@pytest.fixture
def fetching(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts processes that have imported what they need, and download when they get a line."""
    need_packages()
    with ExitStack() as stack:

        def start(server: Server, kind: str = "file") -> subprocess.Popen[str]:
            process = stack.enter_context(
                subprocess.Popen(
                    [
                        *(sys.executable, "-c", FETCH),
                        *(server.url, str(tmp_path), kind),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            return process

        yield start


@pytest.mark.parametrize("kind", ["file", "extract"])
def test_who_comes_in_the_middle_of_a_download_gets_a_whole_file(
    tmp_path, archive, serve, fetching, kind
):
    server = serve(DATA if kind == "file" else archive)
    both = [fetching(server, kind) for _ in range(2)]
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
        assert server.asked.acquire(timeout=60), "it took half a file for a whole one"
    server.go.set()
    for process in both:
        said, _ = process.communicate(timeout=60)
        assert f"got {hashlib.sha256(DATA).hexdigest()}\n" in said
    assert list(tmp_path.rglob("*.part")) == []


def test_a_download_that_fails_leaves_nothing(tmp_path, serve, fetching):
    server = serve(DATA)
    process = fetching(server)
    server.close()
    said, _ = process.communicate("\n", timeout=60)
    assert process.returncode == 1
    assert "got" not in said
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
