"""A rank's transcript, in a process of its own: it takes over the standard streams."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEAD = """
import json, os, subprocess, sys
from allranks.engine.transcript import Transcript
answer = os.dup(1)
transcript = Transcript(sys.argv[1])
transcript.streams.capture()
transcript.begin_cell(limit_nbytes=4096)
"""
TAIL = """
entries, lines, nbytes, offset = transcript.collect(final=True)
os.write(answer, json.dumps([entries, lines, nbytes, offset]).encode())
"""


def collected(tmp_path: Path, body: str) -> tuple[list[list[Any]], int, int, int, bytes]:
    log = tmp_path / "rank-0.log"
    program = [sys.executable, "-c", HEAD + body + TAIL, str(log)]
    done = subprocess.run(program, capture_output=True, timeout=60, check=True)
    entries, lines, nbytes, offset = json.loads(done.stdout)
    return entries, lines, nbytes, offset, log.read_bytes()


def test_standard_error_that_is_just_being_written_is_told_from_standard_output(tmp_path):
    body = """
import threading, time
seek = os.lseek
def slowly(*where):
    time.sleep(0.002)
    return seek(*where)
os.lseek = slowly
collected = threading.Semaphore(0)
def complain():
    for i in range(300):
        print("complaint", i, file=sys.stderr)
        if i % 100 == 99: collected.acquire()
thread = threading.Thread(target=complain)
transcript.begin_cell(limit_nbytes=10**6)
thread.start()
found = []
while thread.is_alive():
    new = transcript.collect()[0]
    found += new
    if new: collected.release()
"""
    more = "os.write(answer, json.dumps([found, 0, 0, 0]).encode()); os._exit(0)"
    entries, *_, log = collected(tmp_path, body + more)
    assert len(entries) > 1
    assert {kind for kind, _ in entries} == {"err"}
    assert log.count(b"complaint") == 300


def test_nothing_counts_as_hidden_that_the_tail_will_show(tmp_path):
    body = """
for i in range(35):
    print("x" * 99)
early = transcript.collect()[1:3]
os.write(answer, json.dumps(early).encode() + b"|")
"""
    log = tmp_path / "rank-0.log"
    program = [sys.executable, "-c", HEAD + body + TAIL, str(log)]
    done = subprocess.run(program, capture_output=True, timeout=60, check=True)
    early, end = map(json.loads, done.stdout.split(b"|"))
    assert early == end[1:3] == [0, 0]
    assert [kind for kind, *_ in end[0]] == ["out"]


def test_a_flood_counts_while_it_runs(tmp_path):
    body = """
for i in range(1000): print("x" * 20)
first = transcript.collect()
for i in range(1000): print("x" * 20)
second = transcript.collect()
assert 0 < first[1] < second[1], (first[1], second[1])
assert not second[0], second[0]
"""
    _, lines, *_ = collected(tmp_path, body)
    assert lines > 0


def test_the_next_cell_has_a_budget_of_its_own(tmp_path):
    body = """
print("y" * 10000)
transcript.collect(final=True)
assert transcript.begin_cell(limit_nbytes=4096) == []
print("next")
"""
    entries, lines, *_ = collected(tmp_path, body)
    assert (entries, lines) == ([["out", "next\n"]], 0)


def test_only_the_last_update_of_a_display_is_sent(tmp_path):
    body = "for i in range(9): transcript.place(['update', {'text/plain': str(i)}, {}, 'bar'])"
    entries, *_ = collected(tmp_path, body)
    # What this cell has not displayed is new in it.
    assert [entry[:2] for entry in entries] == [
        ["display", {"text/plain": "0"}],
        ["update", {"text/plain": "8"}],
    ]


def test_the_disk_is_looked_at_when_a_cell_ends_and_not_when_the_next_one_begins(tmp_path):
    body = """
from allranks.engine.transcript import LogRoom
looks = []
LogRoom.is_full = lambda room: bool(looks.append(room))
for _ in range(3):
    transcript.begin_cell(limit_nbytes=4096)
    transcript.collect(final=True)
print(len(looks))
"""
    entries, *_ = collected(tmp_path, body)
    assert entries == [["out", "3\n"]]


def hidden_in(entries):
    return [rest for kind, *rest in entries if kind == "hidden"]


@pytest.mark.parametrize(
    ("first", "last"), [("", "\n"), ("", ""), ("before\n", "\n")], ids=["whole", "open", "second"]
)
def test_a_line_that_is_too_long_is_shown_without_its_middle(tmp_path, first, last):
    entries, lines, hidden, *_ = collected(
        tmp_path, f"print({first!r} + 'x' * 10_000 + 'end', end={last!r})"
    )
    shown = "".join(text for kind, text, *_ in entries if kind == "out")
    assert shown.startswith(first or "x")
    assert shown.endswith("xend" + last)
    assert hidden_in(entries) == [[0, hidden]]
    assert lines == 0
    assert len(shown) + hidden == len(first) + 10_003 + len(last)


def test_a_line_whose_end_alone_is_hidden_is_no_hidden_line(tmp_path):
    entries, *_ = collected(tmp_path, "print('x' * 10_000); print('the end')")
    assert [kind for kind, *_ in entries] == ["out", "hidden", "out"]
    assert entries[1][1:] == [0, 10_001 - len(entries[0][1])]
    assert entries[2][1] == "the end\n"


def test_the_bytes_of_an_endless_line_count_while_it_runs(tmp_path):
    body = """
print("x" * 100_000, end="")
assert transcript.collect()[1:3] == (0, 100_000 - 3072)
"""
    *_, hidden, _, _ = collected(tmp_path, body)
    assert hidden == 100_000 - 4096


def test_what_a_cell_has_hidden_is_not_hidden_again_after_its_end(tmp_path):
    body = """
for i in range(1000): print("x" * 20)
transcript.collect(final=True)
print("late")
late = transcript.begin_cell(limit_nbytes=4096)
os.write(answer, json.dumps([late, 0, 0, 0]).encode()); os._exit(0)
"""
    entries, *_ = collected(tmp_path, body)
    assert entries == [["out", "late\n"]]
