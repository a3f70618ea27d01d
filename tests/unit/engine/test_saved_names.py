"""The variables of a rank, pickled for a new process."""

import json
import subprocess
import sys

import pytest

DEFINED = """
import collections, dataclasses, functools, threading
import numpy as np
scale, arr = 2, np.arange(3.0)
shared = [arr, arr]
def scaled(by=1): return by * scale * float(arr.sum())
class Base:
    def total(self): return scale
class Model(Base):
    def __init__(self): super().__init__(); self.arr = arr
    def total(self): return super().total() + float(self.arr.sum())
@dataclasses.dataclass
class Point:
    x: int
def counter():
    n = 0
    def up():
        nonlocal n
        n += 1
        return n
    return up, lambda: n
def factorial():
    def inner(k): return 1 if k < 2 else k * inner(k - 1)
    return inner
@functools.lru_cache
def cached(k): return k + scale
class Bad(Exception):
    def __init__(self, a, b): super().__init__(a)
model, point, (up, count), fact = Model(), Point(4), counter(), factorial()
up()
lock, gone, bad = threading.Lock(), (i for i in ()), Bad(1, 2)
def locked():
    with lock: return 5
"""
SAVE = """
import json, sys, types
from allranks.engine import saved_names
main = sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile(sys.argv[2], "In[1]", "exec"), vars(main))
values = {name: value for name, value in vars(main).items() if not name.startswith("__")}
parts, left = saved_names.dump(values, vars(main))
with open(sys.argv[1], "w") as file:
    json.dump([bytes(part).hex() for part in parts], file)
print(json.dumps(left))
"""
LOAD = """
import json, sys, types
from allranks.engine import saved_names
main = sys.modules["__main__"] = types.ModuleType("__main__")
parts = [bytearray.fromhex(part) for part in json.load(open(sys.argv[1]))]
saved_names.load(parts, vars(main))
exec("scale = 10; arr[0] = 1", vars(main))
print(json.dumps(eval(sys.argv[2], vars(main))))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("saved") / "parts")
    return path, json.loads(run(SAVE, path, DEFINED))


def run(program, *words):
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_functions_use_the_new_variables_and_shared_objects_stay_shared(saved):
    asked = (
        "[scaled(), model.total(), model.arr is arr is shared[0] is shared[1], point.x, up(), "
        "count(), fact(5), cached(1), type(model) is Model]"
    )
    assert json.loads(run(LOAD, saved[0], asked)) == [40.0, 14.0, True, 4, 2, 2, 120, 11, True]


def test_what_cannot_be_pickled_or_not_be_unpickled_is_left_out_by_name(saved):
    _, left = saved
    assert sorted(left) == ["bad", "gone", "lock"]
    assert left["lock"] == "TypeError: cannot pickle '_thread.lock' object"
