"""What ranks of one host know of those of another: boards, and the exchange between them."""

import mmap
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from allranks.collectives.calls import rank_state as fields
from allranks.collectives.calls.guard import Site, with_source
from allranks.collectives.calls.rank_state import Board
from allranks.collectives.mpi.status_exchange import HostLink, Listening, StatusExchange, join
from tests.kernel import wait_until

FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
HERE = os.path.relpath(__file__)


def board_of(rank: int, ranks: int = 2) -> Board:
    return Board(mmap.mmap(-1, Board.nbytes(ranks)), tuple(range(ranks)), rank)


@pytest.fixture
def exchanges():
    """Those of rank 0 and rank 1, which are on two hosts."""
    keys = [zmq.curve_keypair() for _ in range(2)]
    public = [key for key, _ in keys]
    listening = Listening(keys[0])
    with ThreadPoolExecutor() as pool:
        where = ["127.0.0.2", "127.0.0.1"]
        joining = pool.submit(join, where, listening.port, keys[1], public[0], 1)
        links = listening.accept(public, {1: [1]})
        channel, frame = joining.result()
    found = [
        StatusExchange(board_of(0), 0, (0,), listening.channel, links),
        StatusExchange(board_of(1), 1, (1,), channel, [HostLink(channel, frame, (0,))]),
    ]
    for exchange in found:
        exchange.start()
    return found


def test_a_board_shows_what_ranks_of_another_host_tell_until_they_are_lost(exchanges):
    boards = [exchange.board for exchange in exchanges]
    boards[1].write(fields.REASON, "ValueError: bad batch")
    boards[1].note(3, 17, 16)
    boards[1].put(fields.LEFT, 5)
    wait_until(lambda: boards[0].get(1, fields.LEFT) == 5)
    assert boards[0].text(1, fields.REASON) == "ValueError: bad batch"
    assert boards[0].progress(1, 3) == (17, 16)
    boards[0].ask(1, 99)
    wait_until(lambda: boards[1].get(1, fields.ASKED) == 99)
    # What a rank was asked stays where it was asked, and is not taken for what it tells.
    boards[1].put(fields.LEFT, 6)
    wait_until(lambda: boards[0].get(1, fields.LEFT) == 6)
    assert boards[0].get(1, fields.ASKED) == 99
    assert boards[1].get(1, fields.ROUND) == 0
    # Rounds begin when a rank waits. They bring its beat, and others' progress.
    boards[0].note(3, 18, 18)
    boards[1].put(fields.TICKET, 1)
    wait_until(lambda: boards[1].get(1, fields.ROUND) > 2)
    boards[1].put(fields.BEAT, 2)
    wait_until(lambda: boards[0].get(1, fields.BEAT) == 2)
    wait_until(lambda: boards[1].progress(0, 3) == (18, 18))
    assert not boards[0].get(1, fields.LOST)
    with socket.socket(fileno=os.dup(exchanges[1].links[0].descriptor)) as connection:
        connection.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: boards[0].get(1, fields.LOST) == fields.ENDED)
    wait_until(lambda: boards[1].get(0, fields.LOST) == fields.ENDED)
    for exchange in exchanges:
        exchange.join(20)
        assert not exchange.is_alive()


def is_accepted(port: int, key: tuple[bytes, bytes], server_key: bytes) -> bool:
    with zmq.Context() as context, context.socket(zmq.DEALER) as tries:
        tries.curve_serverkey, tries.linger = server_key, 0
        tries.curve_publickey, tries.curve_secretkey = key
        with tries.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILED) as ends:
            tries.connect(f"tcp://127.0.0.1:{port}")
            assert ends.poll(20_000)
            event = recv_monitor_message(ends)["event"]
            tries.disable_monitor()
    return event == zmq.EVENT_HANDSHAKE_SUCCEEDED


def test_only_ranks_with_a_known_key_are_accepted_and_after_them_none():
    server, known, other = (zmq.curve_keypair() for _ in range(3))
    listening = Listening(server)
    with ThreadPoolExecutor() as pool:
        accepting = pool.submit(listening.accept, [server[0], known[0]], {1: [1]})
        assert not is_accepted(listening.port, other, server[0])
        channel, _ = join(["127.0.0.1"], listening.port, known, server[0], 1)
        (link,) = accepting.result()
    assert link.behind == {1}
    for key in (known, other):
        assert not is_accepted(listening.port, key, server[0])
    link.end()
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
    other.show(0, board.page(0))
    assert other.text(0, fields.REASON) == "ValueError: 3: 4"
    assert other.get(0, fields.TICKET) == 7
    assert other.get(0, fields.ASKED) == 0
