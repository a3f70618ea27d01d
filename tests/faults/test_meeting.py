"""Who a rank is and where the ranks meet stands in its environment, whoever has started them."""

import json
import re
import sys
import textwrap

from tests.mpi.launch import mpiexec

ASK = """
import os
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
mine = [os.environ.get(name) for name in names]
"""
LISTEN = """
import os, socket
if rank == 0:
    with socket.socket() as asked:
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        asked.bind(("", int(os.environ["MASTER_PORT"])))
        asked.listen()
"""


def check(told, size):
    assert [one[:4] for one in told] == [[str(r), str(size)] * 2 for r in range(size)]
    assert {one[4] for one in told} == {"127.0.0.1"}
    ports = {one[5] for one in told}
    assert len(ports) == 1
    assert 1024 < int(ports.pop()) < 65536


def asked(notebook):
    source = f"{ASK}\nimport json\nevery = allgather_object(mine)\nprint(json.dumps(every))"
    return json.loads(re.search(r"│ (.*)\n", notebook.on_ranks(source).text)[1])


def test_ranks_know_who_they_are_and_where_to_meet(notebook):
    """What the notebook's environment says of ranks would be a lie; a place that it names stays."""
    notebook.run("%env RANK=0\n%env WORLD_SIZE=1\n%env MASTER_PORT=1234")
    notebook.run("%distributed restart -n 2")
    assert [one[:2] + one[5:] for one in asked(notebook)] == [
        ["0", "2", "1234"],
        ["1", "2", "1234"],
    ]
    notebook.run("import os; del os.environ['MASTER_PORT']\n%distributed restart")
    check(asked(notebook), 2)
    # The port is kept from others, and is there for who asks for it.
    assert notebook.on_ranks(LISTEN).status == "ok"
    assert notebook.on_ranks("raise ValueError").status == "error"
    check(asked(notebook), 2)
    # Each member of an ensemble is a world of its own.
    notebook.run(f"%%ensemble x=0:2\n{ASK}\nresult = mine").ok()
    assert notebook.value("[run.result[:4] for run in runs]") == str([["0", "1"] * 2] * 2)
    assert notebook.value("len({run.result[5] for run in runs})") == "2"
    check(asked(notebook), 2)
    notebook.run("del os.environ['RANK'], os.environ['WORLD_SIZE']")


def test_a_script_under_mpiexec_is_told_by_init(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        ASK
        + textwrap.dedent("""
        import json
        import allranks.collectives as c
        assert mine[0] is None
        c.init()
        mine = [os.environ.get(name) for name in names]
        every = c.allgather_object(mine)
        if c.rank() == 0:
            print(json.dumps(every))
        """)
    )
    ended = mpiexec(2, str(script), python=sys.executable)
    assert ended.returncode == 0, ended.stdout
    check(json.loads(ended.stdout.splitlines()[-1]), 2)
