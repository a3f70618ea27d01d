"""What crosses the network between hosts: nothing that a notebook has said can be read there."""

from __future__ import annotations

import re
import subprocess
import time

import zmq

from tests.hosts.conftest import SSH

SECRETS = ("s3cret in the source", "s3cret in the output", "s3cret that is pushed")
LISTENING = r"^LISTEN\s+\S+\s+\S+\s+(\S+):(\d+)\s"


def key_of(notebook):
    notebook.run("from allranks.cluster import cluster as held")
    return notebook.value("held.session.running._connection._wire.key").strip("'")


def urls(notebook):
    found = "[wire.commands_url, wire.events_url]"
    return re.findall(
        r"tcp://([\d.]+):(\d+)",
        notebook.value(f"(wire := held.session.running._connection._wire) and {found}"),
    )


def test_a_capture_shows_no_source_output_value_or_key(hosts, new_notebook):
    captured = hosts.shared / "captured"
    watch = subprocess.Popen(
        hosts.command("h1", ["tcpdump", "-i", "eth0", "-U", "-w", str(captured)]),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watch.stderr is not None
    while "listening on" not in watch.stderr.readline():
        pass
    notebook = new_notebook()
    source, output, pushed = SECRETS
    cell = notebook.on_ranks(f"print('s3cret ' + 'in the output')  # {source}", SSH)
    assert output in cell.text
    notebook.run(f"word = {pushed!r}")
    notebook.run("%distributed push word")
    assert notebook.on_ranks("word", "-r 2").text == f"rank 2 → {pushed!r}\n"
    key = key_of(notebook)
    notebook.run("held.session.running.client()[:].push({'more': word})")
    time.sleep(0.5)  # what is captured is written a little later
    hosts.on("h1", "pkill", "tcpdump")
    watch.communicate()
    text = captured.read_bytes()
    assert len(text) > 10_000
    assert [word for word in (*SECRETS, key) if word.encode() in text] == []


def test_the_notebook_listens_on_the_address_that_the_hosts_reach_for_who_has_its_key(
    hosts, notebook
):
    key, found = key_of(notebook), urls(notebook)
    assert [address for address, _ in found] == ["10.77.0.10", "10.77.0.10"]
    listed = re.findall(LISTENING, hosts.on("h0", "ss", "-ltn"), re.M)
    ours = {address for address, port in listed if port != "22"}
    assert ours == {"10.77.0.10", "127.0.0.1"}  # where the kernel itself listens
    other = zmq.curve_keypair()[0].decode()
    (address, port), _ = found
    for tried, heard in ((key, True), (other, False)):
        said = hosts.on(
            "h2",
            notebook.python,
            "-c",
            "import sys, zmq\n"
            "from zmq.utils.monitor import recv_monitor_message\n"
            "url, key, limit = sys.argv[1:]\n"
            "socket = zmq.Context().socket(zmq.DEALER)\n"
            "socket.linger = 0\n"
            "socket.curve_serverkey = key.encode()\n"
            "socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()\n"
            "monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)\n"
            "socket.connect(url)\n"
            "print(bool(monitor.poll(int(limit))), flush=True)\n"
            "import os; os._exit(0)",
            f"tcp://{address}:{port}",
            tried,
            "30000" if heard else "2000",
        )
        assert said == f"{heard}\n"
    assert notebook.on_ranks("size").text == "ranks 0–3 → 4\n"


def test_the_ports_that_the_notebook_listens_on_can_be_chosen(hosts, new_notebook):
    notebook = new_notebook({"ALLRANKS_PORTS": "41000-41001"})
    assert notebook.on_ranks("rank", SSH).status == "ok"
    notebook.run("from allranks.cluster import cluster as held")
    assert sorted(port for _, port in urls(notebook)) == ["41000", "41001"]
    cell = notebook.run(
        "from allranks import Cluster\nCluster(launcher='ssh:h1:2').start()  # no port is left"
    )
    assert "expected a free port between 41000 and 41001" in cell.error_value
    assert notebook.on_ranks("size").text == "ranks 0–3 → 4\n"
