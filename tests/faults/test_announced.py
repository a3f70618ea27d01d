"""ipyparallel's own tools find the ranks by the files that they look for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernel import wait_until


@pytest.fixture
def ipython(notebook):
    return notebook.cwd / ".ipython"


def files(ipython, count):
    def found():
        return sorted(ipython.glob("profile_*/security/*.json"))

    wait_until(lambda: len(found()) == count, lambda: f"{count} files, found {found()}", 60)
    return found()


def listed(ipython):
    """Runs ``ipcluster list``, and returns what it found."""
    ipcluster = Path(sys.executable).with_name("ipcluster")
    done = subprocess.run(
        [ipcluster, "list", "-o", "json"],
        env={"IPYTHONDIR": str(ipython)},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


def test_ipyparallel_lists_the_cluster_and_clients_here_and_elsewhere_find_the_ranks(
    notebook, ipython
):
    found = files(ipython, 3)
    assert [file.name for file in found] == [
        "cluster-.json",
        "ipcontroller-client.json",
        "ipcontroller-engine.json",
    ]
    assert {file.stat().st_mode & 0o777 for file in found} == {0o600}  # for this user alone
    (found,) = listed(ipython)
    (ranks,) = found["engines"]["sets"].values()
    assert (ranks["n"], found["controller"]["state"]["state"]) == (4, "running")
    notebook.run("import ipyparallel as ipp")
    for client in ("ipp.Client()", "ipp.Cluster.from_file().connect_client_sync()"):
        assert notebook.value(f"(found := {client}).ids") == "[0, 1, 2, 3]"
        assert notebook.value("found[:].pull('kept', block=True)") == "[0, 10, 20, 30]"
        notebook.run("found.close()")
    other = "import ipyparallel as ipp; print(ipp.Client()[3].pull('kept', block=True))"
    done = subprocess.run(
        [sys.executable, "-c", other], env={"IPYTHONDIR": str(ipython)}, capture_output=True
    )
    assert done.stdout == b"30\n", done.stderr


def test_a_client_is_one_of_this_notebooks_ranks_and_of_no_others(notebook, ipython, new_notebook):
    files(ipython, 3)
    other = new_notebook(env={"IPYTHONDIR": str(ipython)})
    other.run("%load_ext allranks\nimport ipyparallel as ipp")
    cell = other.run("ipp.Client()")
    assert cell.error_name == "UsageError"
    assert "expected ranks of this notebook, found none. Type: %distributed start" in cell.text
    file = ipython / "profile_default" / "security" / "ipcontroller-client.json"
    assert f"ipp.Client('{file}')  4 ranks of " in cell.text
    theirs = other.run("(found := ipp.Cluster.from_file().connect_client_sync()).ids")
    assert "[0, 1, 2, 3]" in theirs.text
    assert "The client has the ranks of " in theirs.text
    other.run("found.close()")
    other.on_ranks("kept = rank + 7", "-n 2")
    assert other.value("(found := ipp.Client()).ids") == "[0, 1]"
    assert other.value("found[:].pull('kept', block=True)") == "[7, 8]"
    other.run("found.close()")


def test_a_second_cluster_has_a_name_of_its_own_and_leaves_the_first(notebook, ipython):
    notebook.run("import allranks; second = allranks.Cluster(1).start()")
    files(ipython, 6)
    first, second = sorted(listed(ipython), key=lambda found: found["cluster"]["cluster_id"])
    assert (first["cluster"]["cluster_id"], second["cluster"]["n"]) == ("", 1)
    name = second["cluster"]["cluster_id"]
    assert notebook.value(f"(found := ipp.Client(cluster_id={name!r})).ids") == "[0]"
    notebook.run("found.close(); second.stop()")
    assert len(listed(ipython)) == 1


def test_the_files_go_with_the_ranks_and_those_of_others_stay(notebook, ipython):
    """Those that a dead kernel has left are removed: tests/unit/features/test_keeper.py."""
    client = ipython / "profile_default" / "security" / "ipcontroller-client.json"
    files(ipython, 3)
    # They go also while what the kernel has forked lives on.
    notebook.run(
        "import multiprocessing, time\n"
        "forked = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))\n"
        "forked.start()"
    )
    notebook.run("%distributed stop").ok()
    files(ipython, 0)
    assert notebook.value("forked.is_alive()") == "True"
    notebook.run("forked.kill(); forked.join()")

    client.write_text("somebody else's")
    try:
        notebook.on_ranks("rank", "-n 1")
        assert client.read_text() == "somebody else's"
        files(ipython, 4)
        assert listed(ipython)[0]["cluster"]["cluster_id"].startswith("allranks-")
        notebook.run("%distributed stop")
        assert client.read_text() == "somebody else's"
    finally:
        client.unlink()
