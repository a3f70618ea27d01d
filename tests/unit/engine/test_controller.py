"""ipyparallel's controller as the host agent runs it."""

import json
import subprocess
import sys
import time

import zmq
from ipyparallel.engine.app import Heart
from jupyter_client.session import Session

from allranks.engine import ipp

CONTROLLER = """
import json, sys
from allranks.engine import ipp
engine, client = json.loads(sys.argv[1])
ipp.run(engine, client, "", sys.argv[2], 1, lambda: print("complete", flush=True))
"""


def test_an_engine_whose_heart_is_heard_before_its_registration_is_registered(tmp_path):
    engine, client, _, held = ipp.connection_info()
    words = [sys.executable, "-c", CONTROLLER, json.dumps([engine, client]), str(tmp_path)]
    ended = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    identity = b"an-engine"
    context = zmq.Context()
    registrar = context.socket(zmq.DEALER)
    try:
        ping, pong = (f"{engine['interface']}:{engine[name]}" for name in ("hb_ping", "hb_pong"))
        Heart(ping, pong, heart_id=identity).start()
        registrar.setsockopt(zmq.IDENTITY, identity)
        registrar.setsockopt(zmq.LINGER, 0)
        registrar.connect(f"{engine['interface']}:{engine['registration']}")
        session = Session(key=engine["key"].encode())
        # The controller must be there, or the registration would wait in the socket as well.
        session.send(registrar, "connection_request")
        assert registrar.poll(30_000)
        time.sleep(10 * ipp.HEARTBEAT_MS / 1000)
        content = {"uuid": identity.decode(), "id": 0}
        session.send(registrar, "registration_request", content=content)
        assert ended.stdout.readline() == "complete\n"
    finally:
        for place in held:  # until now, so that no other program has taken the ports
            place.close()
        ended.kill()
        ended.wait()
        ended.stdout.close()
        context.destroy(linger=0)
