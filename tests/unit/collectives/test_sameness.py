"""Ranks compare arrays, models and collections of them, and name what differs."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

import allranks.collectives as c
from allranks.collectives import loopback
from allranks.collectives.ops.sameness import differences
from allranks.errors import UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")


def compared(value, ranks=3):
    """The differences, the same on every rank, of a function of the rank."""
    found = loopback.run(ranks, lambda: differences(value(c.rank())))
    assert all(one == found[0] for one in found)
    return found[0]


def test_equal_values_are_the_same_on_all_ranks(capsys):
    value = {"w": np.array([1.0, np.nan]), "steps": [3, None, "adam"], 7: np.float32(2)}
    assert loopback.run(3, lambda: c.same_on_all_ranks(value)) == [True] * 3
    assert capsys.readouterr().out == ""


def test_the_rank_with_other_values_is_named_and_how_far_they_are_apart(capsys):
    def program():
        return c.same_on_all_ranks({"a": np.ones(4), "b": np.arange(3.0) + (c.rank() == 1) / 4})

    assert loopback.run(3, program) == [False] * 3
    assert capsys.readouterr().out == (
        "b: the same on ranks 0, 2, other values on rank 1, by at most 0.25\n"
    )


def test_values_of_the_same_place_are_all_compared():
    found = compared(lambda rank: {1: np.full(2, float(rank)), "1": np.ones(2)}, ranks=2)
    assert len(found) == 1
    layer = lambda rank: SimpleNamespace(path="dense/kernel", value=np.full(2, float(rank)))  # noqa: E731
    model = lambda rank: SimpleNamespace(weights=[layer(rank), layer(0)])  # noqa: E731
    assert len(compared(model, ranks=2)) == 1


def test_a_value_that_cannot_be_read_on_one_rank_is_an_error_on_all():
    def program():
        broken = np.array([None], object) if c.rank() else np.ones(1)
        with pytest.raises(UsageError, match=r"could not read the values|can be compared"):
            c.same_on_all_ranks(broken)

    loopback.run(2, program)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda rank: np.arange(3) + rank, "it: other values on every rank"),
        (lambda rank: rank == 2, "it: the same on ranks 0–1, other values on rank 2"),
        (
            lambda rank: np.ones(3 if rank else 4),
            "it: float64 (3,) on ranks 1–2, float64 (4,) on rank 0",
        ),
        (lambda rank: [1, 2][: 1 + rank // 2], "[1]: nothing on ranks 0–1, int on rank 2"),
        (lambda rank: 0 if rank else 0.0, "it: int on ranks 1–2, float on rank 0"),
        (
            lambda rank: {"a": {} if rank else []},
            "a: an empty dictionary on ranks 1–2, an empty list on rank 0",
        ),
        (
            lambda rank: np.float32(1) if rank else np.ones(1, "float32"),
            "it: float32 () on ranks 1–2, float32 (1,) on rank 0",
        ),
    ],
)
def test_differences_of_shapes_kinds_and_values_are_told_apart(value, said):
    assert compared(value) == [said]


def test_models_are_compared_by_their_names():
    def torch_like(rank):
        state = {"net": {"weight": np.ones(2) * rank}, "step": 3}
        return SimpleNamespace(state_dict=lambda: state)

    def keras_like(rank):
        weights = [SimpleNamespace(path=f"dense/{n}", value=np.ones(2)) for n in ("kernel", "bias")]
        weights[1].value *= 1 + rank
        return SimpleNamespace(weights=weights)

    assert compared(torch_like) == ["net.weight: other values on every rank, by at most 2"]
    assert compared(keras_like) == ["dense/bias: other values on every rank, by at most 2"]


def test_a_class_with_weights_and_biases_is_no_model_of_keras():
    def program():
        network = SimpleNamespace(weights=[np.ones(2)], biases=[np.full(2, c.rank())])
        with pytest.raises(UsageError, match="found SimpleNamespace"):
            c.same_on_all_ranks(network)

    loopback.run(2, program)


@pytest.mark.parametrize("dtype", ["longdouble", "clongdouble"])
def test_bytes_that_a_number_does_not_use_do_not_count(dtype):
    def numbers(rank, first=1):
        found = np.array([first, 2, 3], dtype)
        unused = found.view(np.uint8).reshape(-1, np.dtype("longdouble").itemsize)
        if np.finfo(dtype).nmant == 63:
            unused[:, 10:] = rank
        return found

    assert compared(numbers) == []
    assert len(compared(lambda rank: numbers(rank, first=rank))) == 1


def test_gaps_between_fields_do_not_count():
    def rows(rank, last=1.0):
        found = np.empty(2, np.dtype([("a", "i1"), ("b", "f8")], align=True))
        found.view(np.uint8)[:] = rank
        found["a"], found["b"] = 7, last
        return found

    assert compared(rows) == []
    assert len(compared(lambda rank: rows(rank, float(rank)))) == 1


def test_gaps_within_fields_do_not_count():
    def rows(rank, last=1.0):
        inner = np.dtype([("a", "i1"), ("b", "f8")], align=True)
        found = np.empty(3, np.dtype([("pair", inner, (2,)), ("long", "longdouble")]))
        found.view(np.uint8)[:] = rank
        found["pair"]["a"], found["pair"]["b"], found["long"] = 7, last, last
        return found

    assert compared(rows) == []
    assert len(compared(lambda rank: rows(rank, float(rank)))) == 1


def test_the_labels_of_tables_are_compared():
    pandas = pytest.importorskip("pandas", reason="pip install pandas")
    names = lambda rank: ["b", "a"] if rank == 2 else ["a", "b"]  # noqa: E731
    assert compared(lambda rank: pandas.Series([1, 2], names(rank))) == [
        "it: int64 (2,) index a, b on ranks 0–1, int64 (2,) index b, a on rank 2"
    ]
    assert compared(lambda rank: pandas.DataFrame([[1, 2]], columns=names(rank))) == [
        "it: int64 (1, 2) columns a, b on ranks 0–1, int64 (1, 2) columns b, a on rank 2"
    ]
    assert compared(lambda rank: pandas.Series([1, 2], names(0))) == []


def test_only_the_first_differences_are_listed():
    lines = compared(lambda rank: [rank] * 9)
    assert len(lines) == 6
    assert lines[-1] == "and 4 more of 9"


def test_what_cannot_be_compared_is_refused_on_all_ranks():
    def program():
        value = {"net": object()} if c.rank() == 1 else {"net": 1}
        with pytest.raises(UsageError, match=r"found object at net|found others on rank 1"):
            differences(value)
        c.barrier()

    loopback.run(2, program)
