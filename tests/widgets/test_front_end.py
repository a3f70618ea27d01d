"""Which front ends are known to change displays in place."""

import pytest

from allranks.widgets.text import shows_updates


def request(allow_stdin=True, kind="execute_request", **metadata):
    return {
        "header": {"msg_type": kind},
        "metadata": metadata,
        "content": {"allow_stdin": allow_stdin},
    }


@pytest.mark.parametrize(
    "known",
    [
        request(cellId="5e1a", recordTiming=False),
        request(deletedCells=[]),
        request(allow_stdin=False),
        {"header": {"msg_type": "comm_msg"}, "metadata": {}, "content": {"data": {}}},
    ],
    ids=["JupyterLab", "older JupyterLab", "nbclient", "a button"],
)
def test_a_notebook_is_known(known):
    assert shows_updates(known)


@pytest.mark.parametrize("unknown", [request(), {}], ids=["qtconsole", "no request"])
def test_what_is_not_known_is_given_lines(unknown):
    assert not shows_updates(unknown)
