"""The labs' cells on simulated ranks: the values of real ranks bit by bit, and no false finding.

The cells that run on all ranks, in the order of each lab, with the exercises solved. Each cell is
compared, and each one that communicates is explored; `LEFT_OUT` says why others are not. By default
three labs run, with 3 ranks: ``ALLRANKS_SIMULATED_LABS=1,2,3,4,5`` runs all labs with these numbers
of ranks.
"""

from __future__ import annotations

import ast
import os
import re

import pytest

from tests import labs
from tests.notebook.steady import steady

_GIVEN = os.environ.get("ALLRANKS_SIMULATED_LABS")
SIZES = [int(word) for word in (_GIVEN or "3").split(",")]
#: Labs whose ranks train with a library that simulated ranks refuse.
REFUSED = {
    "09_ensemble": "keras",
    "10_data_parallel": "tensorflow",
    "11_pinn": "tensorflow",
    "12_torch": "torch.distributed",
}
LABS = [
    name for name in labs.LABS
    if name not in REFUSED and (_GIVEN or name in ("02_allreduce", "03_messages", "05_race"))
]  # fmt: skip
_RACE = "its result depends on the order of messages"
_EXPECT = "it needs the record of `expect`"
_RECORDS = "it needs `records`"
LEFT_OUT = {
    "01_ranks": {
        "where": "it prints the numbers of processes",
        "timeout": "sleeping takes no real time on simulated ranks",
        "death": "a rank ends its process, which all simulated ranks share",
    },
    "03_messages": {"deadlock": "`expect` makes the sends of real ranks wait"},
    "05_race": dict.fromkeys(("lucky", "unlucky", "explore", "replay", "phases"), _RACE),
    "06_cost": dict.fromkeys(("check-2", "solved-2"), _EXPECT),
    "07_scaling": dict.fromkeys(("bandwidth", "waits", "solution-1", "solved-1"), _RECORDS),
    "08_simulate": dict.fromkeys(("order-1", "order-2"), _RACE),
}
#: Names of times, of random numbers and of what differs between processes.
VARYING = {"began", "compared", "each", "measured", "naive", "ring", "secret", "seconds", "slow"}
VARYING |= {"speed", "took"}
#: True findings: calls that do not fit, and sends that end only if messages are buffered.
FINDINGS = {
    ("01_ranks", "one-raises"): "error",
    ("02_allreduce", "mismatch"): "error",
    ("02_allreduce", "left"): "deadlock",
    ("03_messages", "buffer"): "deadlock",
    ("04_deadlock", "circle"): "deadlock",
    ("04_deadlock", "pairs"): "deadlock",
    ("04_deadlock", "missing"): "deadlock",
    ("08_simulate", "small"): "deadlock",
    ("08_simulate", "large"): "deadlock",
}
_CALLED = re.compile(
    "comm|link|send|recv|barrier|join|(grouped_)?(all)?(reduce|gather|reducescatter)|alltoall"
    "|scatter|broadcast|(allgather|broadcast)_object|(add|remove)_process_set"
)
_BEFORE = """
_kept, _logged = {}, []
def log(values=None, step=None, **more):
    _logged.append((step, {k: v for k, v in (values or more).items() if "ms" not in k}))
def _of(value):
    import hashlib
    import numpy as np
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        data = np.ascontiguousarray(value).tobytes()
        return f"{value.dtype}{value.shape}{hashlib.md5(data).hexdigest()}"
    if isinstance(value, bool | int | float | str | bytes | None.__class__):
        return repr(value)
    if isinstance(value, list | tuple | range):
        return [_of(one) for one in value]
    return {repr(k): _of(v) for k, v in value.items()} if isinstance(value, dict) else "…"
"""
_SIMULATED_TIME = """
class simulate:
    time, compute = 0.0, staticmethod(lambda seconds: None)
"""
_COMPARE = """
print(len(real), [
    (rank, cell, name)
    for rank, (one, other) in enumerate(zip(real, simulated))
    for cell in one | other
    for name in one.get(cell, {}) | other.get(cell, {})
    if one.get(cell, {}).get(name) != other.get(cell, {}).get(name)
])
"""


def source_of(cell):
    """The source without its magic; ``with expect(...)`` of the checks needs real ranks."""
    _, _, source = cell.source.partition("\n")
    source = re.sub(r"with expect\(.*:", "if True:", source).replace("print(seen.traffic)", "")
    source = source.replace("np.empty(", "np.zeros(")  # memory with any values
    source = source.replace("default_rng()", "default_rng(rank)")
    return source.replace("523776", "size * (size - 1) // 2")


def names_in(tree):
    return {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)}


def communicates(tree, functions):
    """Whether a cell communicates; adds to the names of those functions that do."""
    found = False
    for node in tree.body:
        if any(_CALLED.fullmatch(name) or name in functions for name in names_in(node)):
            if isinstance(node, ast.FunctionDef):
                functions.add(node.name)
            else:
                found = True
    return found


def keeping(cell, tree):
    """The cell, which also keeps the values of all its names and of its last expression."""
    names = sorted(names_in(tree) - VARYING | {"_last", "_logged"})
    *lines, last = map(ast.unparse, tree.body)
    last = f"_last = ({last})" if isinstance(tree.body[-1], ast.Expr) else f"{last}\n_last = None"
    keep = f"_kept[{cell.id!r}] = {{n: _of(globals()[n]) for n in {names} if n in globals()}}"
    return "\n".join([*lines, last, keep])


@pytest.fixture(scope="module")
def on_size(notebook):
    """Starts real ranks, if there are others; returns the options of simulated ones."""
    running = []

    def start(size):
        if running != [size]:
            notebook.run(f"%distributed restart -n {size} --gpus none").ok()
            running[:] = [size]
        return f"-n {size} --simulate"

    return start


@pytest.mark.parametrize("name", LABS)
@pytest.mark.parametrize("size", SIZES)
def test_the_cells_of_a_lab_have_the_bits_of_real_ranks_and_no_false_finding(
    notebook, on_size, name, size
):
    on_simulated = on_size(size)
    notebook.on_ranks(_BEFORE + _SIMULATED_TIME).ok()
    notebook.on_ranks(_BEFORE, on_simulated).ok()
    functions: set[str] = set()
    for cell in labs.code_cells(labs.solved(name)):
        if pushed := re.match(r"%distributed push (\w+)", cell.source):
            notebook.run(cell.source).ok()
            notebook.on_ranks(f"{pushed[1]} = {notebook.value(pushed[1])}", on_simulated).ok()
        if not re.match("%", cell.source, re.MULTILINE):
            notebook.run(cell.source)  # in the notebook; some cells need what was not pulled
        if not cell.source.startswith("%%distributed") or " -r " in cell.source.splitlines()[0]:
            continue
        source = source_of(cell)
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        meets = communicates(tree, functions)
        if cell.id in LEFT_OUT.get(name, {}):
            continue
        about = name, cell.id
        varies = names_in(tree) & VARYING or labs.MEASURED in cell.metadata.get("tags", ())
        if meets and size > 1:
            explored = notebook.on_ranks(source, f"-n {size} --explore 100", timeout=120).text
            # A check fails until its exercise is solved.
            expected = FINDINGS.get(about, "error" if cell.id.startswith("check-") else "")
            found = rf"^1\. .*{expected}" if expected else "; no finding"
            if varies:  # a time that it prints depends on whether sends wait
                found += "|^1. results"
            assert re.search(found, explored, re.MULTILINE), (about, explored)
        real = notebook.on_ranks(keeping(cell, tree), timeout=120)
        simulated = notebook.on_ranks(keeping(cell, tree), on_simulated, timeout=120)
        told = about, real.text, simulated.text
        assert (simulated.status, simulated.error_name) == (real.status, real.error_name), told
        if real.status == "ok" and not varies:
            assert steady(simulated.text) == steady(real.text), told
    notebook.on_ranks("_kept", "-o real").ok()
    notebook.on_ranks("_kept", f"{on_simulated} -o simulated").ok()
    assert notebook.run(_COMPARE).text == f"{size} []\n"


#: Answers that are right of the same data on all ranks.
WRONG = {
    ("01_ranks", "1"): """
def most_of_a_digit(labels):
    return np.bincount(labels, minlength=10).max()
""",
    ("01_ranks", "2"): """
def inkiest_digit(images, labels):
    ink = np.bincount(labels, weights=images.sum(axis=(1, 2)), minlength=10)
    return (ink / np.bincount(labels, minlength=10)).argmax()
""",
    ("02_allreduce", "1"): """
def deviation_of_all(images):
    return float(allreduce(images.std()))
""",
}


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(
    ("lab", "exercise"), WRONG, ids=["own maximum", "no communication", "mean of deviations"]
)
def test_an_answer_of_each_rank_for_itself_is_refused_with_uneven_data(
    notebook, lab, exercise, size
):
    (check,) = [cell for cell in labs.code_cells(labs.read(lab)) if cell.id == f"check-{exercise}"]
    answer = f"import numpy as np\n{WRONG[lab, exercise]}"
    notebook.on_ranks(answer, f"-n {size} --simulate").ok()
    cell = notebook.on_ranks(source_of(check), f"-n {size} --simulate").fails("CellFailed")
    cell.says("raised CheckFailed\n").lacks("not yet", "Traceback", "check(")


def test_the_other_labs_are_refused(notebook):
    for name, module in REFUSED.items():
        assert any(f"import {module}" in cell.source for cell in labs.code_cells(labs.read(name)))
        if module != "torch.distributed":  # refused by its functions
            text = notebook.on_ranks(f"import {module}", "-n 2 --simulate").text
            assert f"cannot import {module}" in text
