"""Records survive the wire; lists of ranks and settings are understood, or refused."""

import json
from dataclasses import astuple, replace

import pytest

from allranks.errors import UsageError, WireError
from allranks.records import config
from allranks.records.config import HostAgentConfig
from allranks.records.ranks import RUNNING, Activity, ActivityState, compact, label, parse
from allranks.records.telemetry import CallTotals, Points, Pulse, Strip, Timings
from allranks.records.wire import (
    Output,
    Query,
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
        Output(0, 1, (["err", ""], ["update", {}, {}, "a"], ["result", {}, {}]), 1, 2, 3),
        Output(0, 1, (["clear", True], ["into", "a"], ["hidden", 1, 2], ["notice", "b"]), 1, 2, 3),
        Query(7, "pull", {"names": ["x"]}),
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
    record, _ = decode(encode(Query(1, said, {said: [said]})))
    assert record == Query(1, arrives, {arrives: [arrives]})
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


@pytest.mark.parametrize(
    "entry",
    [
        *(5, "out", [], [5], ["sound", "a"], ["out"], ["out", 5], ["out", "a", "b"]),
        *(["display", {}], ["display", 3, {}, None], ["result", {}, []], ["clear", {}]),
        *(["update", {}, {}, 8], ["into", None], ["hidden", 1, "2"]),
    ],
)
def test_an_entry_that_no_view_could_show_is_refused(entry):
    message = encode(Output(3, 1, (["out", "a"], entry), 0, 0, 9))
    with pytest.raises(WireError, match="entries has one of another form") as refused:
        decode(message)
    assert refused.value.rank == 3


def test_a_reply_without_its_value_is_refused():
    with pytest.raises(WireError, match="the value is missing"):
        decode(encode(Reply(1, 2, "ok", 0.5, False, True, "", None)))


TOTALS = CallTotals("a", "b", "c", 8, 2, "d", 1, 0.1, 0.1, 0.1, 0.1, ((1, 1, 0.1),))
ROW = list(astuple(TOTALS))
POINTS = Points(3, 1, (["loss", "", 2],), 0)
STRIP = Strip(3, 1, 0.2, 0.1, (["numpy", 1.0],), ([1, 0.5],), 0.1, (0, 0.0, 2.0, 0.1))
TELEMETRY = [
    (POINTS, [bytes(32)]),
    (Points(3, 1, (), 7), [b""]),
    (Timings(3, 1, (ROW,)), []),
    (STRIP, [bytes(6), bytes(4)]),
    (replace(STRIP, steps=()), [b"", b""]),
    (Pulse(3, 1, Activity(ActivityState("asleep")), "", 1, 1), []),
]
OTHER_TELEMETRY = [
    (POINTS, []),
    (POINTS, [bytes(31)]),
    (replace(POINTS, series=(["loss", 2],)), [bytes(32)]),
    (replace(POINTS, series=(["loss", "", -2], ["a", "", 4])), [bytes(32)]),
    (Timings(3, 1, (5,)), []),
    (Timings(3, 1, (ROW[:-1],)), []),
    (Timings(3, 1, ([*ROW[:-1], [[1, "1", 0.1]]],)), []),
    (STRIP, [bytes(6)]),
    (STRIP, [bytes(6), bytes(2)]),
    (STRIP, [bytes(7), bytes(4)]),
    (replace(STRIP, width_seconds=0), [bytes(6), bytes(4)]),
    (replace(STRIP, first=-1), [bytes(6), bytes(4)]),
    (replace(STRIP, waits=(["a", 1],)), [bytes(6), bytes(4)]),
    (replace(STRIP, steps=(1,)), [bytes(6), bytes(4)]),
    (Pulse(3, 1, RUNNING, "", 10**400, 1), []),
    (Pulse(3, 1, (["running"], ""), "", 1, 1), []),
    (Pulse(3, 1, Activity(ActivityState(5)), "", 1, 1), []),
    (Pulse(3, 1, "running", "", 1, 1), []),
    (replace(STRIP, seconds=10**400), [bytes(6), bytes(4)]),
]


@pytest.mark.parametrize(("record", "payloads"), TELEMETRY)
def test_telemetry_arrives(record, payloads):
    assert decode(encode(record, *payloads))[1] == payloads


@pytest.mark.parametrize(("record", "payloads"), OTHER_TELEMETRY)
def test_telemetry_that_no_panel_could_draw_is_refused(record, payloads):
    with pytest.raises(WireError, match="cannot be read") as refused:
        decode(encode(record, *payloads))
    assert refused.value.rank == 3


def test_the_configuration_comes_back_equal_and_a_field_that_is_not_json_is_refused():
    with pytest.raises(WireError, match="Query cannot be sent"):
        encode(Query(1, "push", {"x": object()}))
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


@pytest.mark.parametrize(
    ("address", "url"), [("10.1.0.12", "tcp://10.1.0.12"), ("fd00::12", "tcp://[fd00::12]")]
)
def test_the_colons_of_an_address_are_not_taken_for_its_port(address, url):
    assert config.tcp_url(address) == url
