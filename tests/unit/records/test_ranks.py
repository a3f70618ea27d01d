"""Lists of ranks, as typed and as read."""

import pytest

from allranks.errors import UsageError
from allranks.records.ranks import compact, label, parse


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("2", (2,)),
        ("0,2-3", (0, 2, 3)),
        ("[0]", (0,)),
        ("[0, 2-3]", (0, 2, 3)),
        ("3,1,1", (1, 3)),
        ("all", (0, 1, 2, 3)),
    ],
)
def test_lists_of_ranks_are_understood(text: str, ranks: tuple[int, ...]) -> None:
    assert parse(text, size=4) == ranks


@pytest.mark.parametrize(
    "text", ["9", "0-4", "3-1", "x", "", "1,,2", "-1", "1-", "²", "0-99999999999"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected ranks .* -r "):
        parse(text, size=4)


def test_ranks_are_written_in_spans() -> None:
    assert compact((3, 0, 2)) == "0, 2–3"
    assert label((1,)) == "rank 1"
    assert label((0, 1)) == "ranks 0–1"
