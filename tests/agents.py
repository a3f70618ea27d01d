"""An agent that uses ``allranks mcp``: a script, and forty bugs that it finds from the replies."""

from __future__ import annotations

import asyncio
import re
import sys
import time

LONGEST = 6200
#: Source, the rank that is to blame (None if all are), and the line.
BUGS = [
    # One rank raises; the others wait for it.
    ("if rank == 1:\n    1 / 0\nbarrier()", 1, 2),
    ("x = [1, 2, 3]\nallreduce(float(x[rank + (rank == 2)]))", 2, 2),
    ("data = {'a': 1} if rank else {}\nallreduce(float(data['a']))", 0, 2),
    ("import math\nvalue = math.sqrt(1 - rank)\nallreduce(value)", 2, 2),
    ("if rank == 0:\n    raise OSError('disk full')\nallgather(np.ones(2))", 0, 2),
    ("def load():\n    return open('/nowhere') if rank == 1 else 1\nload()\nbarrier()", 1, 2),
    ("broadcast(np.ones(2), root=0)\nassert rank != 2, 'not here'\nbarrier()", 2, 2),
    ("int('7' if rank else 'seven')\nbarrier()", 0, 1),
    ("for i in range(5):\n    allreduce(1.0)\n    if i == 3 and rank == 1: None.shape", 1, 3),
    ("y = np.ones(3 if rank < 2 else 4) + np.ones(3)\nallreduce(y)", 2, 1),
    # One rank ends; one that is killed may have had no time to say its line, then it is 0.
    ("import os\nif rank == 1: os._exit(7)\nbarrier()", 1, (0, 2)),
    ("import os, signal\nif rank == 2: os.kill(os.getpid(), signal.SIGKILL)\nbarrier()", 2, (0, 2)),
    ("import sys\nif rank == 0: sys.exit(3)\nallreduce(1.0)", 0, 2),
    ("import ctypes\nif rank == 1: ctypes.string_at(0)\nbarrier()", 1, 2),
    # Calls that differ.
    ("x = np.ones(3 + (rank == 1))\nallreduce(x)", 1, 2),
    ("x = np.ones(3, 'f4' if rank == 2 else 'f8')\nallreduce(x)", 2, 2),
    ("if rank == 0: broadcast(1, 0)\nelse: allreduce(1.0)", 0, 1),
    ("allreduce(np.ones(2), op=Max if rank == 1 else Sum)", 1, 1),
    ("broadcast(np.ones(2), root=int(rank == 2))", 2, 1),
    ("x = np.ones((2, 3) if rank else (3, 2))\nallreduce(x)", 0, 2),
    ("if rank == 1: barrier()\nallreduce(1.0)", 1, 1),
    ("grouped_allreduce([np.ones(2)] * (2 + (rank == 0)))", 0, 1),
    ("allreduce(np.ones(2), op=Min if rank == 2 else Max)", 2, 1),
    ("allgather(np.ones((2, 2 + (rank == 1))))", 1, 1),
    ("reducescatter(np.ones(6 if rank else 9))", 0, 1),
    ("x = 1.0\nif rank == 2: allgather_object(x)\nelse: allreduce(x)", 2, 2),
    # One rank makes fewer calls.
    ("for _ in range(3 - (rank == 1)):\n    allreduce(1.0)", 1, None),
    ("if rank != 2:\n    barrier()", 2, None),
    ("if rank == 0:\n    broadcast(1, 0)", 1, None),
    ("batches = range(4 if rank else 3)\nfor batch in batches:\n    allreduce(1.0)", 0, None),
    # One rank does not come.
    ("import time\nif rank == 1:\n    time.sleep(60)\nbarrier()", 1, 3),
    ("while rank == 2:\n    pass\nallreduce(1.0)", 2, (1, 2)),
    ("import threading\nif rank == 0:\n    threading.Event().wait(60)\nbarrier()", 0, 3),
    ("n = 0\nwhile n < 1 or rank == 1:\n    n += 1\nallreduce(1.0)", 1, (2, 3)),
    ("import subprocess\nif rank == 2: subprocess.run(['sleep', '60'])\nbarrier()", 2, 2),
    ("import queue\nif rank == 0: queue.Queue().get(timeout=60)\nallreduce(1.0)", 0, 2),
    # Messages.
    ("if rank == 0: comm.recv(source=1)\nelse: barrier()", 0, 1),
    ("comm.recv(source=(rank + 1) % size)", None, 1),
    ("if rank == 1: comm.recv(source=2, tag=5)\nbarrier()", 1, 1),
    ("if rank == 2: comm.send(1, dest=7)\nbarrier()", 2, 1),
]


#: A cell that ignores interrupts, and tools to call while it hangs: each of them, in this order.
HANG = "import signal\nsignal.signal(2, signal.SIG_IGN)\nif rank == 1:\n    while True: pass"
CALLS = [
    ("run", {"source": HANG}),
    ("run", {"source": "1"}),
    ("state", {}),
    ("output", {}),
    ("error", {}),
    ("values", {"names": "x"}),
    ("timings", {}),
    ("interrupt", {}),
    ("restart", {}),
]


class Agent:
    """Calls the tools; ``seconds`` has the longest reply of each, ``length`` that of all."""

    def __init__(self, session):
        self._session = session
        self.seconds = {}
        self.length = 0

    async def __call__(self, tool, **arguments):
        began = time.monotonic()
        result = await self._session.call_tool(tool, arguments)
        self.seconds[tool] = max(self.seconds.get(tool, 0.0), time.monotonic() - began)
        text = result.content[0].text
        self.length = max(self.length, len(text))
        assert not result.is_error, text
        return text


def with_agent(act, *options):
    # Here, since each worker of pytest imports this file, and the import takes a second.
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    async def main():
        command = [*("-m", "allranks.command.main", "mcp", "-n", "3"), *options]
        parameters = StdioServerParameters(command=sys.executable, args=command)
        async with stdio_client(parameters) as streams, ClientSession(*streams) as session:
            await session.initialize()
            return await act(Agent(session))

    return asyncio.run(main())


def goes_on(reply):
    """Whether the cell has not ended; the second text is that of a reply at the deadline."""
    return " has run for " in reply or " goes on." in reply


async def finish(agent, source):
    """Runs a cell to its end; the first one starts the ranks."""
    reply = await agent("run", source=source)
    while goes_on(reply):
        await asyncio.sleep(0.2)
        reply = await agent("state")
    return reply


RANKS = r"ranks? ([\d–, ]+?)"


def numbers(text):
    found = set()
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("–")
        found |= set(range(int(first), int(last or first) + 1))
    return found


async def find(agent, source):
    """The policy: returns the rank and the line to blame, from the replies alone."""
    reply, seen = await agent("run", source=source), []
    while goes_on(reply):
        state = await agent("state")
        # A rank that has no line may be about to die: its report names the line.
        late = re.findall(rf"(?m)^{RANKS}: (?:running|silent) In\[\d+\]:(\d+)", state)
        seen.append({rank for ranks, _ in late for rank in numbers(ranks)})
        # The only one that is late, again and again: another may be on its way to the call.
        if len(seen[-1]) == 1 and seen[-3:] == 3 * seen[-1:]:
            await agent("interrupt")
            while goes_on(await agent("state")):
                await asyncio.sleep(0.2)
            return min(seen[-1]), int(late[0][1])
        await asyncio.sleep(0.2)
        reply = await agent("error")
    # A rank that differs from the others, or that has left them.
    differs = re.search(r"(?:rank: |, )rank (\d+) has ", reply)
    left = re.search(r"rank (\d+) finished .* without calling", reply)
    if differs:
        rank = int(differs[1])
        own = re.search(rf"(?m)^  (?:{RANKS}) .*In\[\d+\]:(\d+)", reply)
        for found in re.finditer(rf"(?m)^  {RANKS} (?:in \S+ )?at In\[\d+\]:(\d+)", reply):
            if rank in numbers(found[1]):
                own = found
        return rank, int(own[2])
    if left:
        return int(left[1]), None
    raised = re.search(r"raised (?:CollectiveMismatch|Deadlock) at line", reply)
    if "wait for each other" in reply and raised:
        first = re.findall(r"(?m)^  rank (\d+) in \S+ at In\[\d+\]:(\d+)", reply)
        places = {line for _, line in first}
        if len(places) > 1:
            return int(first[0][0]), int(first[0][1])
    culprit = re.search(
        rf"(?m)^{RANKS} \(.*?\) (?:raised \w+|died)(?:(?:, last seen)? at line (\d+))?", reply
    )
    if culprit is None:
        return None, 0
    ranks = numbers(culprit[1])
    return (min(ranks) if len(ranks) == 1 else None), int(culprit[2] or 0)


async def missed_bugs(agent):
    """Returns the bugs that the policy does not find, with what it found and the error."""
    missed = []
    await finish(agent, "1")
    for source, rank, line in BUGS:
        # A new rank has no variables.
        source = source.replace("np.", "__import__('numpy').")
        found = await find(agent, source)
        lines = line if isinstance(line, tuple) else (line,)
        if found[0] != rank or (line is not None and found[1] not in lines):
            missed.append((source, (rank, line), found, await agent("error")))
    return missed
