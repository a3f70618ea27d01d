"""Floods, C and child processes, rubbish, and strange things to display."""

from __future__ import annotations

from tests.fuzz.grammar import Case, Draw, statement, statements


@statement(weight=2)
def lines(draw: Draw) -> Case:
    many = draw.rng.choice((1, 10, 300, 20_000))
    write = draw.rng.choice(
        (
            "print('line {step}', rank, _i)",
            "sys.stdout.write(f'line {step} {{rank}} {{_i}}\\n')",
            "os.write(1, f'line {step} {{rank}} {{_i}}\\n'.encode())",
            "print(f'line {step} {{rank}} ', end=''); print(_i)",
        )
    )
    return Case(f"for _i in range({many}): {write.format(step=draw.step)}", lines=many)


@statement()
def lines_of_c_and_children(draw: Draw) -> Case:
    s = draw.step
    return Case(
        "import ctypes, subprocess\n_c = ctypes.CDLL(None)\n"
        f"print('line {s}', rank, 0)\n"
        f"subprocess.run(['echo', f'line {s} {{rank}} 1'])\n"
        f"_c.puts(f'line {s} {{rank}} 2'.encode()); _c.fflush(None)\n"
        f"!echo line {s} $rank 3\n"
        f"os.system(f'echo line {s} {{rank}} 4')\n"
        f"_c.printf(b'line {s} %d 5\\n', rank)\n_c.fflush(None)",
        lines=6,
    )


@statement()
def rubbish(draw: Draw) -> Case:
    what = draw.rng.choice(("bytes(range(256)) * 4", "b'\\xff\\xfe\\x80\\x1b[2J\\x1b]0;t\\x07'"))
    return Case(f"sys.stdout.flush(); os.write(1, {what} + b'\\n')")


@statement()
def a_forged_label(draw: Draw) -> Case:
    other = (draw.rank + 1) % draw.size
    return Case(
        f"if rank == {draw.rank}:\n"
        f"    print('rank {other} │ begin {draw.step} of {other}')\n"
        f"    print('x\\rrank {other} │ forged\\x0b\\x0crank {other} │ forged')\n"
        f"    print('\\x1b[1A\\x1b[2Krank {other} │ forged')"
    )


@statement()
def late_lines(draw: Draw) -> Case:
    seconds = draw.rng.choice((0.0, 0.01, 0.2))
    return Case(
        "import threading\ndef _late():\n    for _i in range(5):\n"
        f"        print('late {draw.step}', rank, _i); time.sleep({seconds})\n"
        "threading.Thread(target=_late).start()",
        late=5,
        undo="import threading\nfor _t in threading.enumerate():\n"
        "    if '_late' in _t.name: _t.join()",
    )


@statement()
def a_rich_display(draw: Draw) -> Case:
    rich = f"<b>{draw.step} of {draw.rank}</b>"
    return Case(
        "from IPython.display import HTML, display\n"
        f"if rank == {draw.rank}: display(HTML('{rich}'))",
        shows=((rich, (draw.rank,)),),
    )


_DISPLAYED = (
    "class _O:\n    def __repr__(self): raise RuntimeError('no picture')",
    "class _O:\n    def __repr__(self): return 7",
    "class _O:\n    def __repr__(self): raise SystemExit(1)",
    "class _O:\n    def _repr_html_(self): return b'\\xff'",
    "class _O:\n    def _repr_html_(self): raise KeyError",
    "class _O:\n    def _repr_png_(self): return b'\\x89PNG', {'width': np.int64(1)}",
    "class _O:\n    def _repr_mimebundle_(self, **_): return {'text/plain': 'a', 'a/b': object()}",
    "class _O:\n    def _repr_mimebundle_(self, **_): return 7",
    "class _O:\n    def _repr_mimebundle_(self, **_): return {7: 'x'}",
    "class _O:\n    def _repr_mimebundle_(self, **_): return {'application/json': float('nan')}",
    "class _O:\n    def _ipython_display_(self): print('myself')",
    "class _O:\n    def __getattr__(self, name): return self",
    "class _O:\n    def __getattr__(self, name): raise OSError(name)",
    "class _O:\n    __class__ = property(lambda s: 1 / 0)",
    "class _O(dict):\n    def __iter__(self): raise OSError",
    "class _O(str):\n    def __len__(self): return -1",
    "_O = lambda: np.array([np.array([1]), None], dtype=object)",
    "_O = lambda: [_l := [], _l.append(_l)]",
    "_O = lambda: 'x' * 300_000",
    "_O = lambda: {i: str(i) * 50 for i in range(5000)}",
    "_O = lambda: float('nan')",
)


@statement(weight=4)
def a_strange_display(draw: Draw) -> Case:
    how = draw.rng.choice(("display(_O())", "print(repr(_O())[:9])", "_O()"))
    is_value = how == "_O()"  # which a cluster is asked for, and which may not be picklable
    return Case(
        f"{draw.rng.choice(_DISPLAYED)}\n{'' if is_value else how}",
        ("ok", "CellFailed", *(["UsageError"] if is_value else [])),
        last=how if is_value else "",
        after_end=True,
    )


@statement(only="notebook")
def an_update_of_a_rich_display(draw: Draw) -> Case:
    rich = f"<b>{draw.step} of {draw.rank}</b>"
    seconds = draw.rng.choice((0, 0.4))
    return Case(
        "from IPython.display import HTML, display\n"
        "_d = display(HTML('<i>same</i>'), display_id=True)\n"
        f"time.sleep({seconds})\n"
        f"_d.update(HTML(f'<b>{draw.step} of {{rank}}</b>'))",
        shows=((rich, (draw.rank,)),),
    )


@statement()
def a_repr_with_a_lone_surrogate(draw: Draw) -> Case:
    how = draw.rng.choice(("display(_O())", "_O()"))
    return Case(
        "class _O:\n    def __repr__(self): return '\\ud83d'", ("ok", "CellFailed"), last=how
    )


@statement()
def streams_closed(draw: Draw) -> Case:
    act = draw.rng.choice(
        (
            "sys.stdout = None",
            "sys.stdout.close()",
            "sys.stderr = None",
            "sys.stderr.close(); sys.stdout.close()",
            "sys.stdout = open(os.devnull, 'w')",
            "import io; sys.stdout = io.StringIO()",
            "del sys.stdout",
        )
    )
    # What the cell itself replaces stays replaced, as in a notebook.
    quiet = "os.devnull" in act or "StringIO" in act
    return Case(
        f"_kept_stdout = sys.stdout\n{act}",
        ("ok", "CellFailed"),
        speaks=False,
        after_end=True,
        undo="sys.stdout = _kept_stdout" if quiet else "",
    )


statements(
    a_flood_of_children=lambda draw: Case(
        "os.system('yes flood | head -c 3000000')\nos.system('yes error | head -c 900000 1>&2')"
    ),
    a_flood_to_stderr=lambda draw: Case(
        "for _i in range(5000): print('complaint', _i, 'x' * 80, file=sys.stderr)"
    ),
    one_long_line=lambda draw: Case("print('x' * 1_000_000)", speaks=True),
    progress=lambda draw: Case("for _i in range(200): print(f'\\rstep {_i}', end='')\nprint()"),
    strange_letters=lambda draw: Case(
        "print('é 漢字 🙂 \\u202e \\u2028 \\x85 \\ud83d \\x00 \\u200f\\n' * 3)"
    ),
    many_displays=lambda draw: Case(
        "from IPython.display import HTML\nfor _i in range(200): display(HTML(f'<i>{_i}</i>'))"
    ),
    a_cleared_output=lambda draw: Case(
        "from IPython.display import clear_output\nprint('gone'); clear_output(); print('stays')",
        begins=False,
    ),
    html_with_a_lone_surrogate=lambda draw: Case(
        "from IPython.display import HTML, display\ndisplay(HTML('\\ud800'))", ("ok", "CellFailed")
    ),
    a_bundle_with_wrong_metadata=lambda draw: Case(
        "class _O:\n    def _repr_mimebundle_(self, **_): return {'text/html': 'a'}, 7\ndisplay(_O())",
        ("ok", "CellFailed"),
    ),
    json_of_great_depth=lambda draw: Case(
        "_deep = []\nfor _i in range(20_000): _deep = [_deep]\n_was = sys.getrecursionlimit()\n"
        "sys.setrecursionlimit(100_000)\ndisplay({'application/json': _deep}, raw=True)",
        ("ok", "CellFailed"),
        undo="del _deep; sys.setrecursionlimit(_was)",
    ),
    an_enormous_value=lambda draw: Case("", last="'x' * 20_000_000"),
    an_enormous_display=lambda draw: Case(
        "from IPython.display import HTML\ndisplay(HTML('x' * 20_000_000))"
    ),
    output_pointed_elsewhere=lambda draw: Case(
        "_n = os.open('/dev/null', 1); os.dup2(_n, 1); os.close(_n)", speaks=False
    ),
    output_closed=lambda draw: Case(
        f"os.close({draw.rng.choice((1, 2))})", ("ok", "CellFailed"), speaks=False
    ),
)
