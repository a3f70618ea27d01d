"""What crosses the network between hosts: nothing that a notebook has said can be read there."""

from __future__ import annotations

import re
import socket
import struct
import subprocess
import time
import zlib
from collections import defaultdict
from contextlib import suppress
from itertools import permutations

import zmq

from tests.hosts.conftest import SSH

SECRETS = (
    *("s3cret in the source", "s3cret in the output", "s3cret that is pushed"),
    *("s3cret that fails", "s3cret in a call", "hunter2"),
    "barrier at In[",  # the state of a rank that waits
)
MPI_DATA = "MPI's data is in clear"
FAILING = """
import sys, numpy as np
print('s3cret ' + 'in the output')  # s3cret in the source
broadcast(np.frombuffer(b"MPI's data " + b"is in clear", 'u1'))
def check (hunter2):
    raise ValueError(hunter2)
if rank == 3: check (hunter2 := 's3cret ' + 'that fails')  # s3cret that fails
allreduce(np.ones(3), name='s3cret'[:1])  # s3cret in a call
"""
WAITING = """
import time
if rank == 2: time.sleep(99)  # s3cret in the source
barrier()  # s3cret in a call
"""
LISTENING = r"^LISTEN\s+\S+\s+\S+\s+(\S+):(\d+)\s"


def key_of(notebook):
    notebook.run("from allranks.cluster import cluster as held")
    return notebook.value("held.session.running.cells.connection._wire.key").strip("'")


def urls(notebook):
    found = "[wire.commands_url, wire.events_url]"
    return re.findall(
        r"tcp://([\d.]+):(\d+)",
        notebook.value(f"(wire := held.session.running.cells.connection._wire) and {found}"),
    )


def packets_of(capture):
    """The packets in a file of tcpdump, without their Ethernet headers, of IPv4."""
    at = 24
    while at + 16 <= len(capture):
        size = struct.unpack_from("<I", capture, at + 8)[0]
        packet = capture[at + 16 : at + 16 + size]
        at += 16 + size
        if packet[12:14] == b"\x08\x00":
            yield packet[14:]


def streams_of(packets):
    """What each TCP connection carried in each direction, and all other packets."""
    parts, others = defaultdict(dict), []
    for ip in packets:
        if ip[9] != socket.IPPROTO_TCP:
            others.append(ip)
            continue
        tcp = ip[4 * (ip[0] & 15) : int.from_bytes(ip[2:4])]
        if data := tcp[4 * (tcp[12] >> 4) :]:
            parts[ip[12:20] + tcp[:4]][int.from_bytes(tcp[4:8])] = data
    streams = [b"".join(data for _, data in sorted(found.items())) for found in parts.values()]
    return [*streams, *others]


def unpacked(stream):
    """The stream, and all that zlib has compressed in it."""
    found = [stream]
    for start in re.finditer(rb"\x78[\x01\x5e\x9c\xda]", stream):
        with suppress(zlib.error):
            found.append(zlib.decompressobj().decompress(stream[start.start() :]))
    return found


def test_a_capture_shows_no_source_output_value_or_key(hosts, new_notebook):
    captured = hosts.shared / "captured"
    watch = subprocess.Popen(
        hosts.between(["tcpdump", "-i", "br0", "-U", "-w", str(captured)]),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watch.stderr is not None
    while "listening on" not in watch.stderr.readline():
        pass
    notebook = new_notebook()
    _, output, pushed, *_ = SECRETS
    cell = notebook.on_ranks(FAILING, SSH)
    assert output in cell.text
    # Ranks of the other host find the source of the line.
    assert "at line 7: raise ValueError(hunter2) (raised ValueError). Correct the" in cell.text
    late = notebook.start_on_ranks(WAITING)
    late.wait_for("]:4: if rank == 2: time.sleep(99)  # s3cret in the source")
    notebook.interrupt()
    late.wait()
    notebook.run(f"word = {pushed!r}")
    notebook.run("%distributed push word")
    assert notebook.on_ranks("word", "-r 2").text == f"rank 2 → {pushed!r}\n"
    key = key_of(notebook)
    notebook.run("held.session.running.client()[:].push({'more': word})")
    time.sleep(0.5)  # what is captured is written a little later
    watch.terminate()
    watch.communicate()
    packets = [*packets_of(captured.read_bytes())]
    text = [part for stream in streams_of(packets) for part in unpacked(stream)]
    # By the last bytes of their addresses: the notebook's host, h1 and h2, each with each.
    pairs = {(ip[15], ip[19]) for ip in packets}
    assert {*permutations((10, 11, 12), 2)} <= pairs
    found = [w for w in (*SECRETS, key, MPI_DATA) if any(w.encode() in part for part in text)]
    assert found == [MPI_DATA]


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
    # Below those that the system gives to sockets that ask for none.
    notebook = new_notebook({"ALLRANKS_PORTS": "21000-21001"})
    notebook.on_ranks("rank", SSH).ok()
    notebook.run("from allranks.cluster import cluster as held")
    assert sorted(port for _, port in urls(notebook)) == ["21000", "21001"]
    cell = notebook.run(
        "from allranks import Cluster\nCluster(launcher='ssh:h1:2').start()  # no port is left"
    )
    assert "expected a free port between 21000 and 21001" in cell.error_value
    assert notebook.on_ranks("size").text == "ranks 0–3 → 4\n"
