"""The parts of an ensemble that need no ranks: options, results, stores, estimates, predictions."""

import json
import os
import pickle
import shlex
import subprocess
import sys
import threading
from array import array
from functools import partial
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pytest

from allranks import own_files
from allranks.cluster.options import ClusterOptions
from allranks.cluster.variables import pack, sent_nbytes
from allranks.collectives.host.memory import Segment
from allranks.errors import MissingDependency, UsageError
from allranks.features.ensemble import grid
from allranks.features.ensemble import runs as predict
from allranks.features.ensemble.early import Early, remaining_seconds
from allranks.features.ensemble.magics import options_parser
from allranks.features.ensemble.mapping import without_call
from allranks.features.ensemble.member import FAILED, FINISHED, WAITING, Arena, Member, SharedResult
from allranks.features.ensemble.rank import numbers_of, summary_of
from allranks.features.ensemble.runs import Runs
from allranks.features.ensemble.store import Store, key_of
from allranks.magics.options import parse_cell
from allranks.magics.shell import CELL_MAGICS, words_for
from allranks.records import wire


def parse(line):
    return grid.parse_line(line, options_parser())


def packed(value):
    buffers = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [head, *(buffer.raw() for buffer in buffers)]
    target = bytearray(wire.lay_out(parts)[-1])
    wire.fill(target, parts)
    return bytes(target)


def test_options_are_offered_while_the_feature_is_loaded(monkeypatch):
    line = "%%ensemble lr=1,2 --"
    assert "--ranks-per-member" not in words_for(line)
    monkeypatch.setitem(CELL_MAGICS, "ensemble", options_parser)
    assert "--ranks-per-member" in words_for(line)
    assert "--ranks-per-member" not in words_for(line[1:])


def test_options_may_stand_anywhere_on_the_line_and_some_are_the_clusters():
    made = parse("lr=1,2 -o table --store 'my runs' seed=0:3 --retry-failed --metric loss -n 4")
    assert made.words == ["lr=1,2", "seed=0:3"]
    assert (made.name, made.store, made.retry_failed) == ("table", "my runs", True)
    assert made.wanted() == ("loss", True)
    assert len(made.members({})) == 6
    asked = "-n 4 --gpus 0,1 --on local --preload math,json --exclusive"
    made = parse(f"lr=1,2 {asked} seed=0:3")
    assert made.words == ["lr=1,2", "seed=0:3"]
    assert made.cluster == ClusterOptions(4, "0,1", "local", "math,json", exclusive=True)
    assert made.cluster == parse_cell(asked).cluster
    assert parse("x=1").cluster == ClusterOptions()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("x=1 --foo", "unrecognized arguments: --foo"),
        ("x=1 --store", "argument --store: expected one argument"),
        ("x=1 --store ''", "expected a folder after --store, found ''"),
        ("x=1 -o 1a", "expected the name of a variable after -o, found '1a'"),
        ("x=1 --ranks-per-member 0", "expected --ranks-per-member of 1 or more, found 0"),
        ("x=1 --timeout -1", "expected --timeout in seconds above 0"),
        ("x=1 --stop halving", "needs --metric.*--stop halving --metric loss"),
        ("x=1 --stop best --metric loss", "invalid choice: 'best'"),
        ("x=1 --grace 3", "--grace needs --stop"),
        ("x=1 --metric loss:low", "expected --metric NAME, NAME:min or NAME:max"),
        ("x=1 --random none", "invalid int value"),
    ],
)
def test_a_line_that_cannot_be_understood_says_what_was_expected(line, said):
    with pytest.raises(UsageError, match=f"(?s){said}"):
        parse(line)


def test_numbers_of_a_result_are_told_and_arrays_and_numbers_beyond_all_floats_are_not():
    value = {"a": 1, "b": np.float32(0.5), "c": np.array([2.0]), "d": np.ones(3), "e": "x", 7: True}
    assert numbers_of(value) == {"a": 1, "b": 0.5, "c": 2.0, "7": True}
    assert numbers_of(0.25) == {"result": 0.25}
    assert summary_of({"w": np.ones((2, 3)), "acc": 0.5}) == "w array (2, 3) float64, acc 0.5"
    assert numbers_of({"n": 10**400, "m": 1}) == {"m": 1}
    assert summary_of(10**400) == "int"


@pytest.mark.parametrize("value", [None, 3, {"w": np.arange(1e5), "v": [np.ones(3), "x"]}])
def test_a_packed_value_comes_back_and_can_be_written_to(value):
    back = wire.unpack(bytearray(packed(value)))
    assert repr(back) == repr(value)
    if isinstance(value, dict):
        back["w"][0] = 5


def test_shared_memory_of_ours_outlives_its_rank_and_no_other_is_taken(tmp_path):
    data = packed({"w": np.arange(1e5)})
    segment = Segment(len(data))
    segment.memory[: len(data)] = data
    shared = SharedResult(segment.address, len(data))
    segment.memory.close()
    segment.close()
    place = Arena().put(shared)
    assert place.load()["w"].sum() == np.arange(1e5).sum()
    (tmp_path / "file").write_bytes(b"x")
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(OSError, match="no shared memory"):
        SharedResult(f"/proc/{os.getpid()}/fd/{descriptor}", 1)
    os.close(descriptor)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_shared_memory_of_another_user_is_not_taken():
    # As another user's process, which has the id that a rank of a container has there.
    segment = Segment(8192)
    os.chown(segment.fd, 65534, 65534)
    with pytest.raises(PermissionError, match="to be yours, found that user 65534"):
        SharedResult(segment.address, 1)
    segment.close()


def test_many_results_need_one_descriptor():
    arena = Arena()
    before = len(os.listdir("/proc/self/fd"))
    places = [arena.put(packed(np.full(10_000, n))) for n in range(50)]
    # Fewer where what earlier tests held has been let go meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= before
    assert [place.load()[0] for place in places] == list(range(50))


def ended(number, **values):
    member = Member(number, values, state=FINISHED, seconds=1.5, ranks=(2,), numbers={"acc": 0.5})
    member.log("loss", array("d", [0, 1]), array("d", [3.0, float("nan")]))
    return member


def test_what_is_in_a_store_and_not_ours_does_not_keep_it_locked(tmp_path):
    folder = str(tmp_path / "store")
    Store(folder, "pass").close()
    (tmp_path / "store" / "a.tmp").mkdir()
    Store(folder, "pass").close()
    Store(folder, "pass").close()


def test_a_folder_that_is_in_use_or_that_cannot_be_a_store_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"cannot be written: .*Type another folder"):
        Store("~nobody-of-this-name/x", "pass")
    store = Store(str(tmp_path / "s"), "x")
    with pytest.raises(UsageError, match="is being written by another notebook"):
        Store(str(tmp_path / "s"), "x")
    store.close()
    Store(str(tmp_path / "s"), "x").close()
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="with other files in it"):
        Store(str(tmp_path), "x")
    with pytest.raises(UsageError, match="cannot be written"):
        Store(str(tmp_path / "thesis.txt"), "x")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_members_that_another_user_has_stored_are_not_unpickled_unless_told(tmp_path):
    store = Store(str(tmp_path), "x")
    store.write(ended(0, lr=0.1), packed(42))
    (mine,) = store.read([Member(0, {"lr": 0.1})])
    store.close()
    (path,) = tmp_path.glob("*.member")
    os.chown(path, 65534, 65534)
    with pytest.raises(PermissionError, match="another user's by now"):
        mine.place.load()
    with pytest.raises(UsageError, match=r"found 1 of user 65534.*add: --trust-store"):
        Store(str(tmp_path), "x")
    trusting = Store(str(tmp_path), "x", trusted=True)
    assert trusting.read([member := Member(0, {"lr": 0.1})]) == [member]
    assert member.result == 42
    trusting.close()


@pytest.mark.parametrize("how", ["others can write it", "it is a link", "it is a pipe"])
def test_a_member_that_another_user_may_have_written_is_not_unpickled(tmp_path, how):
    folder = tmp_path / "store"
    store = Store(str(folder), "x")
    store.write(ended(0, lr=0.1), packed(42))
    (mine,) = store.read([Member(0, {"lr": 0.1})])
    (path,) = folder.glob("*.member")
    if how == "others can write it":
        path.chmod(0o606)
    elif how == "it is a link":
        path.symlink_to(path.rename(tmp_path / "elsewhere"))
    else:
        path.unlink()
        os.mkfifo(path)
    assert store.read([Member(0, {"lr": 0.1})]) == []
    with pytest.raises(OSError, match=r"others can write to it|symbolic links|not permitted"):
        mine.place.load()
    store.close()
    if how != "it is a pipe":
        with pytest.raises(UsageError, match=r"(?s)found 1 that others can write.*--trust-store"):
            Store(str(folder), "x")


def test_nothing_of_a_file_that_others_can_write_is_read_into_memory(tmp_path, monkeypatch):
    store = Store(str(tmp_path), "x")
    store.write(ended(0, lr=0.1), packed(42))
    (path,) = tmp_path.glob("*.member")
    path.chmod(0o606)
    with monkeypatch.context() as patched:
        patched.setattr("json.loads", lambda line: pytest.fail("a line was read"))
        assert store.read([Member(0, {"lr": 0.1})]) == []
    store.close()
    path.unlink()
    os.truncate(tmp_path / "ensemble.json", 1 << 40)
    with pytest.raises(UsageError, match=r"ensemble.json cannot be read"):
        Store(str(tmp_path), "x")


LONG = "\x1b[2J" * 1_000_000


def test_what_another_user_has_put_into_a_store_is_not_shown_as_it_is(tmp_path):
    """Escape codes would act on a terminal, and a long text would fill the notebook."""
    about = tmp_path / "ensemble.json"
    for kept in ({"version": "\x1b[2J\n" * 10_000, "source": "x"}, {"version": 1, "source": LONG}):
        about.write_text(json.dumps(kept))
        with pytest.raises(UsageError, match=r"expected format|another cell") as caught:
            Store(str(tmp_path), "x")
        assert "\x1b" not in str(caught.value)
        assert len(str(caught.value)) < 2000
    about.unlink()
    (tmp_path / ".lock").unlink()
    store = Store(str(tmp_path), "x")
    store.close()
    (tmp_path / "\x1b[2J\n.member").touch(mode=0o666)
    (tmp_path / "\x1b[2J\n.member").chmod(0o666)
    with pytest.raises(UsageError, match="others can write") as caught:
        Store(str(tmp_path), "x")
    assert "\x1b" not in str(caught.value)


def test_a_member_that_came_after_the_check_is_not_read_to_run_it_again(tmp_path):
    """A line of 1 TB would take all memory."""
    store = Store(str(tmp_path), "x")
    path = tmp_path / "late.member"
    path.touch()
    os.truncate(path, 1 << 40)
    path.chmod(0o666)
    store.forget_failed()
    assert path.exists()
    store.close()


def test_a_link_that_waits_in_a_store_is_not_followed(tmp_path):
    (tmp_path / "diary").write_text("private")
    folder = tmp_path / "store"
    store = Store(str(folder), "x")
    store.write(ended(0, lr=0.1), packed(42))
    (path,) = folder.glob("*.member")
    for name in (f"{path.name}.{os.getpid()}.tmp", ".lock"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / "diary")
    store.write(ended(0, lr=0.1), packed(43))
    store.close()
    with pytest.raises(UsageError, match=r"cannot be written: .*symbolic links"):
        Store(str(folder), "x")
    assert (tmp_path / "diary").read_text() == "private"


@pytest.mark.parametrize("mode", [0o777, 0o660])
def test_a_store_where_others_can_write_says_which_command_cures_it_or_needs_trust(
    tmp_path, monkeypatch, mode
):
    """As on file systems without rights, and on volumes of which a group gets all files."""
    monkeypatch.setattr(own_files, "_is_own_group", lambda gid: False)
    store = Store(str(tmp_path), "x")
    store.write(ended(0, lr=0.1), packed(42))
    store.close()
    for path in (*tmp_path.glob("*.member"), tmp_path / ".lock"):
        path.chmod(mode)
    with pytest.raises(UsageError) as refused:
        Store(str(tmp_path), "x")
    said = str(refused.value)
    assert f"found 2 that others can write, as {tmp_path}/.lock with mode {mode:o}" in said
    assert "add: --trust-store" in said
    Store(str(tmp_path), "x", trusted=True).close()
    cure = said.partition("type: !")[2].partition("\n")[0]
    subprocess.run(shlex.split(cure), check=True)
    Store(str(tmp_path), "x").close()


def cut_short(data):
    return data[:-10]


def with_a_damaged_head(data):
    head, _, rest = data.partition(b"\n")
    head = json.loads(head)
    head["history"]["other"] = "damaged"
    return json.dumps(head).encode() + b"\n" + rest


@pytest.mark.parametrize("damaged", [cut_short, with_a_damaged_head])
def test_a_file_that_is_damaged_is_as_if_it_were_not_there(tmp_path, damaged):
    store = Store(str(tmp_path), "x")
    store.write(ended(0, lr=0.1), packed(np.ones(100)))
    (path,) = tmp_path.glob("*.member")
    path.write_bytes(damaged(path.read_bytes()))
    member = Member(0, {"lr": 0.1})
    assert store.read([member]) == []
    assert (member.state, member.history, member.metrics) == (WAITING, {}, {})
    store.close()


def test_a_store_with_a_folder_for_a_member_is_refused_when_it_is_to_run_again(tmp_path):
    store = Store(str(tmp_path), "x")
    (tmp_path / "a.member").mkdir()
    with pytest.raises(UsageError, match=r"cannot be written: .*Is a directory"):
        store.forget_failed()
    store.close()


def test_a_result_that_is_gone_or_damaged_says_so(tmp_path):
    store = Store(str(tmp_path), "x")
    store.write(ended(0, lr=0.1), packed([1, 2]))
    (member,) = store.read([Member(0, {"lr": 0.1})])
    store.close()
    (path,) = tmp_path.glob("*.member")
    head, _, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(head + b"\n" + b"\xff" * len(rest))
    with pytest.raises(UsageError, match="the notebook can read, found in member 0: "):
        member.result  # noqa: B018
    path.unlink()
    with pytest.raises(UsageError, match=r"result of member 0 no longer exists.*Run the"):
        member.result  # noqa: B018


def test_members_with_the_same_values_are_kept_apart(tmp_path):
    store = Store(str(tmp_path), "x")
    for number in range(2):
        store.write(ended(number, lr=0.1), packed(number))
    store.close()
    again = Store(str(tmp_path), "x")
    assert [m.result for m in again.read([Member(n, {"lr": 0.1}) for n in range(3)])] == [0, 1]
    again.close()


def test_values_have_a_key_that_tells_them_apart_also_where_they_cannot_be_pickled():
    keys = {key_of({"a": value}) for value in (1, 1.0, True, "1", (1,), [1], None, np.ones(1))}
    assert len(keys) == 8
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    assert key_of({"a": np.ones(3)}) == key_of({"a": np.ones(3)})
    circle = []
    circle.append(circle)
    values = [threading.Lock(), circle, partial(lambda x: x), partial(lambda x: x + 1)]
    assert len({key_of({"a": value}) for value in values}) == 4


BEFORE = """
import functools
import types
scale = 1
def helper(x, by=2): return scale * x * by
class Base:
    def m(self): return 1
class Model(Base):
    size = 3
    def __init__(self, n): self.n = n
    def fit(self, x): return helper(x) + self.n
def make(k):
    def inner(x): return x + k
    return inner
def plain(x, k=2): return x * k
def named(x, *, k=2): return x * k
def user(x): return helper(x)
@functools.wraps(plain)
def wrapped(x): return plain(x)
closure, method, instance = make(1), Model(1).fit, Model(1)
part = functools.partial(plain, k=3)
of_library = types.SimpleNamespace(f=helper)
cached = functools.cache(helper)
def calls_cached(x): return cached(x)
class Meta(type):
    def __call__(cls, x): return 4
class Made(metaclass=Meta):
    @functools.cached_property
    def slow(self): return 5
    times = functools.partialmethod(helper)
pair = set()
def circular(x): return pair
pair |= {circular, helper}
recursive = lambda n: n and recursive(n - 1)
"""
DEPENDS = [
    ("plain", "k=2): return x * k", "k=3): return x * k"),
    ("named", "*, k=2", "*, k=3"),
    ("user", "by=2", "by=3"),
    ("user", "scale = 1", "scale = 2"),
    ("wrapped", "def plain(x, k=2)", "def plain(x, k=3)"),
    ("closure", "make(1)", "make(2)"),
    ("method", "+ self.n", "- self.n"),
    ("method", "Model(1).fit", "Model(2).fit"),
    ("instance", "size = 3", "size = 4"),
    ("instance", "return 1", "return 2"),
    ("part", "k=3)", "k=4)"),
    ("Model", "by=2", "by=3"),
    ("of_library", "by=2", "by=3"),
    ("cached", "by=2", "by=3"),
    ("calls_cached", "by=2", "by=3"),
    ("Made", "return 4", "return 5"),
    ("Made", "return 5", "return 6"),
    ("Made", "by=2", "by=3"),
    ("circular", "by=2", "by=3"),
]


def keys_after(source):
    notebook = ModuleType("__main__")
    # As in a kernel, where pickle finds a function by its name.
    with patch.dict(sys.modules, __main__=notebook):
        exec(compile(source, f"cell {len(source)}", "exec"), vars(notebook))
        values = {name for name, *_ in DEPENDS} | {"recursive"}
        return {name: key_of({"f": getattr(notebook, name)}) for name in values}


@pytest.mark.parametrize(("name", "old", "new"), DEPENDS)
def test_a_key_changes_with_what_a_result_depends_on(name, old, new):
    assert old in BEFORE
    assert keys_after(BEFORE.replace(old, new))[name] != keys_after(BEFORE)[name]


def test_a_key_is_the_same_wherever_the_code_stands_and_in_every_process():
    assert keys_after("\n\n# a comment\n" + BEFORE) == keys_after(BEFORE)
    program = "import json\nfrom tests.unit.ensemble.test_parts import keys_after, BEFORE\n"
    program += "print(json.dumps(keys_after(BEFORE)))"
    told = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "3"},
    )
    assert json.loads(told.stdout) == keys_after(BEFORE)


def test_a_value_is_shown_in_one_line_that_a_notebook_can_have():
    class Shy(int):
        def __repr__(self):
            raise ValueError

    assert Member(0, {"a": Shy(3)}).label == "a=<Shy>"
    text = "two\nlines \x1b[31m" + chr(0xD83D) + " é"
    assert Member(0, {"a": text}).label == r"a=two\nlines \x1b[31m\ud83d é"


def test_the_remaining_time_is_estimated_from_members_that_ended():
    assert remaining_seconds([1.0, 2.0], [0.5], 10, 2) is None  # too few
    assert remaining_seconds([2.0] * 5, [1.0, 1.0], 4, 2) == (5.0, 5.0)
    low, high = remaining_seconds([1.0, 2.0, 3.0, 2.0], [], 40, 4)
    assert low < 20 < high
    # One that runs longer than any before it leaves the end open.
    low, high = remaining_seconds([1.0] * 4, [10.0], 0, 1)
    assert 0 <= low < high <= 10


def test_the_median_stops_what_is_worse_and_compares_at_finite_steps():
    pytest.importorskip("optuna", reason="pip install 'allranks[early]'")
    stopper = Early("median", lower=False, grace=2)
    for member in range(5):
        assert not stopper.report(member, [(step, float(member)) for step in range(5)])
        stopper.ended(member, float(member))
    assert stopper.report(5, [(step, 0.0) for step in range(5)])
    assert not stopper.report(6, [(step, 9.0) for step in range(5)])
    stopper = Early("halving", lower=True, grace=1)
    assert not stopper.report(0, [(float("nan"), 1.0), (float("inf"), 1.0)])


def test_without_optuna_it_is_said_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingDependency, match=r"pip install 'allranks\[early\]'"):
        Early("halving", True, None)


def test_the_best_is_found_by_name_and_direction():
    assert grid.read_metric("val_loss") == ("val_loss", True)
    assert grid.read_metric("accuracy") == ("accuracy", False)
    assert grid.read_metric("score:min") == ("score", True)
    runs = table()
    assert runs.best("accuracy").number == 2
    assert runs.best("accuracy", mode="min").number == 0
    assert runs.best().number == 2
    with pytest.raises(UsageError, match=r"named 'f1' in a finished member, found accuracy\."):
        runs.best("f1")
    with pytest.raises(UsageError, match="expected a number named 'loss' in a finished member"):
        runs.best("loss")
    with pytest.raises(UsageError, match="expected a number in a finished member, found none"):
        Runs([Member(0, {"lr": 1})]).best()


def table():
    members = [ended(n, lr=10.0**-n) for n in range(3)]
    for member in members:
        member.numbers = {"accuracy": 0.5 + member.number / 10}
    return Runs([*members, Member(3, {"lr": 9.0}, state=FAILED, error="ValueError: no")])


def test_the_table_tells_parameters_metrics_and_errors():
    runs = table()
    assert [row["error"] for row in runs.rows()] == ["", "", "", "ValueError: no"]
    assert runs.rows()[1]["lr"] == 0.1
    assert [m.number for m in runs.failed] == [3]
    assert [m.number for m in runs.where(lr=0.1)] == [1]
    assert runs[-1].result is None
    assert "0.7 ★" in repr(runs)
    assert "<b>" not in runs._repr_html_()


def test_the_table_says_which_value_orders_it_and_how_to_choose():
    runs = Runs([ended(n, w=n) for n in range(2)])
    for member in runs:
        member.numbers = {"result": 1.5 + member.number}
    order = "by the highest result; another order: --metric loss, or runs.best('loss')"
    assert runs.order() == order
    assert repr(runs).endswith(f"★ the best of those that have finished, {order}")
    for member in runs:
        member.series.clear()
    assert runs.order() == "by the highest result"
    assert Runs(list(runs), metric=("result", False)).order() == ""


def test_numbers_with_the_name_of_a_column_stay_in_the_table():
    runs = table()
    for member in runs.finished:
        member.numbers = {"error": member.number / 8, "member": 7}
    runs[0].numbers["result"] = 0.25
    assert [row["error"] for row in runs.rows()] == [0, 0.125, 0.25, None]
    assert [row["member_error"] for row in runs.rows()] == ["", "", "", "ValueError: no"]
    assert (runs.rows()[0]["result"], runs.rows()[0]["member_result"]) == (0.25, "")
    pytest.importorskip("pandas", reason="pip install pandas")
    frame = runs.to_pandas()
    assert frame.loc[2, "error"] == 0.25
    assert frame.loc[3, "member_error"] == "ValueError: no"


def test_the_table_is_a_pandas_table_where_there_is_pandas(monkeypatch):
    pytest.importorskip("pandas", reason="pip install pandas")
    frame = table().to_pandas()
    assert list(frame["accuracy"][:3]) == [0.5, 0.6, 0.7]
    assert frame.loc[3, "error"] == "ValueError: no"
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingDependency, match=r"pip install pandas, or use runs\.rows\(\)"):
        table().to_pandas()


@pytest.mark.parametrize("choose", [lambda runs: runs, lambda runs: runs[0]])
def test_members_are_not_sent_to_ranks_which_do_not_have_their_results(choose):
    sent = choose(table())
    with pytest.raises(UsageError) as found:
        pack({"x": 1, "sent": sent}, "the ranks")
    said = str(found.value)
    assert said.startswith("sent cannot be sent to the ranks: the results of an ensemble's members")
    assert "begin the cell with: %%local" in said
    assert said.endswith("best = runs.best().result)")
    # So the hint of a NameError on the ranks does not offer to copy them.
    assert sent_nbytes(sent) is None


def test_a_tie_goes_to_the_least_label_and_probabilities_are_no_votes():
    labels, share = predict.vote(np.array([["b", "a"], ["a", "a"]]))
    assert (list(labels), list(share)) == (["a", "a"], [0.5, 1.0])
    with pytest.raises(UsageError, match=r"argmax\(axis=-1\)"):
        predict.vote(np.ones((2, 3)) / 3)


@pytest.mark.parametrize(
    ("results", "name", "said"),
    [
        ([], "p", "expected at least one member that has finished"),
        ([(0, {"q": 1})], "p", "expected 'p' in the result of every member, found in member 0: q"),
        ([(0, np.ones(2)), (5, np.ones(3))], None, r"\(2,\) in member 0 and \(3,\) in member 5"),
    ],
)
def test_predictions_that_do_not_fit_together_are_refused(results, name, said):
    with pytest.raises(UsageError, match=said):
        predict.gather(results, name)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda runs: runs.add(lr=1.0), "the ensemble has ended, so nothing can be added"),
        (lambda runs: runs.stop(), "the ensemble has ended, so nothing can be stopped"),
        (lambda runs: runs.stop(9), "expected a member between 0 and 3, found 9"),
        (lambda runs: runs.stop("3"), "expected a member between 0 and 3, found '3'"),
        (lambda runs: runs.add(seed=1), "expected values for lr, found seed"),
        (lambda runs: runs.add(), "expected values, found none"),
        (lambda runs: runs.add("lr"), "expected name=values"),
        (lambda runs: runs.where(rate=1), "expected a parameter, lr, found rate"),
    ],
)
def test_what_cannot_be_asked_of_an_ensemble_is_refused(ask, said):
    with pytest.raises(UsageError, match=said):
        ask(table())


#: As a rank with IPython 9 sends it.
OF_AN_ITEM = (
    "{0} at line 1: result = function(*arguments)\nZeroDivisionError   Traceback (...)\n"
    "\x1b[36mCell\x1b[39m\x1b[36m \x1b[39m\x1b[32mIn[0]\x1b[39m\x1b[32m, line 1\x1b[39m\n"
    "\x1b[32m----> \x1b[39m\x1b[32m1\x1b[39m result = \x1b[30;43mfunction\x1b[39m(*arguments)\n\n"
    "Cell In[3], line 2, in function(x)\n----> 2     return 1 / x\n\nZeroDivisionError: division"
)


def test_the_report_of_an_item_of_map_begins_with_the_function():
    first = "rank 1 (vm, cpu) raised ZeroDivisionError"
    title, _, *lines = without_call(OF_AN_ITEM.format(first)).splitlines()
    assert (title, lines[0]) == (first, "Cell In[3], line 2, in function(x)")
    assert without_call("it exceeded its timeout of 3 s") == "it exceeded its timeout of 3 s"
