"""What a user finds with Tab."""

from __future__ import annotations

import allranks


def test_a_cluster_shows_what_is_for_its_users() -> None:
    found = [name for name in dir(allranks.Cluster(2)) if not name.startswith("_")]
    assert found == [
        "busy", "call", "can_heal", "client", "dead", "explain", "gpus", "heal", "heal_when",
        "healing", "interrupt", "launcher", "log_dir", "lost_because", "map", "preload", "pull",
        "push", "restart", "run", "size", "start", "state", "status", "stop",
    ]  # fmt: skip
