"""The folder of a cluster's logs."""

from __future__ import annotations

import os
import tempfile
import time

from allranks import own_files

#: Names another folder for the logs.
FOLDER = "ALLRANKS_LOG_DIR"


def make_log_folder() -> str:
    """Returns a new folder, mode 0700, for the logs of one cluster.

    It lies under ``$ALLRANKS_LOG_DIR``, else ``~/.local/state/allranks``, or the temporary folder
    if the home is read-only. A place in which other users can exchange folders is left out. Logs
    older than seven days are removed.
    """
    for place in filter(None, [os.environ.get(FOLDER), state_folder()]):
        try:
            # Once: a link on the way could lead elsewhere later.
            real = os.path.realpath(place)
            if own_files.exposed_part(place) or own_files.exposed_part(real):
                continue
            own_files.make_folders(real)
            # Again: another user could have been faster.
            if own_files.exposed_part(real):
                continue
            return _new_logs(real)
        except OSError:
            continue
    return _new_logs(own_files.temporary_folder("logs"))


def _new_logs(place: str) -> str:
    own_files.remove_old_logs(place)
    return tempfile.mkdtemp(prefix=time.strftime(own_files.LOGS_TIME), dir=place)


def refused_log_folder() -> str:
    """Returns why the usual folder of the logs is not used, in one line; "" if it is."""
    named, state = os.environ.get(FOLDER, ""), state_folder()
    exposed, there = _exposed(named or state), _exposed(state)
    if not exposed:
        return ""
    return (
        f"The logs are not in {f'{FOLDER}={named}' if named else state}, because other users can "
        f"write to {exposed}. They are in {'the temporary folder' if there else state}"
    )


def _exposed(place: str) -> str:
    try:
        return own_files.exposed_part(place)
    except OSError:  # this user cannot look there: the logs are elsewhere
        return ""


def state_folder() -> str:
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(
        os.path.expanduser("~"), ".local/state"
    )
    return os.path.join(state, "allranks")
