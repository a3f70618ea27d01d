"""The messages between many hosts, simulated without ranks by the code that runs there.

    python -m benchmarks.simulated_hosts [--hosts 64 256 1000] [--ranks 8]

The `StatusExchange` of every host runs in this process, on links that are queues. All ranks but one
begin to wait. The traffic is computed for the seconds of this wait in which `benchmarks.scale`
counts it on real hosts, whose figures are beside the simulated ones. The bytes include what
CurveZMQ and TCP add. Prints a table in Markdown and writes benchmarks/results/simulated_hosts.json.
"""

from __future__ import annotations

import argparse
import json
import mmap
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar

from allranks.collectives.calls import rank_state as fields
from allranks.collectives.calls.rank_state import BLOCK, Board
from allranks.collectives.mpi.status_exchange import (
    CHILDREN,
    PERIOD_SECONDS,
    HostLink,
    StatusExchange,
    spread,
    subtree,
)
from benchmarks import results
from benchmarks.scale import SETTLED_SECONDS

_ASKED_SECONDS = 4.4, 9.4, 19.4, 39.4
"""When the rank that others wait for is asked for its line."""
_FRAME_BYTES = 33 + 9 + 2 * 66
"""What CurveZMQ, ZeroMQ, TCP and IP add to a frame, and the packet that acknowledges it."""


class SmallBoard(Board):
    """A board that has whole pages of its host's ranks only. Blocks of other ranks' pages that are
    equal are kept once for all boards.
    """

    known: ClassVar[dict[bytes, bytes]] = {}

    def __init__(self, near: Sequence[int], ranks: tuple[int, ...]) -> None:
        size = len(ranks)
        super().__init__(mmap.mmap(-1, Board.nbytes(len(near))), tuple(near), near[0])
        self.near, self.ranks = near, ranks
        words = fields.ASKED, fields.LOST, fields.TICKET, fields.RENEWING
        self._columns = {word: [0] * size for word in words}
        self._blocks: dict[int, list[bytes]] = defaultdict(lambda: [bytes(BLOCK)] * size)

    def column(self, word: int) -> Any:
        for rank in self.near if word in (fields.TICKET, fields.RENEWING) else ():
            self._columns[word][rank] = super().get(rank, word)
        return _Column(self._columns[word])

    def get(self, rank: int, word: int) -> int:
        known = word in (fields.ASKED, fields.LOST)
        return self._columns[word][rank] if known else super().get(rank, word)

    def ask(self, rank: int, ticket: int, what: int = fields.ASKED) -> None:
        self._columns[what][rank] = ticket

    def block(self, rank: int, block: int) -> bytes:
        near = rank in self.near
        return super().block(rank, block) if near else self._blocks[block][rank]

    def show(self, rank: int, block: int, data: bytes) -> None:
        self._blocks[block][rank] = self.known.setdefault(data, data)
        if block == 0:
            self._columns[fields.TICKET][rank] = int(fields.waits_in(data))


class _Column(list[int]):
    def tolist(self) -> list[int]:
        return list(self)


class Queue(HostLink):
    """A link to another exchange in this process."""

    other: Queue

    def __init__(self, at: Sequence[int], behind: Sequence[int], to: int) -> None:
        super().__init__(at, behind)
        self.to = to
        """The number of the other end's host."""
        self.received: list[bytes] = []

    def send(self, data: bytes) -> bool:
        self.other.received.append(data)
        return True


class SimulatedHosts:
    """So many hosts with so many ranks each. ``frames`` counts the messages that each host has
    received, ``nbytes`` what it has sent and received, ``seconds`` its work.
    """

    def __init__(self, hosts: int, ranks: int) -> None:
        self.hosts, everyone = hosts, tuple(range(hosts * ranks))
        ranks_of = [everyone[host * ranks :][:ranks] for host in range(hosts)]
        above: dict[int, Queue] = {}
        below: dict[int, list[Queue]] = {host: [] for host in range(hosts)}
        for host in range(1, hosts):
            upper = (host - 1) // CHILDREN
            behind = [rank for one in subtree(host, hosts) for rank in ranks_of[one]]
            far = sorted({*everyone}.difference(behind))
            up, down = Queue(ranks_of[upper], far, host), Queue(ranks_of[host], behind, upper)
            up.other, down.other = down, up
            above[host] = up
            below[upper].append(down)
        boards = [SmallBoard(near, everyone) for near in ranks_of]
        self.ranks = [
            Board(board.memory, tuple(board.near), r) for board in boards for r in board.near
        ]
        self.exchanges = [
            StatusExchange(boards[host], ranks_of[host], above.get(host), below[host])
            for host in range(hosts)
        ]
        self.links = [[*([above[h]] if h else ()), *below[h]] for h in range(hosts)]
        self.now, self.questions = 0.0, 0
        self.reset()

    def reset(self) -> None:
        self.frames, self.nbytes = [0] * self.hosts, [0] * self.hosts
        self.seconds = [0.0] * self.hosts

    def stall(self) -> None:
        """Lets all ranks but the last wait, as `Watch` publishes it."""
        for board in self.ranks[:-1]:
            board.write(fields.WAITING, "allreduce(Sum) at train.py:27")
            board.note(0, 1000, 999)
            board.put(fields.EDGE, len(self.ranks))
            board.put(fields.TICKET, 1)

    def play_round(self) -> None:
        """Passes the time until a round has begun, and all its messages."""
        number = self.exchanges[0].round
        while self.exchanges[0].round == number:
            self.now += PERIOD_SECONDS
            for board in self.ranks[:-1]:
                board.put(fields.BEAT, board.get(board.ranks[0], fields.ROUND))
            # Without news, only the root acts by itself: it begins the rounds.
            self._play(
                [h for h in range(self.hosts) if not h or any(x.news for x in self.links[h])]
            )

    def play_question(self) -> None:
        """Plays the question of the first rank to the one that is late, and its answer."""
        late = self.ranks[-1]
        self.questions += 1
        self.exchanges[0].board.ask(late.rank, self.questions)
        self._play([0])
        late.write(fields.LINE, "train.py:26")
        late.put(fields.ANSWERED, self.questions)
        self._play([self.hosts - 1])

    def _play(self, busy: Sequence[int]) -> None:
        while busy:
            for host in busy:
                self.step(host)
            busy = [h for h, links in enumerate(self.links) if any(x.received for x in links)]

    def step(self, host: int) -> None:
        exchange, began = self.exchanges[host], time.thread_time()
        for link in self.links[host]:
            frames, link.received = link.received, []
            for frame in frames:
                exchange.receive(link, frame)
                self.frames[host] += 1
                for end in (host, link.to):
                    self.nbytes[end] += len(frame) + _FRAME_BYTES
        exchange.step(self.now)
        self.seconds[host] += time.thread_time() - began


def rounds_within(began: float, ended: float) -> int:
    """How many rounds a wait has between these seconds."""
    simulated, count = SimulatedHosts(2, 1), 0
    simulated.stall()
    while simulated.now < ended:
        simulated.play_round()
        count += simulated.now > began
    return count


def measure(hosts: int, ranks: int, rounds: int) -> dict[str, Any]:
    simulated, found = SimulatedHosts(hosts, ranks), dict[str, Any]()
    simulated.stall()
    for host in range(hosts):
        simulated.step(host)
    # In two rounds, all hosts learn that the ranks wait.
    round_, question = simulated.play_round, simulated.play_question
    for name, count, play in (
        ("first", 2, round_),
        ("later", rounds, round_),
        ("asked", 1, question),
    ):
        for _ in range(count):
            play()
        found |= {
            f"{name}_frames": sum(simulated.frames) / count,
            f"{name}_most_bytes": max(simulated.nbytes) / count,
            f"{name}_mean_bytes": sum(simulated.nbytes) / hosts / count,
            f"{name}_most_ms": max(simulated.seconds) / count * 1e3,
        }
        simulated.reset()
    return {"hosts": hosts, "ranks": hosts * ranks, "messages": len(spread(hosts)), **found}


def table(result: dict[str, Any]) -> str:
    captured = {(run["hosts"], run["ranks"]): run for run in result["captured"]}
    head = ["hosts × ranks", "messages of a collective", "captured: packets"]
    head += ["idle MB/min: captured", "waiting MB/min: simulated", "captured"]
    head += ["mean of all hosts", "ms a round"]
    each, rows = result["rounds_a_minute"], []

    def waiting(run: dict[str, Any], idle: float, of: str) -> str:
        asked = run[f"asked_{of}_bytes"] * result["questions_a_minute"]
        return f"{idle + (run[f'later_{of}_bytes'] * each + asked) / 1e6:.2f}"

    for run in result["runs"]:
        real = captured.get((run["hosts"], run["ranks"]))
        idle = real["idle_mb_min"] if real else result["idle_mb_min"]
        rows.append(
            [
                f"{run['hosts']:,} × {run['ranks'] // run['hosts']}",
                str(run["messages"]),
                f"{real['allreduce_packets']:.1f}" if real else "–",
                f"{real['idle_mb_min']:.2f}" if real else "–",
                waiting(run, idle, "most"),
                f"{real['waiting_mb_min']:.2f}" if real else "–",
                waiting(run, idle, "mean"),
                f"{run['later_most_ms']:.1f}",
            ]
        )
    return (
        "The same for more hosts than there are here, simulated without ranks by the code that "
        "runs between hosts. The first figures are the messages that the first rank of each host "
        "sends until all agree on a collective, and the packets that a host sends and receives for "
        "an allreduce of 4 bytes. The simulated traffic is added to that of idle hosts: what was "
        f"captured there, or {result['idle_mb_min']:.2f} MB a minute, which are heartbeats with "
        "the notebook. Up to 128 ranks, ipyparallel's heartbeats are added on the first host, once "
        "a minute. Both are counted from 10 s after the ranks have begun to wait; before that, a "
        "loaded machine needs more rounds until all know which rank they wait for. The "
        "figures are of the host with most traffic, except for the mean of all hosts. The last "
        "column is the processor time of a round at the host with most of it; the wait has "
        f"{each:.0f} rounds a minute then, and later 2.\n\n" + results.markdown(head, rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hosts", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--ranks", type=int, default=8, help="on each host")
    parser.add_argument("--seconds", type=float, default=30, help="of `benchmarks.scale`")
    parser.add_argument("--rounds", type=int, default=2, help="to play once all hosts know")
    options = parser.parse_args()
    described, captured = results.machine(), results.read("scale")["runs"]
    sizes = [(run["hosts"], run["ranks"] // run["hosts"]) for run in captured]
    sizes += [(hosts, options.ranks) for hosts in options.hosts]
    runs = []
    for hosts, ranks in sizes:
        runs.append(measure(hosts, ranks, options.rounds))
        print(json.dumps(runs[-1]), flush=True)
    began, ended = SETTLED_SECONDS, SETTLED_SECONDS + options.seconds
    minutes = options.seconds / 60
    measured = {
        "runs": runs,
        "captured": captured,
        "idle_mb_min": min(run["idle_mb_min"] for run in captured),
        "rounds_a_minute": rounds_within(began, ended) / minutes,
        "questions_a_minute": sum(began < at < ended for at in _ASKED_SECONDS) / minutes,
    }
    print(table(results.write("simulated_hosts", described, measured)))


if __name__ == "__main__":
    main()
