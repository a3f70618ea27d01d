"""Objects of cells keep their classes and functions on the rank that receives them."""

import linecache
import pickle
import subprocess
import sys
import textwrap
from types import ModuleType

import pytest

from allranks.collectives.ops import objects
from allranks.errors import UsageError

KINDS = """
import abc, collections, dataclasses, enum, functools, typing

class Plain:
    made = 0
    def __init__(self, value=0):
        Plain.made += 1
        self.value = value
    def __add__(self, other):
        return Plain(self.value + other.value) if isinstance(other, Plain) else NotImplemented
class Sub(Plain): pass
class Outer:
    class Inner:
        def method(self): return super().__hash__()
class Error(ValueError): pass
class Color(enum.Enum):
    RED, BLUE = 1, "b"
@dataclasses.dataclass(frozen=True)
class Point:
    x: int = 0
    y: list = dataclasses.field(default_factory=list)
@dataclasses.dataclass(slots=True)
class Slots:
    x: int = 0
class Base(abc.ABC):
    @property
    @abc.abstractmethod
    def name(self): ...
class Named(Base):
    name = "named"
Pair = collections.namedtuple("Pair", "x y")
class Typed(typing.NamedTuple):
    x: int
def outer():
    class Local:
        def method(self): return Local
    return Local
Local = outer()
def function(x, y=3, *, z=[1]): return x + y + scale + len(z)
def around(function):
    calls = 0
    @functools.wraps(function)
    def counted(*arguments):
        nonlocal calls
        calls += 1
        return function(*arguments)
    return counted
@around
def wrapped(x): return x
"""
NAMES = (
    *(
        "Plain",
        "Sub",
        "Outer",
        "Error",
        "Color",
        "Point",
        "Slots",
        "Base",
        "Named",
        "Pair",
        "Typed",
    ),
    *("Local", "function", "wrapped"),
)


class Rank:
    """The cells of a rank, one after the other, in a module ``__main__`` of its own."""

    def __init__(self, *cells):
        self.module = ModuleType("__main__")
        for cell in cells:
            self.run(cell)

    def run(self, source, name=None):
        source = textwrap.dedent(source)
        name = name or f"<cell {hash(source)}>"
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        with self:
            exec(compile(source, name, "exec"), vars(self.module))

    def __enter__(self):
        self._before = sys.modules["__main__"]
        sys.modules["__main__"] = self.module

    def __exit__(self, *raised):
        sys.modules["__main__"] = self._before

    def __getattr__(self, name):
        return getattr(self.module, name)

    def send(self, value):
        with self:
            return objects.dumps(value)

    def receive(self, data):
        with self:
            return pickle.loads(data)


def moved(value, sender, receiver):
    return receiver.receive(sender.send(value))


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_receives_its_own_class_or_function(name):
    first, second = Rank(KINDS), Rank(KINDS)
    assert moved(getattr(first, name), first, second) is getattr(second, name)


def test_instances_members_and_keys_are_those_of_the_receiver():
    first, second = Rank(KINDS), Rank(KINDS)
    assert moved(first.Color.BLUE, first, second) is second.Color.BLUE
    assert moved({first.Color.RED: 1}, first, second)[second.Color.RED] == 1
    assert moved({first.function: 2}, first, second)[second.function] == 2
    assert moved(first.Point(1), first, second) == second.Point(1)
    assert isinstance(moved(first.Outer.Inner(), first, second), second.Outer.Inner)
    assert type(moved(first.Error("no"), first, second)) is second.Error
    assert (moved(first.Sub(1), first, second) + second.Sub(2)).value == 3


def test_what_a_program_changes_on_one_rank_is_no_other_definition():
    first, second = Rank(KINDS), Rank("\n\n# Other lines above it.", KINDS)
    first.run(
        "scale = 10\nfor one in range(3): Plain()\nwrapped(1)\nfunction.__kwdefaults__['z'] += [2]"
    )
    second.run("scale = 20")
    assert type(moved(first.Plain(), first, second)) is second.Plain
    assert moved(first.wrapped, first, second) is second.wrapped
    assert moved(first.function, first, second)(1) == 25  # with the variables of the receiver


OTHERS = {
    "a method": ("class A:\n def f(self): return 1", "class A:\n def f(self): return 2"),
    "a number": ("class A: x = 1", "class A: x = 2"),
    "a number beside a method": (
        "class A:\n x = 1\n def f(self): pass",
        "class A:\n x = 2\n def f(self): pass",
    ),
    "a base": ("class A(ValueError): pass", "class A(KeyError): pass"),
    "a member": (
        "import enum\nclass A(enum.Enum): X = 1",
        "import enum\nclass A(enum.Enum): X = 2",
    ),
    "a field": (
        "import dataclasses\n@dataclasses.dataclass\nclass A: x: int",
        "import dataclasses\n@dataclasses.dataclass\nclass A: x: float",
    ),
    "a default": ("def A(x=1): return x", "def A(x=2): return x"),
    "an inner function": ("def A(): return lambda: 1", "def A(): return lambda: 2"),
    "a variable of a function": (
        "def make(n):\n class A:\n  def f(self): return n\n return A\nA = make(1)",
        "def make(n):\n class A:\n  def f(self): return n\n return A\nA = make(2)",
    ),
    "a method of a base": (
        "class B:\n def f(self): return 1\nclass A(B):\n def g(self): pass",
        "class B:\n def f(self): return 2\nclass A(B):\n def g(self): pass",
    ),
    "a metaclass": (
        "class M(type):\n def f(kind): return 1\nclass A(metaclass=M): pass",
        "class M(type):\n def f(kind): return 2\nclass A(metaclass=M): pass",
    ),
    "a class in a class": ("class A:\n class B: x = 1", "class A:\n class B: x = 2"),
    "a partial function": (
        "import functools\ndef g(x): pass\nclass A: f = functools.partial(g, 1)",
        "import functools\ndef g(x): pass\nclass A: f = functools.partial(g, 2)",
    ),
    "a default of a function in a function": (
        "def make(n):\n class A:\n  def f(self, g=lambda: n): return g()\n return A\nA = make(1)",
        "def make(n):\n class A:\n  def f(self, g=lambda: n): return g()\n return A\nA = make(2)",
    ),
    "a list of functions": (
        "def make(n):\n class A:\n  def f(self): return n\n return A\nA = make([lambda: 1])",
        "def make(n):\n class A:\n  def f(self): return n\n return A\nA = make([lambda: 2])",
    ),
    "a list of a function": (
        "def make(n):\n class A:\n  def f(self): return n\n return A\nA = make([object()])",
        "def make(n):\n class A:\n  def f(self): return n\n return A\nA = make([object()])",
    ),
}


@pytest.mark.parametrize(("mine", "other"), OTHERS.values(), ids=OTHERS.keys())
def test_another_definition_of_the_same_name_is_not_taken(mine, other):
    first, second = Rank(mine), Rank(mine, other)
    assert moved(first.A, first, second) is not second.A
    assert moved(second.A, second, first) is not first.A


def test_an_older_class_is_sent_by_its_value():
    """A loop has made three classes of one name, whose methods are alike."""
    cell = "made = []\nfor n in range(3):\n class A:\n  x = n\n  def f(self): pass\n made.append(A)"
    first, second = Rank(cell), Rank(cell)
    assert moved(first.made[0], first, second).x == 0
    assert moved(first.A, first, second) is second.A


MADE = {
    "a class": """
        def kinds(n):
            class Kind:
                def value(self): return n
            return Kind
        """,
    "a partial function": """
        from functools import partial
        def value(n): return n
        def kinds(n): return partial(value, n)
        """,
    "a method": """
        class Kind:
            def __init__(self, n): self.n = n
            def value(self): return self.n
        def kinds(n): return Kind(n).value
        """,
}


@pytest.mark.parametrize("kinds", MADE.values(), ids=MADE.keys())
def test_classes_that_a_function_has_made_of_different_values_differ(kinds):
    cells = (
        kinds,
        """
        def make(kind):
            class Made:
                def kind(self): return kind
            return Made
        first, second = make(kinds(1)), make(kinds(2))
        """,
    )
    one, other = Rank(*cells), Rank(*cells)
    assert moved(one.first, one, other) is not other.second


def test_a_subclass_of_another_ranks_class_is_the_receivers():
    first, second = Rank("class A:\n x = 1\n def f(self): pass"), Rank()
    second.module.A = moved(first.A, first, second)
    both = "class B(A): pass"
    first.run(both)
    second.run(both)
    assert moved(first.B, first, second) is second.B


def test_a_class_of_one_rank_alone_is_one_class_on_the_others_and_on_its_way_back():
    """In another process, as cloudpickle finds the class itself in this one."""
    first = Rank("n = 1", "class A:\n  def f(self): return n\nclass B(A):\n  def g(self): return A")
    program = (
        "import sys, pickle\n"
        "from allranks.collectives.ops import objects\n"
        "sys.stdin = sys.stdin.buffer\n"
        "one, two = (pickle.loads(bytes.fromhex(line.decode().strip())) for line in sys.stdin)\n"
        "assert type(one) is type(two) and one.g() is type(one).__bases__[0]\n"
        "print(one.f(), objects.dumps(one).hex())"
    )
    sent = "\n".join(first.send(first.B()).hex() for _ in range(2))
    done = subprocess.run(
        [sys.executable, "-c", program], input=sent, capture_output=True, text=True, check=True
    )
    value, back = done.stdout.split()
    assert value == "1"
    first.run("n = 2")
    own = first.B
    received = first.receive(bytes.fromhex(back))
    assert type(received) is own
    assert received.f() == 2  # its methods are as before
    first.run("class B: pass")
    assert type(first.receive(bytes.fromhex(back))) is own


def test_a_class_whose_value_cannot_be_pickled_is_sent_by_its_name():
    cell = (
        "import threading\nlock = threading.Lock()\nclass A:\n  def f(self): return lock.locked()"
    )
    first, second, other = Rank(cell), Rank(cell), Rank(cell, "class A: pass")
    assert type(moved(first.A(), first, second)) is second.A
    with pytest.raises(UsageError, match=r"^expected A on this rank as the sender has defined it"):
        moved(first.A(), first, other)
    with pytest.raises(TypeError, match="cannot pickle"):
        first.send([first.A(), first.lock])


def test_a_lambda_brings_the_variables_of_the_sender():
    first, second = Rank("n = 1\nf = lambda: n"), Rank("n = 2\nf = lambda: n")
    assert moved(first.f, first, second)() == 1
