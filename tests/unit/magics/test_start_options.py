"""Options that features add to the start of ranks."""

from __future__ import annotations

import pytest

from allranks.cluster.features import NotebookFeature, NotebookHooks
from allranks.cluster.options import ClusterOptions, StartOption
from allranks.errors import UsageError
from allranks.magics.options import cell_parser, parse_command

FAST = StartOption("fast", "ALLRANKS_TEST_FAST", ("no", "yes"), "whether to be fast")


@pytest.fixture(autouse=True)
def _one_option(monkeypatch):
    monkeypatch.setattr("allranks.cluster.options.START_OPTIONS", {"fast": FAST})
    cell_parser.cache_clear()
    yield
    cell_parser.cache_clear()


def test_an_option_of_a_feature_is_read_with_those_of_the_cluster():
    _, options = parse_command("start -n 3 --fast yes")
    assert options.cluster == ClusterOptions(3, settings=(("fast", "yes"),))
    assert options.cluster.words() == ["-n", "3", "--fast", "yes"]
    with pytest.raises(UsageError, match="invalid choice: 'maybe'"):
        parse_command("start --fast maybe")


def test_an_option_lasts_until_another_value_is_chosen():
    first = ClusterOptions(settings=(("fast", "yes"),))
    assert ClusterOptions(2).over(first).settings == first.settings
    assert ClusterOptions(settings=(("fast", "no"),)).over(first).settings == (("fast", "no"),)


def test_an_option_becomes_a_variable_of_the_ranks():
    made = ClusterOptions(settings=(("fast", "yes"),)).make(dict_of)
    assert made["settings"] == {"ALLRANKS_TEST_FAST": "yes"}


def dict_of(n: int | None, **options: object) -> dict[str, object]:
    return options


def test_the_line_of_a_feature_about_the_start_has_its_option():
    class Fast(NotebookFeature):
        def start_text(self, settings):
            return f"fast: {settings.get('fast', 'no')}"

    hooks = NotebookHooks([Fast, NotebookFeature])
    assert hooks.start_texts({"fast": "yes"}) == ["fast: yes"]
    assert hooks.take_failure() is None
