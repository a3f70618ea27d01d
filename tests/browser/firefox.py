"""A Firefox for Playwright, in place of Chromium: ALLRANKS_TEST_FIREFOX=/usr/bin/firefox-esr.

Playwright sets the colours of each page by a command that Firefox ESR does not have, and fails
without it. Run as a script, this is a Firefox whose connection answers that command itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application
from tornado.websocket import WebSocketClientConnection, WebSocketHandler, websocket_connect

SETTING = "ALLRANKS_TEST_FIREFOX"
#: Commands of WebDriver BiDi that are answered here.
MISSING = frozenset({"emulation.setMediaFeaturesOverride"})
_ADDRESS = re.compile(r"(?<=WebDriver BiDi listening on )ws://\S+")
_MOST_NBYTES = 1 << 30


def chosen() -> str:
    return os.environ.get(SETTING, "")


def program_of(path: str, folder: Path) -> Path:
    """Returns a program that starts a Firefox for Playwright."""
    program = folder / "firefox"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "{path}" "$@"\n')
    program.chmod(0o755)
    return program


class Relay(WebSocketHandler):
    """One connection of Playwright, passed on to Firefox."""

    address = ""

    def check_origin(self, origin: str) -> bool:
        return True

    async def open(self, *_: str, **__: str) -> None:
        connect = websocket_connect(
            f"{self.address}{self.request.path}",
            on_message_callback=self.answer,
            max_message_size=_MOST_NBYTES,
        )
        self.firefox: asyncio.Future[WebSocketClientConnection] = asyncio.ensure_future(connect)

    async def on_message(self, message: str | bytes) -> None:
        command = json.loads(message)
        if command.get("method") in MISSING:
            said: dict[str, Any] = {"type": "success", "id": command["id"], "result": {}}
            await self.write_message(json.dumps(said))
        else:
            await (await self.firefox).write_message(message)

    def answer(self, message: str | bytes | None) -> None:
        if message is None:
            self.close()
        else:
            self.write_message(message)

    def on_close(self) -> None:
        self.firefox.add_done_callback(lambda connected: connected.result().close())


async def main(program: str, *arguments: str) -> int:
    firefox = await asyncio.create_subprocess_exec(
        program, *arguments, stderr=asyncio.subprocess.PIPE, limit=_MOST_NBYTES
    )
    assert firefox.stderr is not None
    sockets = bind_sockets(0, "127.0.0.1")
    server = HTTPServer(Application([("/.*", Relay)], websocket_max_message_size=_MOST_NBYTES))
    server.add_sockets(sockets)
    here = f"ws://127.0.0.1:{sockets[0].getsockname()[1]}"
    async for raw in firefox.stderr:
        line = raw.decode(errors="replace")
        if found := _ADDRESS.search(line):
            Relay.address, line = found[0], line.replace(found[0], here)
        sys.stderr.write(line)
        sys.stderr.flush()
    return await firefox.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
