"""A state of a rank that the notebook has no feature for."""

from __future__ import annotations

from allranks.cluster.failures import read_status
from allranks.features.toolbar.groups import rows, summary
from allranks.records.ranks import Activity, ActivityState
from allranks.records.telemetry import Pulse
from allranks.records.wire import Answer, decode, encode
from allranks.widgets.dashboard.cell_model import Tiles
from tests.widgets.test_stores import hello


def test_a_state_that_only_the_rank_knows_is_shown_alike_everywhere() -> None:
    """As that of a feature that the notebook lacks."""
    doing = Activity(ActivityState("asleep", "☾", "bad", is_named=True), "asleep in a cave")
    pulse, _ = decode(encode(Pulse(1, 1, doing, "In[1]:2", 1 << 20, 5)))
    answer, _ = decode(encode(Answer(1, 1, {"doing": doing, "rss_nbytes": 0, "line": ""}, "")))
    assert isinstance(pulse, Pulse)
    assert isinstance(answer, Answer)
    tiles = Tiles([hello(0), hello(1)])
    tiles.take(pulse)
    found = {name: tiles.everything()[1][name] for name in ("state", "mark", "look", "doing")}
    assert found == {"state": "asleep", "mark": "☾", "look": "bad", "doing": "asleep in a cave"}
    status = read_status(hello(1), answer.content)
    assert (status.state, tiles.said()) == ("asleep in a cave", "1 running, rank 1 asleep")
    (row,) = rows([status])
    assert (row["state"], row["detail"], row["is_bad"]) == ("asleep", "in a cave", True)
    assert summary([status]) == "rank 1 asleep"
