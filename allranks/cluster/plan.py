"""What the process is told that starts the ranks: where, with which command, and what they get."""

from __future__ import annotations

import os

from allranks.cluster import folders
from allranks.cluster.devices import HIDDEN
from allranks.cluster.launchers.addresses import ANY_PORTS, LOOPBACK, ports
from allranks.cluster.launchers.launcher import MultiHostLauncher
from allranks.cluster.launchers.mpiexec import LASTING, LASTING_SETTINGS
from allranks.cluster.launchers.registry import AnyLauncher
from allranks.cluster.wire import Deliver, DeliverUnread, Wire
from allranks.errors import StartFailed
from allranks.records.config import NurseryConfig


def plan(
    launcher: AnyLauncher,
    size: int,
    gpus: tuple[str, ...],
    preload: tuple[str, ...],
    kept_dirs: tuple[str, ...],
    deliver: Deliver,
    unread: DeliverUnread,
) -> tuple[Wire, NurseryConfig]:
    """Opens the notebook's wire; returns it, and what the nursery is to bring up behind it.

    Args:
        launcher: what starts the ranks.
        size: how many ranks.
        gpus: ``CUDA_VISIBLE_DEVICES`` values to pin them to, or none.
        preload: modules that they begin with.
        kept_dirs: the folders of what they keep.
        deliver: called, in a thread of the wire's, with each record that comes.
        unread: called there with what was wrong with one that cannot be read.

    Raises:
        StartFailed: the working folder has been removed.
    """
    command: list[str] = []
    address, allowed, place = LOOPBACK, ANY_PORTS, ""
    heals = False
    if isinstance(launcher, MultiHostLauncher):
        address, allowed, place = launcher.address(), ports(), "/tmp"
    else:
        command = launcher.command(size)
        heals = launcher.heals(size) and set(gpus) <= {HIDDEN}
    environment = launcher.environment()
    if heals:
        command[1:1] = LASTING
        environment |= LASTING_SETTINGS
    work_dir = _work_folder()
    log_dir = folders.make_log_folder()
    session_dir = folders.name_session_folder(place)
    wire = Wire(deliver, unread, address, allowed)
    config = NurseryConfig(
        size=size,
        launch=tuple(command),
        environment=environment,
        session_dir=session_dir,
        log_dir=log_dir,
        work_dir=work_dir,
        devices=gpus,
        commands_url=wire.commands_url,
        events_url=wire.events_url,
        wire_key=wire.key,
        preload=preload,
        heals=heals,
        kept_dirs=kept_dirs,
        rank_variables=launcher.rank_variables,
    )
    return wire, config


def _work_folder() -> str:
    """Returns the folder in which the ranks run: the notebook's own.

    Raises:
        StartFailed: it has been removed.
    """
    try:
        return os.getcwd()
    except OSError as error:
        raise StartFailed(
            f"expected a working folder, found that it has been removed: {error}. Type: %cd ~"
        ) from error
