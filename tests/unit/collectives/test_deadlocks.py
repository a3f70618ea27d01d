"""The error of ranks that wait for each other: its class, and the change that it advises."""

import pytest

from allranks.collectives.calls import deadlocks
from allranks.errors import CollectiveMismatch, Deadlock

RECEIVE = "Let some ranks receive first, or use sendrecv."
SEND = "Let some ranks send first, or use sendrecv."
PAIR_UP = "Make a receive for each send, with the same tag, or use sendrecv."
EXCHANGE = "Make the dest of each sendrecv a rank whose source it is, with the same tag."
SAME = "Make the same calls in the same order on every rank."


@pytest.mark.parametrize(
    ("titles", "advice", "kind"),
    [
        (["comm.Send", "send"], RECEIVE, Deadlock),
        (["comm.ssend", "comm.isend, waitall"], RECEIVE, Deadlock),
        (["recv", "comm.recv"], SEND, Deadlock),
        (["comm.Mrecv", "comm.probe", "comm.Irecv, Wait"], SEND, Deadlock),
        (["comm.Send", "comm.recv"], PAIR_UP, Deadlock),
        (["comm.Sendrecv_replace", "comm.sendrecv"], EXCHANGE, Deadlock),
        (["comm.sendrecv", "comm.Send"], PAIR_UP, Deadlock),
        (["comm.recv", "allreduce(Average)"], SAME, CollectiveMismatch),
        (["barrier"], SAME, CollectiveMismatch),
    ],
)
def test_the_advice_and_the_class_are_those_of_the_calls(titles, advice, kind):
    text = deadlocks.text([0, 1], titles)
    assert text == f"ranks 0–1 wait for each other, and none can go on. {advice}"
    assert type(deadlocks.error(f"{text}\n  rank 0 in {titles[0]} at In[1]:1")) is kind


def test_a_rank_that_waits_for_itself_needs_a_call_that_does_not_wait():
    text = deadlocks.text([2], ["comm.recv"])
    assert text.startswith("rank 2 waits for itself, and never can go on. A message to itself")
    assert type(deadlocks.error(text)) is Deadlock


def test_messages_with_other_tags_are_named_in_place_of_other_advice():
    tags = [deadlocks.OtherTag(1, 0, sent=1, wanted=2), deadlocks.OtherTag(0, 1, sent=0, wanted=3)]
    text = deadlocks.text([0, 1], ["comm.recv", "barrier"], tags)
    assert text == (
        "ranks 0–1 wait for each other, and none can go on. Rank 0 has sent a message with tag 1, "
        "and rank 1 waits for tag 2; rank 1 has sent a message with tag 0, and rank 0 waits for "
        "tag 3. Send and receive with the same tag."
    )
    assert type(deadlocks.error(text)) is Deadlock


def test_a_mismatch_that_another_rank_has_reported_is_none():
    text = "allreduce needs the same shape on every rank: rank 1 has ().\n  rank 1: can go on"
    assert type(deadlocks.error(text)) is CollectiveMismatch


@pytest.mark.parametrize(
    ("title", "advice"),
    [
        ("recv", "Let rank 1 send to rank 0, or leave out this receive."),
        ("comm.Irecv, Wait", "Let rank 1 send to rank 0, with the same tag, or leave out this rec"),
        ("comm.ssend", "Let rank 1 receive from rank 0, with the same tag, or leave out this send"),
        ("comm.sendrecv", "Let rank 1 call sendrecv too, with rank 0 as its partner."),
    ],
)
def test_a_message_whose_partner_has_left_needs_the_other_call(title, advice):
    assert deadlocks.advice_alone(title, 0, "rank 1").startswith(advice)
    assert deadlocks.advice_alone("allreduce(Sum)", 0, "rank 1") == ""


@pytest.mark.parametrize(
    ("title", "makes"),
    [
        ("allreduce(Average)", "let every rank make s = add_process_set([0, 1]), and pass"),
        ("comm.Barrier", "communicator of theirs, which all ranks make with comm.Split."),
    ],
)
def test_a_call_of_some_ranks_gets_the_call_that_makes_their_group(title, makes):
    assert makes in deadlocks.advice_for_some(title)
