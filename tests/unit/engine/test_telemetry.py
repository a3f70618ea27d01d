"""When a rank tells the notebook what it does."""

from types import SimpleNamespace

import pytest

from allranks.collectives.calls.journal import Journal
from allranks.engine import telemetry
from allranks.engine.telemetry import Metrics, TelemetrySender
from allranks.records.ranks import RUNNING, WAITS, Activity
from allranks.records.telemetry import Pulse


class Rank:
    """A rank whose clock and waits the test sets."""

    def __init__(self, monkeypatch):
        self.now, self.current = 0.0, SimpleNamespace(doing=RUNNING, waits=None)
        monkeypatch.setattr(telemetry, "monotonic", lambda: self.now)
        monkeypatch.setattr(telemetry, "current_line", lambda: "In[1]:2 barrier()")
        monkeypatch.setattr(telemetry.world, "current", lambda: self.current)
        monkeypatch.setattr(telemetry, "importing", str)
        self.sender = TelemetrySender(
            1, Metrics(), Journal(SimpleNamespace(offset_seconds=0.0)), dict
        )

    def waits_for(self, ranks):
        doing = Activity(WAITS, "barrier", ranks) if ranks else RUNNING
        self.current.doing = doing

    def pulses(self, seconds):
        """The ranks for which it waits, by each pulse in so many tenths of a second."""
        found = []
        for _ in range(round(10 * seconds)):
            self.now += 0.1
            found += [
                one.doing.waits_for for one, _ in self.sender.news() if isinstance(one, Pulse)
            ]
        return found


@pytest.fixture
def rank(monkeypatch):
    return Rank(monkeypatch)


@pytest.mark.parametrize("others", ["rank 2", ""])
def test_a_tile_does_not_name_ranks_that_have_come(rank, others):
    rank.waits_for("ranks 0, 2")
    assert rank.pulses(0.4) == ["ranks 0, 2"]
    rank.waits_for(others)
    assert rank.pulses(0.2) == [others]


def test_a_rank_that_begins_to_wait_has_a_pulse_a_second(rank):
    assert rank.pulses(0.4) == [""]
    for _ in range(3):
        rank.waits_for("rank 0")
        rank.waits_for("")
        assert rank.pulses(0.2) == []
