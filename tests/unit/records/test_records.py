"""Records survive the wire; lists of ranks and settings are understood, or refused."""

import json

import pytest

from allranks.errors import UsageError, WireError
from allranks.records import config
from allranks.records.config import HostAgentConfig
from allranks.records.ranks import compact, label, parse
from allranks.records.wire import (
    Ask,
    Output,
    Reply,
    Report,
    Result,
    RunMember,
    decode,
    encode,
    process_of,
)

REPORT = Report(1, "host", "cpu", "ValueError", "no", ("a", "b"), 3, "x = 1", waiting=False)


@pytest.mark.parametrize(
    "record",
    [
        Reply(1, 2, "error", 0.5, True, False, "", REPORT),
        Reply(1, 2, "ok", 0.5, False, True, "", None),
        Output(0, 1, (["out", "text é"], ["display", {"a": [1]}, {}, None]), 1, 2, 3),
        Ask(7, "pull", {"names": ["x"]}),
        RunMember(3, 1, "5c0ffee", "x = 1", 7, "member 1", 1024, 2, 0, True),
        Result(1, 3, {"accuracy": 0.5, "n": 3}, "accuracy 0.5", 128, "/proc/1/fd/3", ""),
    ],
)
def test_a_record_comes_back_equal(record):
    assert decode(encode(record, b"payload")) == (record, [b"payload"])


@pytest.mark.parametrize(
    ("said", "arrives"),
    [("a\ud800b", "a\\ud800b"), ('"\\\udfff', '"\\\\udfff'), ("caf\udce9", "caf\udce9")],
)
def test_text_arrives_as_a_front_end_can_show_it(said, arrives):
    record, _ = decode(encode(Ask(1, said, {said: [said]})))
    assert record == Ask(1, arrives, {arrives: [arrives]})
    arrives.encode("utf-8", "surrogateescape")


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "frames", [[], [b"{}"], [b'["Nobody", {}]'], [b'["Ask", {}]'], [b"\xff"], [DEEP]]
)
def test_what_is_no_record_is_refused(frames):
    with pytest.raises(WireError):
        decode(frames)


@pytest.mark.parametrize(
    ("field", "value"),
    [("rank", "1"), ("cell", None), ("entries", "text"), ("log_nbytes", 0.5), ("rank", [1])],
)
def test_a_field_of_another_type_is_refused_with_the_rank_that_it_names(field, value):
    name, fields = json.loads(encode(Output(3, 1, (["out", "a"],), 0, 0, 9))[0])
    with pytest.raises(WireError, match=f"{field} is of another type") as refused:
        decode([json.dumps([name, {**fields, field: value}]).encode()])
    assert refused.value.rank == (-1 if field == "rank" else 3)


def test_the_configuration_comes_back_equal_and_a_field_that_is_not_json_is_refused():
    with pytest.raises(WireError, match="Ask cannot be sent"):
        encode(Ask(1, "push", {"x": object()}))
    config = HostAgentConfig(2, ("mpiexec",), {"A": "1"}, "s", "l", "w", (), "ipc://c", "ipc://e")
    assert HostAgentConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("address", "pid"),
    [
        ("localhost:1000:1000:4711", 4711),
        ("10.1.0.12", 0),
        ("fd00::1:2:3", 0),
        ("1:2:3:4:5:6:7:8", 0),
        ("", 0),
    ],
)
def test_the_process_of_a_message_is_known_on_this_machine_only(address, pid):
    assert process_of({"Peer-Address": address}) == pid
    assert process_of({}) == 0


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
def test_lists_of_ranks_are_understood(text, ranks):
    assert parse(text, size=4) == ranks


@pytest.mark.parametrize(
    "text", ["9", "0-4", "3-1", "x", "", "1,,2", "-1", "1-", "²", "0-99999999999"]
)
def test_other_texts_are_refused(text):
    with pytest.raises(UsageError, match=r"expected ranks .* -r "):
        parse(text, size=4)


def test_ranks_are_written_in_spans():
    assert compact((3, 0, 2)) == "0, 2–3"
    assert label((1,)) == "rank 1"
    assert label((0, 1)) == "ranks 0–1"


@pytest.mark.parametrize(
    ("value", "taken"),
    [
        (None, "on"),
        *((word, word) for word in ("on", "name", "off")),
        *((word, None) for word in ("Off", "", "0")),
    ],
)
def test_a_word_that_is_not_known_is_refused(value, taken, monkeypatch):
    if value is None:
        monkeypatch.delenv("ALLRANKS_HOROVOD", raising=False)
    else:
        monkeypatch.setenv("ALLRANKS_HOROVOD", value)
    choice = "ALLRANKS_HOROVOD", ("on", "name", "off"), "on"
    if taken is None:
        with pytest.raises(UsageError, match=r"to be on, name or off, found .* Unset it for on"):
            config.variable_choice(*choice)
    else:
        assert config.variable_choice(*choice) == taken


def test_what_is_no_time_is_refused(monkeypatch):
    monkeypatch.delenv("ALLRANKS_LATE_SECONDS", raising=False)
    assert config.variable_seconds("ALLRANKS_LATE_SECONDS", 5.0) == 5.0
    monkeypatch.setenv("ALLRANKS_LATE_SECONDS", "0.5")
    assert config.variable_seconds("ALLRANKS_LATE_SECONDS", 5.0) == 0.5
    for value in ("abc", "", "0", "-1", "nan"):
        monkeypatch.setenv("ALLRANKS_LATE_SECONDS", value)
        with pytest.raises(UsageError, match=r"to be seconds above 0, found .* Unset it for 5"):
            config.variable_seconds("ALLRANKS_LATE_SECONDS", 5.0)
