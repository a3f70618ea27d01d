"""The explainer of an allreduce: from the story to frames, to text and to the still picture."""

import base64
import json
import pickle
import re
from itertools import pairwise
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

from allranks.cluster import cluster as notebook
from allranks.errors import CellTimeout, Report, UsageError
from allranks.lessons import on_ranks
from allranks.lessons.explainer import ALGORITHMS as OFFERED
from allranks.lessons.explainer import EXPLAIN_HERE, bundle, example_arrays
from allranks.lessons.frames import chunks, frames, listed, questions, shown, steps
from allranks.lessons.records import Explained, Prediction
from allranks.lessons.ring import ALGORITHMS, explain
from allranks.widgets import ring

PREDICTION = Prediction("ring", "measured", 64, 4, 1, 3e-3, 1e-6, "these ranks, fitted")


def told(arrays, algorithm="ring"):
    """What ranks would tell, played in this process."""
    run = explain([np.asarray(array) for array in arrays], algorithm)
    return Explained(run, 0.0025, 15, PREDICTION)


class Cluster:
    """Three ranks that play in this process."""

    size = 3

    def __init__(self):
        self.cells = SimpleNamespace(hidden_view=lambda: None)
        self.roster = SimpleNamespace(busy=False)

    def run(self, function, algorithm, arrays, **options):
        assert function is EXPLAIN_HERE
        return [told(arrays, algorithm)] * len(options["ranks"])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("count", "size"), [(2, 1), (3, 5), (4, 32), (7, 5), (16, 1)])
def test_the_last_frame_is_the_sum_on_every_rank(algorithm, count, size):
    arrays = np.random.default_rng(count).integers(-99, 99, (count, size))
    made = frames(told(arrays, algorithm).run)
    assert made[0].values == tuple(map(tuple, arrays.tolist()))
    assert made[-1].values == (tuple(arrays.sum(0).tolist()),) * count
    assert all(share == count for row in made[-1].shares for share in row)
    # Every message finds the values of the frame before it.
    for before, after in pairwise(made):
        assert after.messages
        for m in after.messages:
            part = slice(m.start, m.stop)
            assert m.received == before.values[m.sender][part]
            assert m.before == before.values[m.receiver][part]
            assert m.after == after.values[m.receiver][part]


def test_a_frame_says_who_sends_what_to_whom_and_which_chunks_are_empty():
    made = frames(told([[1, 2], [10, 20]]).run)
    assert made[0].words(0, 2) == "Start: each of 2 ranks has its own array."
    assert made[1].words(1, 2) == (
        "Round 1 of 2, reduce-scatter: rank 1 sends chunk 1 (element 1) to rank 0: 2 + 20 = 22; "
        "rank 0 sends chunk 0 (element 0) to rank 1: 10 + 1 = 11."
    )
    assert made[2].words(2, 2).endswith("20 becomes 22. Complete: all ranks.")
    assert chunks(told([[1], [2], [4]]).run) == [(2, 0, 1)]
    assert "chunk 0, which is empty, to rank 1" in frames(told([[1], [2], [4]]).run)[1].words(1, 4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("count", "size"), [(2, 1), (2, 2), (4, 8), (5, 3), (7, 2), (16, 16)])
def test_each_question_has_one_right_answer_and_the_ranks_do_what_it_says(algorithm, count, size):
    made = frames(told(example_arrays(count, size), algorithm).run)
    posed = questions(made)
    assert posed[0] == []
    assert len(posed) == len(made)
    for before, frame, asked in zip(made, made[1:], posed[1:], strict=False):
        assert asked
        for question in asked:
            (right,) = [answer for answer in question.answers if answer.right]
            assert len({answer.said for answer in question.answers}) == len(question.answers) > 1
            assert all(answer.why.endswith(".") for answer in question.answers)
            sent = [m for m in frame.messages if m.sender == question.rank]
            if question.asked.startswith("Which chunk"):
                assert right.said == f"chunk {sent[0].chunk}"
            elif question.asked.startswith("To which rank"):
                assert right.said == (f"rank {sent[0].receiver}" if sent else "nobody")
            else:
                place = int(re.findall("element ([0-9]+)", question.asked)[0])
                assert right.said == shown(frame.values[question.rank][place])
                assert right.said != shown(before.values[question.rank][place])


def test_a_mistake_is_told_why_it_is_one():
    (which, held), *_ = questions(frames(told([[1, 2], [10, 20]]).run))[1:]
    assert which.asked == "Which chunk does rank 0 send in round 1?"
    assert [answer.said for answer in which.answers] == ["chunk 0", "chunk 1"]
    assert which.answers[1].why == (
        "Rank 0 sends chunk 0: each rank begins with the chunk of its own number."
    )
    added = "In reduce-scatter the received value is added: 10 + 1 = 11."
    assert [(answer.said, answer.why) for answer in held.answers] == [
        ("1", f"1 is what rank 0 sends. {added}"),
        ("10", f"10 is what rank 1 holds already. {added}"),
        ("11", added),
    ]


def test_a_long_text_is_cut_and_says_so():
    made = frames(told(example_arrays(16, 16)).run)
    assert len(steps(made).rows) == 64
    assert steps(made).note == f"… {16 * 30 - 64} more messages"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("count", "size"), [(2, 1), (4, 8), (16, 32)])
def test_the_still_picture_is_small_and_needs_no_scripts(algorithm, count, size):
    found = told(example_arrays(count, size), algorithm)
    made = bundle(found, frames(found.run), "place")
    assert set(made) == {"text/html", "text/plain"}
    assert not re.search("<script|<style|<svg|widget", made["text/html"])
    (data,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', made["text/html"])
    drawn = ElementTree.fromstring(base64.b64decode(data))
    words = [element.text for element in drawn.iter() if element.tag.endswith("text")]
    assert words.count(str(found.run.result.items[0])) >= count
    assert sum(len(part.encode()) for part in made.values()) < 120_000


def test_the_notebook_has_the_names_of_the_ranks_and_short_values():
    assert pickle.loads(pickle.dumps(EXPLAIN_HERE)) is on_ranks.explain_here
    assert list(OFFERED) == list(ALGORITHMS)
    assert [shown(one) for one in (1111, 0.123456, 1e9)] == ["1111", "0.1235", "1e+09"]
    assert listed(range(9)) == "(0, 1, 2, 3, 4, 5, 6, 7, …)"


def test_a_reader_brings_values_and_the_player_is_told_what_it_plays():
    run = ring(Cluster(), values=np.array([[0.5, 1.0], [0.25, 2.0]])).told.run
    assert run.result.items == (0.75, 3.0)
    assert (run.size, run.dtype) == (2, "float64")
    player = ring(Cluster(), "tree", ranks=2, size=2)
    player.run("ring", 3, 3)
    state = player.state()
    assert state["algorithm"] == "ring"
    assert state["frames"][-1]["values"] == [["111", "222", "333"]] * 3
    assert json.loads(json.dumps(state))["mostRanks"] == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"algorithm": "star"}, "expected one of ring, recursive doubling, tree, found 'star'"),
        ({"ranks": 1}, "expected between 2 and 16 ranks to be drawn, found 1"),
        ({"size": 33}, "expected between 1 and 32 values a rank to be drawn, found 33"),
        ({"values": 7}, "expected one array of numbers a rank"),
        ({"values": [[1, 2], [3]]}, r"found arrays of \[1, 2\] values"),
        ({"values": [[1], ["a"]]}, "found 'a' among them"),
        ({"values": []}, "found 0"),
        ({}, "%load_ext allranks"),  # there are no ranks
    ],
)
def test_what_cannot_be_shown_is_refused_before_anything_runs(arguments, said, monkeypatch):
    monkeypatch.setattr(notebook, "session", None)
    with pytest.raises(UsageError, match=said):
        ring(**arguments)


@pytest.mark.parametrize("etype", ["CellTimeout", "death"])
def test_a_timeout_says_what_was_not_ended_and_what_to_type(etype, monkeypatch):
    killed = "rank 1 was killed"
    report = Report(1, "vm", "cpu", etype, "", (), None, "", waiting=False)

    def run(*_, **__):
        raise CellTimeout(killed, reports=[report])

    ranks = Cluster()
    monkeypatch.setattr(ranks, "run", run, raising=False)
    with pytest.raises(CellTimeout) as raised:
        ring(ranks, algorithm="tree", size=4)
    said = str(raised.value)
    assert said.startswith(
        "ring() expected ranks 0–2 to run an allreduce (tree, 4 values a rank) several times "
        "within 30 s, found that they had not ended."
    )
    assert (killed in said) == (etype == "death")
    assert "type the same again" in said
    assert raised.value._render_traceback_() == [said]
