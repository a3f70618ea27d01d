"""The grid of an ensemble: what it says, and what is said of one that cannot be read."""

import math

import pytest

from allranks.errors import UsageError
from allranks.features.ensemble.grid import Span, parse, parse_choices, words


def members(line, **variables):
    return parse(words(line), variables).members()


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-1,1e-2,1e-3", [0.1, 0.01, 0.001]),
        ("0:4", [0, 1, 2, 3]),
        ("10:0:-5", [10, 5]),
        ("-2:1", [-2, -1, 0]),
        ("lin:0:1:5", [0, 0.25, 0.5, 0.75, 1]),
        ("log:1e-3:1e-1:3", [0.001, 0.01, 0.1]),
        ("log:1:1000:4", [1, 10, 100, 1000]),
        ("adam,sgd", ["adam", "sgd"]),
        ("'two words',\"a,b\"", ["two words", "a,b"]),
        ("True,None,-1", [True, None, -1]),
        ("[16, 32]", [16, 32]),
        ("(16, 16),(32,)", [(16, 16), (32,)]),
        ("data/a.csv", ["data/a.csv"]),
        ("'lin:0:1'", ["lin:0:1"]),
        ("1,inf,-inf", [1, math.inf, -math.inf]),
        ("[np.float64(0.1), np.int64(2)]", [0.1, 2]),
    ],
)
def test_choices_are_read(text, values):
    assert list(parse_choices("x", text)) == values


def test_values_and_lists_of_dictionaries_go_with_each_other_by_the_names_that_python_reads():
    assert members("a=1,2 b=x,y") == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]
    made = members("configs seed=0:2", configs=[{"lr": 0.1}, {"lr": 0.2, "wide": True}])
    assert made[1] == {"lr": 0.1, "seed": 1}
    assert made[2] == {"lr": 0.2, "wide": True, "seed": 0}
    assert members("\u00b5=1") == [{"\u03bc": 1}]
    with pytest.raises(UsageError, match="found 'rank', which every member has already"):
        members("\uff52ank=1")


def test_a_random_search_draws_the_same_for_a_seed_and_stays_inside():
    grid = parse(words("lr=log:1e-4:1e-1 n=1,2,3 p=lin:-1:1"), {})
    assert grid.choices["lr"] == Span(1e-4, 1e-1, True)
    drawn = grid.draw(200, seed=3)
    assert drawn == grid.draw(200, seed=3)
    assert drawn != grid.draw(200, seed=4)
    assert all(1e-4 <= one["lr"] <= 1e-1 and -1 <= one["p"] <= 1 for one in drawn)
    assert {one["n"] for one in drawn} == {1, 2, 3}
    # Its logarithm is uniform: half of the draws lie below the middle of the powers.
    assert 60 < sum(one["lr"] < math.sqrt(1e-4 * 1e-1) for one in drawn) < 140


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lr", "expected name=values, an option, or a variable of the notebook"),
        ("lr=", "found nothing. Type for example: lr="),
        ("lr=1,,2", "found nothing"),
        ("lr=a+b", r"found 'a\+b'"),
        ("x=5:5", "expected at least one value, found none"),
        ("x=0:8:0", "expected at least one value, found none"),
        ("x=[]", "expected at least one value, found none"),
        ("x=0:1:0.25", "expected whole numbers as in 0:8.*Type for example: x=lin:0:1:5"),
        ("x=log:0:1:5", "expected a low number above 0 and a higher one.*x=log:1e-4:1e-1:5"),
        ("x=lin:2:1:5", "expected a low number and a higher one"),
        ("x=log:1e-300:1e300:3", "expected two numbers that are not so far apart"),
        ("x=lin:-1e308:1e308:3", "expected two numbers that are not so far apart"),
        ("x=[0.1 0.2]", r"found '\[0.1 0.2\]'. Of an array, type for example: x={array.tolist"),
        ("x={rates}", "found '{rates}'. The notebook can fill in its own variables only"),
        ("x=log:1:2:one", "expected log:low:high:count"),
        ("x=lin:0:1:1", "expected a count of 2 or more"),
        ("x=log:1e-3:1", "expected a count.*Type x=log:0.001:1:5"),
        ("1x=3", "expected the name of a parameter, found '1x'"),
        ("for=3", "expected the name of a parameter, found 'for'"),
        ("rank=0:2", "expected a new name, found 'rank'.*my_rank="),
        ("result=1", "found 'result', which every member has already"),
        ("allreduce=1", "found 'allreduce', which every member has already"),
        ("a=1 a=2", "expected a= once, found it twice"),
        ("a=0:1000000", "expected 1 to 100,000 members, found 1,000,000"),
        ("a=0:1000 b=0:1000", "expected 1 to 100,000 members, found 1,000,000"),
        ("a=(1,2", r"expected a closing \), found the end"),
        ("a='x", "expected a closing ', found the end"),
        ("number", "expected number to be a list of dictionaries, found int"),
        ("empty", "expected 1 to 100,000 members, found 0"),
        ("bad", "expected the name of a parameter, found 'a b'"),
        ("good x=1", "expected each parameter in one place, found x in the list and in x="),
    ],
)
def test_a_grid_that_cannot_be_read_says_what_was_expected(line, said):
    variables = {"number": 3, "empty": [], "bad": [{"a b": 1}], "good": [{"x": 1}]}
    with pytest.raises(UsageError, match=f"(?s){said}"):
        members(line, **variables)
