"""The time limits of a start, a stop, a lease and an attach, in seconds.

A process that waits for others waits longer than they do. Otherwise it kills them while they end
their own processes and remove their files. `tests/unit/records/test_limits.py` checks the order.
Limits that concern one step of one file are in that file.
"""

from __future__ import annotations

# A stop, from a rank to the notebook.

#: The exit functions of a rank, and with them what its files hold back.
FUNCTIONS_SECONDS = 1.5
EXIT_SECONDS = 2.0
#: The host agent waits for ranks that end by themselves, and for other processes after a signal.
RANKS_EXIT_SECONDS = 2.5
TERM_SECONDS = 0.2
#: A tracker of multiprocessing ends with the last process that it serves.
TRACKER_SECONDS = 1.0
#: MPI's launcher, after the host agent was killed. It removes MPI's files in shared memory.
LAUNCHER_SECONDS = 4.0
#: The host agents of clusters that ranks have started.
NESTED_SECONDS = 5.0
#: The relay of a host waits for its host agent; if it has to kill it, then for what that has left.
RELAY_STOP_SECONDS = 8.0
#: The notebook and the caretaker wait for all hosts.
STOP_SECONDS = 14.0
#: Commands that have started relays, such as ssh, after the relays have ended.
COMMANDS_SECONDS = 2.0
#: An actor of Dask or Ray waits for its relay, and the notebook for the process with the actors.
ACTOR_SECONDS = 16.0
ACTORS_SECONDS = 18.0

# A start.

#: For the connections between hosts, from the test of which hosts can connect to each other.
PORT_TEST_SECONDS = 2.5
#: Ranks come sooner. The test disturbs nothing if they are only slow.
PORT_TEST_AFTER_SECONDS = 8.0
#: For a host to connect to the notebook at first.
FIRST_SECONDS = 15.0
#: A rank that takes longer to come up writes the line that it is at into its log.
SLOW_START_SECONDS = 30.0
#: For all ranks, and more for each of them.
START_SECONDS = 60.0
PRELOAD_SECONDS = 120.0

# A lease.

BEAT_SECONDS = 1.0
#: A host that misses heartbeats for this time is probably cut off. If nothing else happens, it has
#: the rest of the lease to come back.
LATE_SECONDS = 4.0
#: A connection is made again if nothing is acknowledged for this long.
INTERRUPTED_SECONDS = 4.0
#: Without a heartbeat for the lease, notebook and host count each other as lost.
LEASE_SECONDS = 30.0
SHORTEST_LEASE_SECONDS, LONGEST_LEASE_SECONDS = 5.0, 250.0

# An attach.

#: Ranks without a notebook look for one twice as often.
REPEAT_SECONDS = 0.5
#: The request of a visitor arrives at the host agent.
REQUEST_SECONDS = 1.0
#: The notebook that holds the ranks answers, and releases the ranks.
ANSWERS_SECONDS = 5.0
RELEASES_SECONDS = 10.0
#: All ranks answer the notebook that attaches.
ATTACH_SECONDS = 20.0
#: On one machine, ranks that join with new ones answer when they have: one try to replace up to
#: four ranks takes less.
REPLACED_SECONDS = 60.0
#: A host agent answers. A machine that stands still must not make ranks seem to have ended.
VISIT_SECONDS = 20.0
#: The caretaker is ready.
CARETAKER_SECONDS = 60.0
