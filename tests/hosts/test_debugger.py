"""The front end's debugger on eight ranks of two hosts."""

from __future__ import annotations

from tests.debugger import Debugger

SOURCE = """%%distributed
total = 0.0
for step in range(10):
    x = allreduce(float(step + rank), op=Sum)
    total += x
    y = total
    z = y
print(total)"""


def test_eight_ranks_on_two_hosts_make_fifty_steps_together(hosts, new_notebook):
    notebook = new_notebook()
    on = "--on ssh:h1:4,h2:4"
    assert notebook.on_ranks("import socket", on).status == "ok"
    debugger = Debugger(notebook)
    cell, pause = debugger.start(SOURCE, 2)
    for _ in range(50):
        pause = pause.step()
    places = set(debugger.lines(pause).values())
    assert (len(debugger.lines(pause)), len(places)) == (8, 1)
    pause.evaluate("%distributed debug -r 6")
    pause = debugger.pause()
    assert pause.evaluate("rank, socket.gethostname(), step") == "(6, 'h2', 9)"
    debugger.breakpoints(SOURCE)
    pause.go("continue")
    assert cell.wait().ok().text.endswith("ranks 0–7 │ 640.0\n")
    # No rank was lost.
    assert notebook.on_ranks("int(allreduce(1, op=Sum))").text.endswith("ranks 0–7 → 8\n")
    notebook.shutdown()
    # ipykernel keeps the folder for the debugger's cells.
    assert [one for one in hosts.left() if "ipykernel_" not in one] == []
