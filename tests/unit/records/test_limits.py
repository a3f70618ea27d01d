"""The order of the time limits: a process that waits for others waits longer than they do."""

from __future__ import annotations

import pytest

from allranks.records.limits import (
    ACTOR_SECONDS,
    ACTORS_SECONDS,
    ANSWERS_SECONDS,
    ATTACH_SECONDS,
    BEAT_SECONDS,
    EXIT_SECONDS,
    FIRST_SECONDS,
    FUNCTIONS_SECONDS,
    INTERRUPTED_SECONDS,
    LATE_SECONDS,
    LAUNCHER_SECONDS,
    LEASE_SECONDS,
    LONGEST_LEASE_SECONDS,
    NESTED_SECONDS,
    PORT_TEST_AFTER_SECONDS,
    PORT_TEST_SECONDS,
    PRELOAD_SECONDS,
    RANKS_EXIT_SECONDS,
    RELAY_STOP_SECONDS,
    RELEASES_SECONDS,
    REPEAT_SECONDS,
    REQUEST_SECONDS,
    SHORTEST_LEASE_SECONDS,
    SLOW_START_SECONDS,
    START_SECONDS,
    STOP_SECONDS,
    TERM_SECONDS,
    TRACKER_SECONDS,
    VISIT_SECONDS,
)

#: Each row rises: what waits has more time than what it waits for.
ORDER = {
    "a rank ends before its host agent kills it": (
        FUNCTIONS_SECONDS,
        EXIT_SECONDS,
        RANKS_EXIT_SECONDS,
    ),
    "a host agent ends before its relay kills it, and the rest before the notebook gives up": (
        RANKS_EXIT_SECONDS + TERM_SECONDS + NESTED_SECONDS,
        RELAY_STOP_SECONDS,
        RELAY_STOP_SECONDS + LAUNCHER_SECONDS + TRACKER_SECONDS,
        STOP_SECONDS,
    ),
    "a tracker outlives the processes that it serves": (TERM_SECONDS, TRACKER_SECONDS),
    "what a killed host agent has left ends as soon as a host agent": (
        LAUNCHER_SECONDS + TRACKER_SECONDS,
        RELAY_STOP_SECONDS,
    ),
    "an actor outlives its relay, and the process with the actors all of them": (
        RELAY_STOP_SECONDS + LAUNCHER_SECONDS + TRACKER_SECONDS,
        ACTOR_SECONDS,
        ACTORS_SECONDS,
    ),
    "hosts that cannot connect, and slow ranks, are named before a start fails": (
        PORT_TEST_AFTER_SECONDS + PORT_TEST_SECONDS,
        FIRST_SECONDS,
        SLOW_START_SECONDS,
        START_SECONDS,
        PRELOAD_SECONDS,
    ),
    "a host is late before the shortest lease ends": (
        BEAT_SECONDS,
        LATE_SECONDS,
        SHORTEST_LEASE_SECONDS,
        LEASE_SECONDS,
        LONGEST_LEASE_SECONDS,
    ),
    "a connection is made again before a lease ends": (
        BEAT_SECONDS,
        INTERRUPTED_SECONDS,
        SHORTEST_LEASE_SECONDS,
    ),
    "a notebook answers before another one gives up": (
        ANSWERS_SECONDS,
        RELEASES_SECONDS,
        VISIT_SECONDS,
    ),
    "a host agent reads a request before its visitor gives up": (REQUEST_SECONDS, VISIT_SECONDS),
    "an attach is tried often": (20 * REPEAT_SECONDS, ATTACH_SECONDS),
}


@pytest.mark.parametrize("why", ORDER)
def test_who_waits_has_more_time_than_what_it_waits_for(why):
    limits = ORDER[why]
    assert sorted(set(limits)) == list(limits)
