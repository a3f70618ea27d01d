"""``allranks mcp`` as an agent uses it: a client of the protocol, which reads only the replies."""

from __future__ import annotations

import asyncio
import re
import sys
import threading

import psutil
import pytest

from allranks.cluster.options import ClusterOptions
from allranks.command import agents
from allranks.errors import MissingDependency
from tests.agents import BUGS, CALLS, LONGEST, finish, goes_on, missed_bugs, with_agent
from tests.fuzz.ranks import unfold
from tests.kernel import wait_until

NOT_A_NUMBER = """
import time
for step in range(25):
    time.sleep(0.05)
    log(step=step, loss=allreduce(1.0 if step < 20 else float("nan")))
"""


def no_values(reply):
    """Whether the ranks have not told their values yet."""
    return goes_on(reply) or "have not answered yet" in reply or "can be read between" in reply


@pytest.mark.replaces
def test_a_policy_finds_rank_and_line_of_seeded_bugs():
    async def act(agent):
        missed = await missed_bugs(agent)
        assert agent.length <= LONGEST
        # After all of them, ranks run.
        assert "rank 2" in await agent("run", source="print('rank', rank)")
        return missed

    assert len(BUGS) == 40
    assert with_agent(act) == []


def test_replies_are_short_and_go_on_and_values_are_compared():
    async def act(agent):
        fails = "class Fails:\n    def __repr__(self): raise ValueError"
        await finish(agent, f"{fails}\nx = rank // 2; fails = Fails()")
        part = await finish(agent, "for i in range(3000): print('line', i)")
        if "line 0" not in part:
            part = await agent("output")
        whole = ""
        more = r"(?s)(.*)\n… .*: call output with cell=(\d+) and offset=(\d+)$"
        while found := re.search(more, part):
            whole += found[1]
            part = await agent("output", cell=int(found[2]), offset=int(found[3]))
        lines = [f"line {i}" for i in range(3000)]
        assert unfold(whole + part) == dict.fromkeys(range(3), lines)
        while no_values(told := await agent("values", names="x, y, fails")):
            await asyncio.sleep(0.2)
        assert told == (
            "x on ranks 0–1: int 0\nx on rank 2: int 1\ny on ranks 0–2: not defined\n"
            "fails on ranks 0–2: Fails, of which repr() or shape raises ValueError"
        )
        assert "found '1x'" in await agent("values", names="1x")
        await finish(agent, "for _ in range(200): allreduce(1.0)")
        assert "allreduce" in await agent("timings")
        await finish(agent, NOT_A_NUMBER)
        assert (await agent("timings")).startswith("loss is NaN since step 20 on ranks 0–2. ")
        assert "expected one of" in await agent("error", cell=99)
        return agent.length

    assert with_agent(act) <= LONGEST


def test_every_tool_replies_while_ranks_hang():
    async def act(agent):
        replies = [await agent(tool, **arguments) for tool, arguments in CALLS]
        # Both calls of `run`: the second does not begin.
        assert [goes_on(reply) and "cell 2" not in reply for reply in replies[:2]] == [True, True]
        # Now or in a moment, also if the ranks have not started yet.
        while "have ended" not in await agent("restart"):
            await asyncio.sleep(0.2)
        await finish(agent, "print('fresh')")
        assert agent.length <= LONGEST
        return await agent("output")

    assert unfold(with_agent(act)) == {rank: ["fresh"] for rank in range(3)}


def test_cells_end_when_the_seconds_of_all_cells_are_used():
    async def act(agent):
        await finish(agent, "import time; time.sleep(60)")
        assert "timeout" in await agent("error")
        return await agent("run", source="1")

    assert "--seconds" in with_agent(act, "--seconds", "2")


LEAVES = """
import os, subprocess, threading, time
left = subprocess.Popen(["sleep", "600"])
threading.Thread(target=time.sleep, args=(600,)).start()
print("pids", os.getpid(), left.pid)
time.sleep(60)
"""


def test_what_cells_have_left_ends_with_the_seconds_of_all_cells():
    async def act(agent):
        await finish(agent, LEAVES)
        told = await agent("output", cell=1)
        found = [int(pid) for line in re.findall(r"pids (\d+) (\d+)", told) for pid in line]
        assert len(found) == 6
        while "the ranks have ended" not in await agent("state"):
            await asyncio.sleep(0.1)
        wait_until(lambda: not any(map(psutil.pid_exists, found)))
        assert "--seconds" in await agent("values", names="left")

    # In so many seconds the cell has told its processes.
    with_agent(act, "--seconds", "8")


def test_reading_values_is_a_part_of_the_seconds_of_all_cells():
    async def act(agent):
        slow = "import time\nclass Slow:\n    def __repr__(self): time.sleep(60)\nx = Slow()"
        await finish(agent, slow)
        await agent("values", names="x")
        while "the ranks have ended" not in await agent("state"):
            await asyncio.sleep(0.1)
        return await agent("run", source="1")

    assert "--seconds" in with_agent(act, "--seconds", "3")


def test_a_cluster_that_a_cell_starts_has_no_more_ranks_than_the_agent_gets():
    async def act(agent):
        await finish(agent, "from allranks import Cluster\nif rank == 0: Cluster(n=64)")
        return await agent("error")

    assert "expected at most 3 ranks, as ALLRANKS_MAX_RANKS allows here, found 64" in (
        with_agent(act)
    )


class Stuck:
    """A cluster that never answers, whatever it is asked."""

    def __init__(self):
        self.freed = threading.Event()

    def __getattr__(self, name):
        self.freed.wait()
        raise AttributeError(name)


def test_every_tool_replies_in_time_although_the_cluster_never_does(monkeypatch):
    assert agents.REPLY_SECONDS < 2
    monkeypatch.setattr(agents, "REPLY_SECONDS", 0.2)
    monkeypatch.setattr(agents, "_WAIT_SECONDS", 0.1)
    stuck = Stuck()
    tools = agents.AgentTools(ClusterOptions(2), 60)
    monkeypatch.setattr(tools, "_cluster", stuck)
    named = {tool.__name__: tool for tool in tools.tools()}
    replies = [(tool, named[tool](**arguments)) for tool, arguments in CALLS]
    stuck.freed.set()
    assert set(named) == {tool for tool, _ in CALLS}
    late = "expected {} to end within 0.2 s, found that it goes on. Call state"
    for tool, reply in replies:
        if tool in ("state", "interrupt", "restart"):
            assert late.format(tool) in reply
        else:
            assert reply


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    with pytest.raises(MissingDependency, match=r"pip install 'allranks\[mcp\]'$"):
        agents.serve(None)
