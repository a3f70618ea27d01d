"""Communicators of simulated ranks, compared with those of real ranks."""

from __future__ import annotations

from tests.features.communicators import PROGRAM


def test_every_way_to_make_a_communicator_gives_what_it_gives_on_real_ranks(notebook):
    notebook.run("%distributed restart -n 4")
    real = notebook.on_ranks(PROGRAM, "-o real")
    assert real.status == "ok", real.text
    simulated = notebook.on_ranks(PROGRAM, "-n 4 --simulate -o simulated")
    assert simulated.status == "ok", simulated.text
    differ = notebook.run(
        "for name in real[0]:\n"
        "    for rank in range(4):\n"
        "        if real[rank][name] != simulated[rank][name]:\n"
        "            print(name, rank, real[rank][name], simulated[rank][name])\n"
        "print(len(real[0]), sum('Error' in str(one) for one in real[0].values()))"
    )
    assert differ.text == "26 0\n"
