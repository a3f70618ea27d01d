"""A seed decides everything."""

from __future__ import annotations

from typing import Any

from tests.simulated.scenarios import Simulator
from tests.simulated.stages import run_on_model

_SCENARIO = "test_lost_hosts_are_named_and_every_cell_ends"


def test_a_seed_does_the_same_in_another_process(simulator: Simulator) -> None:
    other = Simulator()
    try:
        assert simulator.results(_SCENARIO, 7, 3) == other.results(_SCENARIO, 7, 3)
    finally:
        other.close()


def test_seeds_differ(simulator: Simulator) -> None:
    first, second = simulator.results(_SCENARIO, 7, 2)
    assert first["faults"] != second["faults"]


def test_a_server_leaves_clients_of_the_same_name_in_the_order_in_which_they_came() -> None:
    def trace(stage: Any) -> list[str]:
        stage.world.tracing = True
        server = stage.process().socket("ROUTER").bind(url := stage.url())
        clients = [stage.process().events_socket("DEALER", IDENTITY=b"one") for _ in range(12)]
        for client in clients:
            client.connect(url).events_until("HANDSHAKE_SUCCEEDED")
        server.process.kill()
        for client in clients:
            client.events_until("DISCONNECTED")
        found: list[str] = stage.world.trace
        return found

    assert run_on_model(trace) == run_on_model(trace)
