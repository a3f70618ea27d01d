"""What messages and collectives cost on a named network."""

from __future__ import annotations

import pytest

from allranks.errors import UsageError
from allranks.features.simulate.calibration import NBYTES, PRODUCTS, at_size, summary
from allranks.features.simulate.cores import SharedCores
from allranks.features.simulate.events import RankEvent
from allranks.features.simulate.network import HERE, NETWORKS, check_name, network_of
from allranks.features.simulate.notebook import as_time, time_line
from allranks.features.simulate.records import SimulatedTime
from allranks.features.simulate.times import time_records
from allranks.lessons.model import HGX_H100, P100_25GBE
from allranks.records.telemetry import Strip, Timings

MB = 10**6


def test_ranks_of_a_host_are_not_slowed_down_by_the_network():
    network = network_of({"network": "ethernet"})
    assert network.arrival(0, 7, MB, 1.0) == pytest.approx(1.0 + 1e-6 + MB / 5e9)
    assert network.hosts(10) == (0,) * 8 + (1,) * 2


def test_messages_of_one_host_to_another_share_its_link():
    network = network_of({"network": "ethernet"})
    arrivals = [network.arrival(rank, 8 + rank, MB, 0.0) for rank in range(8)]
    one = MB / 1.25e9
    assert arrivals == pytest.approx([25e-6 + (at + 1) * one for at in range(8)])
    # Another cell begins with an idle network.
    fresh = network_of({"network": "ethernet"})
    assert fresh.arrival(0, 8, MB, 0.0) == pytest.approx(arrivals[0])


def test_hosts_below_a_switch_share_its_links_where_they_are_oversubscribed():
    network = network_of({"network": "fat-tree"})
    far = 8 * network.hosts_each  # the first rank below the next switch
    crossing = [network.arrival(8 * host, far + 8 * host, MB, 0.0) for host in range(16)]
    near = network_of({"network": "fat-tree"}).arrival(0, 8, MB, 0.0)
    # Sixteen hosts together have four times less bandwidth than alone.
    assert max(crossing) - 2e-6 == pytest.approx(4 * (near - 2e-6), rel=0.25)


def test_the_links_of_gpus_are_those_of_the_cost_model():
    for name, fabric in (("h100", HGX_H100), ("p100", P100_25GBE)):
        network = NETWORKS[name]
        latency = fabric.protocols[0].latency["ring"]
        assert network.inside.bandwidth == fabric.inside_bandwidth
        assert network.inside.latency == latency.inside
        assert network.between is not None
        assert network.between.bandwidth == fabric.between_bandwidth
        assert network.between.latency == latency.between


def test_an_allreduce_costs_more_on_more_ranks_and_between_hosts():
    network = network_of({"network": "ethernet"})
    seconds = [
        network.collective_seconds("allreduce", MB, tuple(range(n))) for n in (1, 2, 8, 16, 1024)
    ]
    assert seconds[0] == 0.0
    assert seconds == sorted(seconds)
    assert seconds[3] > 8 * seconds[2]


def times_of(cost, hosts=(0.0, 0.0, 1.0, 1.0)):
    """The times that a rank would measure, if a call of so many bytes costs so much, an object
    twice as much, and computing takes three times as long on all ranks at once."""
    found = {
        (f"{kind}{of}", nbytes): [factor * cost(nbytes)] * 5
        for kind in ("inside", "allreduce", *(("between",) if len(set(hosts)) > 1 else ()))
        for of, factor in (("", 1), (" objects", 2))
        for nbytes in NBYTES
    }
    kind = f"compute {hosts.count(hosts[0])}"
    found |= {(kind, count): [1e-6 + 3 * count * 1e-3] * 5 for count in PRODUCTS}
    found |= {("alone", 0): [1e-3] * 5, ("barrier", 0): [1e-6] * 5}
    return found | {("hosts", 0): hosts, ("machines", 0): hosts}


def network_here(found, size):
    return network_of({"network": HERE, "measured": at_size(found, size)})


def test_measured_times_are_those_of_the_network_here():
    def cost(nbytes):
        return 2e-6 + nbytes / 4e9

    network = network_here({4: summary([[times_of(cost)] * 4] * 3)}, 4)
    assert network.hosts(4) == (0, 0, 1, 1)
    assert network.inside.seconds(MB) == pytest.approx(cost(MB))
    assert network.arrival(0, 1, MB, 1.0, pickled=True) == pytest.approx(1.0 + 2 * cost(MB))
    assert network.arrival(2, 1, MB, 1.0, pickled=True) == pytest.approx(1.0 + 2 * cost(MB))
    assert network.arrival(1, 2, 64 * MB, 1.0) == pytest.approx(1.0 + cost(64 * MB))
    assert network.collective_seconds("allreduce", MB, (0, 1, 2, 3)) == pytest.approx(cost(MB))
    # Two ranks of each host computed at once. A third one would share the same cores.
    assert [network.slowdown(k, 0.01) for k in (1, 2, 3)] == pytest.approx([1.0, 3.0, 4.5])


def test_a_small_message_between_hosts_takes_more_than_a_step_of_the_ring():
    ranks = times_of(lambda nbytes: 1e-6)
    for (kind, nbytes), times in ranks.items():
        if kind == "between":
            ranks[kind, nbytes] = [3 * seconds for seconds in times]
    curve = dict(summary([[ranks] * 4])["curves"]["between"])
    # Small messages do not wait: two of four are between hosts, and a step takes 3 µs.
    assert curve[8] == pytest.approx(5e-6)
    assert curve[NBYTES[-1]] == pytest.approx(3e-6)


def test_hosts_of_one_machine_share_its_cores():
    times = times_of(lambda nbytes: 1e-6) | {("machines", 0): [0.0] * 4}
    network = network_here({4: summary([[times] * 4])}, 4)
    assert (network.hosts(4), network.machines(4)) == ((0, 0, 1, 1), (0, 0, 0, 0))


def test_figures_of_other_numbers_of_ranks_lie_on_a_line_between_the_measured_ones():
    found = {
        n: summary([[times_of(lambda nbytes, n=n: n * 1e-6, hosts=[0.0] * n)] * n]) for n in (2, 4)
    }
    assert at_size(found, 3)["curves"]["allreduce"][0][1] == pytest.approx(3e-6)
    assert at_size(found, 8)["curves"]["allreduce"][0][1] == pytest.approx(8e-6)
    assert at_size(found, 1)["curves"] == found[2]["curves"]
    assert [number for number, _ in at_size(found, 3)["slowdowns"]] == [2, 4]


def shared(hosts, *works):
    """When each of some works ends, given as its beginning and its seconds on one rank alone. Ranks
    of a host that compute at once slow each other down as on one core."""
    cores = SharedCores(hosts, lambda ranks, seconds: float(ranks))
    for rank, work in enumerate(works):
        cores.add(rank, *work)
    ends = dict(cores.next_end() for _ in works)
    assert not cores
    return [ends[rank] for rank in range(len(works))]


def test_ranks_that_compute_at_once_share_the_cores_of_their_host():
    assert shared([0, 0], (0.0, 1.0), (0.0, 1.0)) == pytest.approx([2.0, 2.0])
    assert shared([0, 1], (0.0, 1.0), (0.0, 1.0)) == pytest.approx([1.0, 1.0])
    # Both are on the core from 1 to 3; a rank that begins after all have ended is alone.
    assert shared([0, 0, 0], (0.0, 2.0), (1.0, 2.0), (9.0, 1.0)) == pytest.approx([3.0, 4.0, 10.0])


def test_an_unknown_network_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match=r"found 'wifi'. Type one of: --network laptop \|"):
        check_name("wifi")


def test_times_of_events_are_summed_for_each_rank():
    events = [
        RankEvent(0, "collective", "allreduce(Sum)", 1.0, 3.0, 4.0, peer=1, nbytes=8),
        RankEvent(1, "collective", "allreduce(Sum)", 3.0, 3.0, 4.0, peer=1, nbytes=8),
    ]
    *records, (total, _) = time_records(7, "laptop", 2, [4.0, 5.0], events)
    timings = {record.rank: record.rows for record, _ in records if isinstance(record, Timings)}
    assert [row[6:9] for row in timings[0]] == [[1, 2.0, 1.0]]
    strips = {record.rank: record for record, _ in records if isinstance(record, Strip)}
    assert (strips[0].waits, strips[0].transfer_seconds) == (([1, 2.0],), 1.0)
    assert total == SimulatedTime(7, "laptop", 2, 5.0, 1, 9.0, 2.0, 2.0)
    line = (
        "simulated time on laptop: 5 s, rank 1 ended last; computing 56%, waiting 22%, transfer 22%"
    )
    assert time_line(total) == line
    assert [as_time(one) for one in (2.5, 0.0125, 3e-6)] == ["2.5 s", "12.5 ms", "3 µs"]


def test_messages_that_are_on_their_way_at_once_are_not_counted_twice():
    events = [
        RankEvent(0, kind, "comm.Sendrecv", 1.0, 2.0, 4.0, peer=1, nbytes=8)
        for kind in ("receive", "send")
    ]
    *_, (total, _) = time_records(7, "laptop", 1, [5.0], events)
    assert (total.wait_seconds, total.transfer_seconds) == (1.0, 2.0)
