"""What ranks of one host know of those of another: boards, and the exchange between them."""

import mmap
import os
import socket

import pytest

from allranks.collectives.calls import rank_state as fields
from allranks.collectives.calls.guard import Site, with_source
from allranks.collectives.calls.rank_state import Board
from allranks.collectives.mpi.status_exchange import HostLink, StatusExchange
from tests.kernel import wait_until

HERE = os.path.relpath(__file__)


def board_of(rank: int, ranks: int = 2) -> Board:
    return Board(mmap.mmap(-1, Board.nbytes(ranks)), tuple(range(ranks)), rank)


@pytest.fixture
def connected():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    with near, far:
        yield near, far


def test_a_board_shows_what_ranks_of_another_host_tell_until_they_are_lost(connected):
    boards = board_of(0), board_of(1)
    exchanges = [
        StatusExchange(boards[0], 0, (0,), [HostLink(connected[0], (1,))]),
        StatusExchange(boards[1], 1, (1,), [HostLink(connected[1], (0,))]),
    ]
    for exchange in exchanges:
        exchange.start()
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
    rounds = boards[1].get(1, fields.ROUND)
    wait_until(lambda: boards[1].get(1, fields.ROUND) > rounds + 2)
    assert not boards[0].get(1, fields.LOST)
    connected[1].shutdown(socket.SHUT_RDWR)
    wait_until(lambda: boards[0].get(1, fields.LOST) == fields.ENDED)
    wait_until(lambda: boards[1].get(0, fields.LOST) == fields.ENDED)
    for exchange in exchanges:
        exchange.join(20)
        assert not exchange.is_alive()


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
