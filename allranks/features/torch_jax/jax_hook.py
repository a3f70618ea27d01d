"""Makes `jax.distributed` wait as a call of allranks, and survive the death of a rank:
wraps `initialize` and `shutdown` once a cell has imported JAX.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

from allranks import rendezvous
from allranks.collectives import world
from allranks.collectives.calls.specs import Spec
from allranks.errors import UsageError
from allranks.features.torch_jax import calls

#: JAX's environment variable for its option `_OPTION`; a user's value stays.
_SETTING, _OPTION = "JAX_ENABLE_RECOVERABILITY", "jax_enable_recoverability"
_state: Any = None
#: Services of rank 0 that JAX uses no more.
_services: list[Any] = []


def wrap(distributed: ModuleType) -> None:
    """Wraps the functions of ``jax._src.distributed``. Works once."""
    global _state
    state = distributed.State
    if _state is None and hasattr(state, "initialize") and hasattr(state, "shutdown"):
        _state = distributed.global_state
        state.initialize = _initializing(state.initialize)
        state.shutdown = _shutting_down(state.shutdown)


def survives_deaths() -> bool:
    """Whether JAX lets this process live when another one has died."""
    return bool(getattr(getattr(sys.modules.get("jax"), "config", None), _OPTION, False))


def _initializing(own: Any) -> Any:
    @wraps(own)
    def initialize(
        self: Any, coordinator_address: str | None = None, num_processes: int | None = None,
        *args: Any, **options: Any,
    ) -> Any:  # fmt: skip
        if world.exists() and num_processes is not None:
            _check_size(coordinator_address, num_processes)
        # Other worlds, for instance of some ranks only, are JAX's own affair.
        if world.exists() and num_processes in (None, world.current().size):
            # JAX's own wait for the other ranks hears no interrupt.
            _meet()
            # Only now: a rank that is still connected to the old service would be aborted.
            while _services:
                _services.pop().shutdown()
            _meet()  # no rank connects to the service before
            if _SETTING not in os.environ:
                _survive_deaths()
        with _listening_at(coordinator_address):
            done = own(self, coordinator_address, num_processes, *args, **options)
        if world.exists() and self.process_id == world.current().rank:
            world.current().needs = 0  # JAX aborts this process if it loses the service there
        return done

    return initialize


@contextmanager
def _listening_at(address: str | None) -> Iterator[None]:
    """Within, JAX's service of rank 0 would listen at this address."""
    ours, bind = os.environ.get(rendezvous.JAX_ADDRESS, ""), os.environ.get(rendezvous.JAX_BIND, "")
    # JAX prefers the variable to the port that is passed: the ranks would wait for ever.
    if not address or address == ours or bind.rpartition(":")[2] != ours.rpartition(":")[2]:
        yield
        return
    host, _, port = address.rpartition(":")
    local = host in ("localhost", "127.0.0.1")
    os.environ[rendezvous.JAX_BIND] = f"{'127.0.0.1' if local else '[::]'}:{port}"
    try:
        yield
    finally:
        os.environ[rendezvous.JAX_BIND] = bind


def _shutting_down(own: Any) -> Any:
    @wraps(own)
    def shutdown(self: Any) -> Any:
        # With the service JAX would abort the ranks that are not shut down yet.
        if self.service is not None and survives_deaths():
            _services.append(self.service)
            self.service = None
        if world.exists():
            world.current().needs = -1
        return own(self)

    return shutdown


def _check_size(address: str | None, processes: int) -> None:
    this = world.current()
    text = f"num_processes={processes}, and there are {this.size} ranks"
    if processes > this.size and address in (None, os.environ.get(rendezvous.JAX_ADDRESS)):
        raise UsageError(
            f"jax.distributed.initialize needs the number of ranks: found {text}. Leave "
            f"num_processes= out, or type: %distributed start -n {processes}"
        )
    if processes > this.size:
        this.notice(
            f"JAX waits for {text}: it waits until others join, and takes no interrupt. If none "
            "shall, leave num_processes= and process_id= out."
        )


def _meet() -> None:
    this = world.current()
    this.run(calls.make(this.groups[0], Spec("jax.distributed.initialize"), 0))


def _survive_deaths() -> None:
    config: Any = sys.modules["jax"].config
    if hasattr(config, _OPTION):
        config.update(_OPTION, True)
