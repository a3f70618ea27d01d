"""What an environment variable says is taken as it is meant, or refused."""

import pytest

from allranks.errors import UsageError
from allranks.records import config


def horovod() -> str:
    return config.variable_choice("ALLRANKS_HOROVOD", ("on", "name", "off"), "on")


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    monkeypatch.delenv("ALLRANKS_HOROVOD", raising=False)


def test_what_is_not_set_is_the_default(monkeypatch):
    monkeypatch.delenv("ALLRANKS_LATE_SECONDS", raising=False)
    assert horovod() == "on"
    assert config.variable_seconds("ALLRANKS_LATE_SECONDS", 5.0) == 5.0


@pytest.mark.parametrize("said", ["on", "name", "off"])
def test_a_word_that_is_known_is_taken(said, monkeypatch):
    monkeypatch.setenv("ALLRANKS_HOROVOD", said)
    assert horovod() == said


@pytest.mark.parametrize("said", ["Off", "", "0"])
def test_another_word_is_refused(said, monkeypatch):
    monkeypatch.setenv("ALLRANKS_HOROVOD", said)
    with pytest.raises(UsageError, match=r"to be on, name or off, found .* Unset it for on"):
        horovod()


@pytest.mark.parametrize("said", ["abc", "", "0", "-1", "nan"])
def test_what_is_no_time_is_refused(said, monkeypatch):
    monkeypatch.setenv("ALLRANKS_LATE_SECONDS", said)
    with pytest.raises(UsageError, match=r"to be seconds above 0, found .* Unset it for 5"):
        config.variable_seconds("ALLRANKS_LATE_SECONDS", 5.0)


def test_a_time_is_taken(monkeypatch):
    monkeypatch.setenv("ALLRANKS_LATE_SECONDS", "0.5")
    assert config.variable_seconds("ALLRANKS_LATE_SECONDS", 5.0) == 0.5
