"""How soon the tools of ``allranks mcp`` reply while ranks hang, and how long their replies are.

Also how many of 40 bugs a script finds from these replies.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks import report, results
from tests.agents import BUGS, CALLS, finish, missed_bugs, with_agent

PAGE = Path(__file__).resolve().parent.parent / "docs" / "agents.md"
ROUNDS = 5


def main() -> None:
    """Measures, writes ``results/agents.json`` and the figures of docs/agents.md."""
    described = results.machine()
    rounds = []
    for _ in range(ROUNDS):
        seconds, length = with_agent(_hang)
        rounds.append({"seconds": seconds, "length": length})
    began = time.perf_counter()
    missed, slowest, length = with_agent(_find)
    bugs = {
        "bugs": len(BUGS),
        "found": len(BUGS) - len(missed),
        "seconds": time.perf_counter() - began,
        "slowest": slowest,
        "length": length,
        "missed": [[source, found] for source, _, found, _ in missed],
    }
    result = results.write("agents", described, {"hanging": rounds, "policy": bugs})
    figures = section(result)
    PAGE.write_text(report.insert(PAGE.read_text(), figures))
    print(figures)


async def _hang(agent: Any) -> tuple[dict[str, float], int]:
    await finish(agent, "1")  # the ranks start
    agent.seconds.clear()
    for tool, arguments in CALLS:
        await agent(tool, **arguments)
    return agent.seconds, agent.length


async def _find(agent: Any) -> tuple[list[Any], dict[str, float], int]:
    missed = await missed_bugs(agent)
    return missed, agent.seconds, agent.length


def section(result: dict[str, Any]) -> str:
    rounds, policy = result["hanging"], result["policy"]
    rows = []
    for tool in dict.fromkeys(tool for tool, _ in CALLS):
        seconds = max(one["seconds"][tool] for one in rounds)
        rows.append([f"`{tool}`", f"{seconds:.2f}"])
    table = results.markdown(["tool", "slowest reply, s"], rows)
    longest = max(policy["length"], *(one["length"] for one in rounds))
    return (
        f"{table}\n\nOne of three ranks computes and ignores interrupts; each tool is called in "
        f"{len(rounds)} rounds.\n\n"
        "A script that reads only these replies found the rank and the line of "
        f"{policy['found']} of {policy['bugs']} bugs: exceptions, deaths, calls that differ, "
        "missing calls, ranks that do not arrive, messages. The slowest reply took "
        f"{max(policy['slowest'].values()):.2f} s, and the longest had {longest:,} characters.\n\n"
        f"Measured {result['date']} on {results.sentence(result['machine'])}. Load of the machine "
        f"before: {result['machine']['load_before'][0]:.1f}."
    )
