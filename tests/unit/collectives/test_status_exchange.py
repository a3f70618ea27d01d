"""What ranks of one host know of those of another: boards, and the exchange between them."""

import mmap
import os
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from allranks.collectives.calls import rank_state as fields
from allranks.collectives.calls.rank_state import BLOCK, Board, RankState
from allranks.collectives.calls.sites import Site, with_source
from allranks.collectives.mpi import host_connections
from allranks.collectives.mpi.host_connections import EncryptedLink, Listening, StatusThread, join
from allranks.collectives.mpi.status_exchange import (
    CHILDREN,
    ROUNDS,
    StatusExchange,
    children,
    messages_in,
    spread,
    subtree,
)
from benchmarks.simulated_hosts import Queue, SimulatedHosts
from tests.attacks import send_large_messages
from tests.kernel import wait_until

FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
HERE = os.path.relpath(__file__)


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    monkeypatch.setattr(host_connections, "_ALL_SECONDS", 600)


def board_of(rank: int, ranks: int = 2) -> Board:
    return Board(mmap.mmap(-1, Board.nbytes(ranks)), tuple(range(ranks)), rank)


def connected(hosts: int) -> list[StatusThread]:
    """The threads of so many hosts of one rank each, which are connected in a tree."""
    keys = [zmq.curve_keypair() for _ in range(hosts)]
    public = [key for key, _ in keys]
    listening = {
        host: Listening(keys[host], hosts) for host in range(hosts) if children(host, hosts)
    }

    def connect(host: int) -> StatusThread:
        above, below = [], []
        if host:
            other = (host - 1) // CHILDREN
            where = ["127.0.0.2", "127.0.0.1"], listening[other].port
            far = set(range(hosts)) - set(subtree(host, hosts))
            channel, frame = join(*where, keys[host], public[other], host)
            above = [EncryptedLink(channel, frame, [other], sorted(far))]
        if host in listening:
            of = {one: ([one], subtree(one, hosts)) for one in children(host, hosts)}
            below = listening[host].accept(public, of)
        exchange = StatusExchange(board_of(host, hosts), [host], *(above or [None]), below)
        return StatusThread(exchange, [*above, *below])

    with ThreadPoolExecutor(hosts) as pool:
        return list(pool.map(connect, range(hosts)))


def cut(threads: list[StatusThread], host: int) -> None:
    for connection in threads[host].connections:
        with suppress(OSError):  # it may have ended
            connection.tcp.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def start():
    """Starts the exchanges of so many hosts; returns their threads and boards."""
    started = []

    def start(hosts: int) -> tuple[list[StatusThread], list[Board]]:
        started.extend(connected(hosts))
        for thread in started:
            thread.start()
        return started, [thread.exchange.board for thread in started]

    yield start
    for host in range(len(started)):
        cut(started, host)
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()


def test_a_board_shows_what_ranks_of_another_host_tell_until_they_are_lost(start):
    threads, boards = start(2)
    boards[1].write(fields.REASON, "ValueError: bad batch")
    boards[1].note(3, 17, 16)
    boards[1].put(fields.LEFT, 5)
    # Nothing crosses the network before a rank waits.
    boards[0].put(fields.TICKET, 1)
    wait_until(lambda: boards[0].get(1, fields.LEFT) == 5)
    assert boards[0].text(1, fields.REASON) == "ValueError: bad batch"
    assert boards[0].progress(1, 3) == (17, 16)
    boards[0].ask(1, 99)
    wait_until(lambda: boards[1].get(1, fields.ASKED) == 99)
    # What a rank was asked stays where it was asked, and is not taken for what it tells.
    boards[1].put(fields.LEFT, 6)
    wait_until(lambda: boards[0].get(1, fields.LEFT) == 6)
    assert boards[0].get(1, fields.ASKED) == 99
    # Rounds bring the beats of ranks, and others' progress.
    boards[0].note(3, 18, 18)
    wait_until(lambda: boards[1].get(1, fields.ROUND) > 2)
    boards[1].put(fields.BEAT, 2)
    wait_until(lambda: boards[0].get(1, fields.BEAT) == 2)
    wait_until(lambda: boards[1].progress(0, 3) == (18, 18))
    assert not boards[0].get(1, fields.LOST)
    cut(threads, 1)
    wait_until(lambda: boards[0].get(1, fields.LOST) == fields.ENDED)
    wait_until(lambda: boards[1].get(0, fields.LOST) == fields.ENDED)


def test_progress_in_several_groups_is_found_for_each():
    board = board_of(0)
    for call in range(3):
        for group in (0, 7, 7, 0):
            board.note(group, call + group + 1, call)
        assert board.progress(0, 0) == (call + 1, call)
        assert board.progress(0, 7) == (call + 8, call)
    for group in range(8, 8 + 200):  # more than there are places: the quiet ones lose theirs
        board.note(group, 1, 1)
        board.note(0, group, group)
    assert board.progress(0, 0) == (207, 207)
    assert board.progress(0, 7) == (0, 0)


def test_without_a_wait_rounds_end_and_all_hosts_know_the_last_states(start):
    threads, boards = start(3)
    boards[1].put(fields.TICKET, 1)
    wait_until(lambda: all(board.get(1, fields.TICKET) for board in boards))
    boards[1].put(fields.TICKET, 0)
    wait_until(lambda: not any(board.get(1, fields.TICKET) for board in boards))
    wait_until(lambda: len({thread.exchange.round for thread in threads}) == 1)
    ended = threads[0].exchange.round
    boards[2].put(fields.ENTERED, 7)
    for thread in threads:
        thread.wake()
    boards[2].put(fields.LEFT, fields.GONE)  # but for the end of a rank
    wait_until(lambda: all(board.get(2, fields.LEFT) == fields.GONE for board in boards))
    assert boards[0].get(2, fields.ENTERED) == 7
    assert threads[0].exchange.round <= ended + 3


def test_a_host_that_is_lost_between_others_is_named_on_both_sides(start):
    hosts = 2 * CHILDREN + 2
    threads, boards = start(hosts)
    boards[hosts - 1].put(fields.TICKET, 1)
    wait_until(lambda: all(board.get(hosts - 1, fields.TICKET) for board in boards))
    cut(threads, 1)
    behind, through = children(1, hosts), fields.lost_word(fields.ENDED, 2)
    for host in {*range(hosts)} - {1}:
        board, far = boards[host], {*range(hosts)} - {1, host}
        # Hosts behind it have lost each other too.
        lost = far if host in behind else {*behind}
        wait_until(lambda board=board: board.get(1, fields.LOST) == fields.ENDED)
        for rank in lost:
            wait_until(lambda board=board, rank=rank: board.get(rank, fields.LOST) == through)
        own = RankState(host, tuple(range(hosts)), board)
        own.host_names = tuple(f"h{one}" for one in range(hosts))
        reasons = [own.departure(rank) for rank in sorted(lost)]
        assert min(filter(None, [*reasons, own.departure(1)])) == (
            0,
            "cannot be reached: the first rank of its host h1 has ended",
        )
        assert {why for _, why in filter(None, reasons)} == {
            "cannot be reached: the first rank of the host h1 has ended, which reported its state"
        }
        assert not any(board.get(rank, fields.LOST) for rank in far - lost)


def test_ranks_of_other_hosts_are_lost_once_the_first_rank_of_this_host_has_died():
    hosts = (0, 0, 1, 1)
    for rank, died, lost in ((3, 2, [0, 1, 2]), (3, 0, [0]), (0, 2, [2]), (1, 0, [0, 2, 3])):
        own = RankState(rank, hosts, board_of(rank, 4))
        own.shares = (0, 0, 2, 2)
        own.died[died] = "was killed by signal 9"
        assert [other for other in range(4) if own.is_lost(other)] == lost


@pytest.mark.parametrize("hosts", [4, 16])
def test_a_round_has_as_many_messages_as_in_the_simulation(start, monkeypatch, hosts):
    frames, real, simulated = [], Counter(), Counter()
    send, put = EncryptedLink.send, Queue.send
    monkeypatch.setattr(EncryptedLink, "send", lambda *own: frames.append(own[1]) or send(*own))
    threads, boards = start(hosts)
    for board in boards:
        board.put(fields.TICKET, 1)
    wait_until(lambda: all(thread.exchange.round > 5 for thread in threads))
    for frame in frames:
        real.update(m.number for m in messages_in(frame) if m.kind in ROUNDS)
    frames.clear()
    monkeypatch.setattr(Queue, "send", lambda *own: frames.append(own[1]) or put(*own))
    played = SimulatedHosts(hosts, 1)
    played.stall()
    for _ in range(6):
        played.play_round()
    for frame in frames:
        simulated.update(m.number for m in messages_in(frame) if m.kind in ROUNDS)
    for number in range(1, 6):
        assert real[number] == simulated[number] == 2 * (hosts - 1)


def test_a_host_that_stands_still_holds_up_no_question_of_others():
    boards = [board_of(host, 3) for host in range(3)]
    up = {host: Queue([0], {0, 1, 2} - {host}, host) for host in (1, 2)}
    down = {host: Queue([host], [host], 0) for host in up}
    for host, queue in up.items():
        queue.other, down[host].other = down[host], queue
    root = StatusExchange(boards[0], [0], None, [*down.values()])
    other = StatusExchange(boards[1], [1], up[1], [])

    def play():
        for now in range(2):
            for exchange in (root, other, root):
                for link in exchange.links:
                    frames, link.received = link.received, []
                    for frame in frames:
                        exchange.receive(link, frame)
                exchange.step(played + now)

    played = 10
    boards[0].put(fields.TICKET, 1)
    play()
    assert root.round == 1  # which host 2 does not complete
    boards[0].ask(1, 99)
    played = 20
    play()
    assert boards[1].get(1, fields.ASKED) == 99
    boards[1].write(fields.LINE, "In[3]:1")
    boards[1].put(fields.ANSWERED, 99)
    played = 30
    play()
    assert boards[0].get(1, fields.ANSWERED) == 99
    assert boards[0].text(1, fields.LINE) == "In[3]:1"
    boards[1].write(fields.REASON, "ValueError: bad batch")
    boards[1].put(fields.LEFT, 5)
    played = 40
    play()
    assert boards[0].get(1, fields.LEFT) == 5


@pytest.mark.parametrize("leaders", [1, 2, 3, 4, 7, 16, 1000])
def test_few_messages_bring_all_parts_to_all_leaders(leaders):
    have = [[leader] for leader in range(leaders)]
    for distance, parts in spread(leaders):
        assert all(len(mine) >= parts for mine in have)
        have = [mine + have[me - distance][:parts] for me, mine in enumerate(have)]
    assert all(sorted(mine) == [*range(leaders)] for mine in have)
    assert len(spread(leaders)) == (leaders - 1).bit_length()


def is_accepted(port: int, key: tuple[bytes, bytes], server_key: bytes) -> bool:
    with zmq.Context() as context, context.socket(zmq.DEALER) as tries:
        tries.curve_serverkey, tries.linger = server_key, 0
        tries.curve_publickey, tries.curve_secretkey = key
        # Nothing answers if the connection comes while keys cease to be accepted.
        tries.handshake_ivl = 2000
        with tries.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILED) as ends:
            tries.connect(f"tcp://127.0.0.1:{port}")
            assert ends.poll(60_000)
            event = recv_monitor_message(ends)["event"]
            tries.disable_monitor()
    return event == zmq.EVENT_HANDSHAKE_SUCCEEDED


def test_only_ranks_with_a_known_key_are_accepted_and_after_them_none():
    server, known, other = (zmq.curve_keypair() for _ in range(3))
    listening = Listening(server, 2)
    with ThreadPoolExecutor() as pool:
        accepting = pool.submit(listening.accept, [server[0], known[0]], {1: ([1], [1, 2])})
        assert not is_accepted(listening.port, other, server[0])
        assert send_large_messages(listening.port) == ["ended"]
        channel, _ = join(["127.0.0.1"], listening.port, known, server[0], 1)
        (link,) = accepting.result()
    assert link.behind == {1, 2}
    for key in (known, other):
        assert not is_accepted(listening.port, key, server[0])
    link.tcp.close()
    for one in (listening.channel, channel):
        one.context.destroy()


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "allreduce(Sum) at {}",
        "has left allreduce(Sum) at {} (KeyboardInterrupt)",
        "ranks 0–1 wait for each other.\n  rank 0 in comm.recv at {}\n  rank 1 in barrier at {}",
    ],
)
def test_readers_add_the_source_to_the_lines_of_a_text(text):
    site = Site(HERE, 1)
    assert "What ranks of one host" in str(site)
    assert with_source(text.format(site.place, site.place)) == text.format(site, site)


def test_a_page_is_copied_to_another_host_except_what_others_write_there():
    board, other = board_of(0), board_of(1)
    board.write(fields.REASON, "ValueError: 3: 4")
    board.put(fields.TICKET, 7)
    board.ask(0, 5)
    page = board.page(0)
    for block in reversed(range(len(page) // BLOCK)):
        other.show(0, block, page[block * BLOCK :][:BLOCK])
    assert other.text(0, fields.REASON) == "ValueError: 3: 4"
    assert other.get(0, fields.TICKET) == 7
    assert other.get(0, fields.ASKED) == 0
