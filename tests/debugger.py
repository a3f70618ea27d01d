"""A front end's debugger, as JupyterLab drives a kernel's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.kernel import Cell, Kernel

INITIALIZE = {
    "clientID": "jupyterlab",
    "adapterID": "python3",
    "pathFormat": "path",
    "linesStartAt1": True,
    "columnsStartAt1": True,
}


@dataclass(frozen=True)
class Pause:
    """A pause that the front end was told of."""

    debugger: Debugger
    body: dict[str, Any]

    @property
    def frames(self) -> list[dict[str, Any]]:
        frames: list[dict[str, Any]] = self.debugger.ask(
            "stackTrace", threadId=self.body["threadId"]
        )["stackFrames"]
        return frames

    @property
    def place(self) -> tuple[str, int]:
        """The name and the line of the top frame; the name begins with the rank."""
        top = self.frames[0]
        return top["name"], top["line"]

    def evaluate(self, expression: str) -> str:
        """Returns what the debugger's console shows."""
        frame = self.frames[0]["id"]
        reply = self.debugger.ask("evaluate", expression=expression, frameId=frame, context="repl")
        return str(reply["result"])

    def variables(self, scope: int = 0) -> dict[str, str]:
        scopes = self.debugger.ask("scopes", frameId=self.frames[0]["id"])["scopes"]
        reference = scopes[scope]["variablesReference"]
        found = self.debugger.ask("variables", variablesReference=reference)["variables"]
        return {one["name"]: one["value"] for one in found}

    def go(self, command: str) -> None:
        """Steps, or continues: JupyterLab does not say then which thread."""
        thread = 1 if command == "continue" else self.body["threadId"]
        self.debugger.ask(command, threadId=thread)

    def step(self, command: str = "next") -> Pause:
        self.go(command)
        return self.debugger.pause()


class Debugger:
    """The debugger of one kernel; it has been started."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.ask("initialize", **INITIALIZE)
        self.ask("attach")

    def ask(self, command: str, timeout: float = 120, **arguments: Any) -> Any:
        """Returns the body of a successful response."""
        reply = self._kernel.debug(command, arguments, timeout)
        assert reply["success"], (command, reply)
        return reply.get("body", {})

    def breakpoints(self, source: str, *lines: int) -> list[int]:
        """Sets the breakpoints of a cell; returns their lines."""
        path = self.ask("dumpCell", code=source)["sourcePath"]
        return self.breakpoints_in(path, *lines)

    def breakpoints_in(self, path: str, *lines: int) -> list[int]:
        points = [{"line": line} for line in lines]
        reply = self.ask("setBreakpoints", source={"path": path}, breakpoints=points)
        return [one["line"] for one in reply["breakpoints"]]

    def start(self, source: str, *lines: int) -> tuple[Cell, Pause]:
        """Starts a cell with breakpoints at these lines; returns it with its first pause."""
        assert self.breakpoints(source, *lines) == list(lines)
        self._kernel.debug_events.clear()
        cell = self._kernel.start(source)
        return cell, self.pause(cell)

    def pause(self, cell: Cell | None = None, timeout: float = 60) -> Pause:
        """Returns the next pause."""
        events = self._kernel.debug_events

        def stopped() -> bool:
            return any(event["event"] == "stopped" for event in events)

        self._kernel.pump(stopped, timeout, "a pause", cell)
        while (event := events.pop(0))["event"] != "stopped":
            pass
        return Pause(self, event["body"])

    def lines(self, pause: Pause) -> dict[str, int]:
        """Returns the line of each paused rank."""
        found = {}
        for thread in self.ask("threads")["threads"]:
            if thread["name"].endswith("(paused)"):
                place = Pause(pause.debugger, {"threadId": thread["id"]}).place
                found[place[0].partition(":")[0]] = place[1]
        return found
