"""Records survive the wire, and nothing else does."""

import pytest

from allranks.errors import WireError
from allranks.records.config import NurseryConfig
from allranks.records.wire import (
    Ask,
    Output,
    Record,
    Reply,
    Report,
    Result,
    RunMember,
    decode,
    encode,
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
def test_a_record_comes_back_equal(record: Record) -> None:
    assert decode(encode(record, b"payload")) == (record, [b"payload"])


@pytest.mark.parametrize(
    ("said", "arrives"),
    [("a\ud800b", "a\\ud800b"), ('"\\\udfff', '"\\\\udfff'), ("caf\udce9", "caf\udce9")],
)
def test_text_arrives_as_a_front_end_can_show_it(said: str, arrives: str) -> None:
    record, _ = decode(encode(Ask(1, said, {said: [said]})))
    assert record == Ask(1, arrives, {arrives: [arrives]})
    arrives.encode("utf-8", "surrogateescape")


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "frames", [[], [b"{}"], [b'["Nobody", {}]'], [b'["Ask", {}]'], [b"\xff"], [DEEP]]
)
def test_what_is_no_record_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)


def test_a_field_that_is_not_json_is_refused() -> None:
    with pytest.raises(WireError, match="Ask cannot be sent"):
        encode(Ask(1, "push", {"x": object()}))


def test_the_nurserys_configuration_comes_back_equal() -> None:
    config = NurseryConfig(
        2, ("mpiexec",), {"A": "1"}, "s", "l", "w", (), "tcp://c", "tcp://e", "key"
    )
    assert NurseryConfig.from_json(config.to_json()) == config
