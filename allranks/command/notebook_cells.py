"""The cells of a notebook file: which of them ranks run, and what they are in plain Python."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from IPython.core.inputtransformer2 import TransformerManager

from allranks.errors import UsageError
from allranks.magics.options import CellOptions, parse_cell, parse_command
from allranks.magics.shell import EVERY_CELL
from allranks.notebook import load_features

_MAGIC, _COMMAND = "%%distributed", "%distributed"
#: Magics of ``%load_ext allranks.px`` that run on ranks, or say what does.
_PX = ("px", "autopx", "dist_init", "dist_mode", "sync")
#: Other magics that run on ranks. They are the first line of their cell.
_CELL_MAGICS = ("distributed", "rank", "ensemble")
#: Commands of ``%distributed`` that need a line of their own.
_LINE_COMMANDS = (["on"], ["off"], ["push"])
#: A cell that begins with one of these runs in the notebook, also after ``%distributed on``.
_FOR_NOTEBOOK = (_COMMAND, "%%", "%load_ext", "%reload_ext")
#: The same in the kernel of ranks.
_FOR_NOTEBOOK_OF_RANKS = (*EVERY_CELL, "%%ensemble", "%%local")
#: The tag of a cell that may fail: "Run all" continues after it.
FAILS = "raises-exception"

HEADING, RANKS, NOTEBOOK, ENSEMBLE, PUSH = "heading", "ranks", "notebook", "ensemble", "push"
#: A cell with an option of a feature, as ``--simulate``: the feature runs it, not the ranks.
FEATURE = "feature"
#: Cell magics that run the rest of the cell.
_BODY_ONLY = ("time", "capture")
#: Line magics that can be left out: the rest of the cell does the same.
_LEFT_OUT = (
    *("autoreload", "colors", "config", "gui", "load_ext", "matplotlib", "pip", "precision"),
    *("pprint", "reload_ext", "who", "whos", "xmode"),
)
_SHELL = "get_ipython"


@dataclass
class NotebookCell:
    """A cell, or a part of one.

    ``kind`` is RANKS for cells that ranks run, else why a script has the cell only as a comment.
    ``where`` is its name in messages: ``cell 3``. ``source`` lacks the magic; for PUSH it is the
    names of the variables. ``magic`` is the line of the magic as written. With ``fails`` its tag
    allows it to fail, which would end a script.
    """

    kind: str
    where: str
    source: str
    magic: str = ""
    options: CellOptions = field(default_factory=CellOptions)
    fails: bool = False


def read_notebook(path: Path) -> dict[str, Any]:
    """Returns the content of a notebook file of version 4; else raises UsageError."""
    try:
        made: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"expected a notebook, found {error}. Type for example: allranks export train.ipynb"
        ) from None
    cells = _under(made, "cells")
    if not isinstance(cells, list) or made.get("nbformat") != 4:
        raise UsageError(
            f"expected a notebook of version 4, found another file in {path}. "
            f"Type: jupyter nbconvert --to notebook --nbformat 4 {path}"
        )
    for number, cell in enumerate(cells, 1):
        source = _under(cell, "source")
        texts = [_under(cell, "cell_type"), *(source if isinstance(source, list) else [source])]
        if not all(isinstance(text, str) for text in texts):
            raise UsageError(
                f"expected cells with a type and a source, found the {number}. of {path} without: "
                "the file is damaged. Open it in Jupyter, save it, and export again."
            )
    return made


def _under(made: Any, *names: str) -> Any:
    for name in names:
        made = made.get(name) if isinstance(made, dict) else None
    return made


@contextmanager
def _named(where: str) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def cells_of(notebook: dict[str, Any]) -> Iterator[NotebookCell]:
    """Yields the cells in order; raises UsageError for a magic with wrong options."""
    load_features()  # some options are theirs
    # The notebook's own kernel may be the one that sends every cell to the ranks.
    on = str(_under(notebook, "metadata", "kernelspec", "name")).startswith("allranks")
    for_notebook = _FOR_NOTEBOOK_OF_RANKS if on else _FOR_NOTEBOOK
    number = 0
    for cell in notebook["cells"]:
        source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            for line in source.splitlines():
                if line.startswith("#"):
                    yield NotebookCell(HEADING, "", line.lstrip("# "))
        if cell["cell_type"] != "code" or not source.strip():
            continue
        number += 1
        where = f"cell {number}"
        first, _, rest = source.strip("\n").partition("\n")
        word = first.split(maxsplit=1)[0] if first.strip() else ""
        tags = _under(cell, "metadata", "tags")
        fails = isinstance(tags, list) and FAILS in tags
        if word == _MAGIC:
            if {"-h", "--help"} & set(first.split()):
                continue
            with _named(where):
                options = parse_cell(first.strip().removeprefix(_MAGIC))
            kind = FEATURE if options.for_running() else RANKS
            yield NotebookCell(kind, where, rest, first.strip(), options, fails)
        elif word == "%%rank":
            options = CellOptions(ranks=first.strip().removeprefix(word).strip() or None)
            yield NotebookCell(RANKS, where, rest, first.strip(), options, fails)
        elif word == "%%ensemble":
            yield NotebookCell(ENSEMBLE, where, rest, first.strip())
        else:
            runs_here = not on or source.lstrip().startswith(for_notebook)
            _refuse_magics_of_ranks(source, where, lines_only=runs_here)
            if not runs_here:
                yield NotebookCell(RANKS, where, source.strip("\n"), fails=fails)
                continue
            for one in _in_notebook(source, where):
                if one.magic in ("on", "off"):
                    on = one.magic == "on"
                else:
                    yield one


def _refuse_magics_of_ranks(source: str, where: str, *, lines_only: bool) -> None:
    name = next(_magics_of_ranks(source, lines_only=lines_only), "")
    if name.strip("%") in _PX:
        raise UsageError(
            f"{where} expected {_MAGIC}, found {name}, whose engines a script does not "
            f"know. Type {_MAGIC} in its place, and export again."
        )
    if name:
        place = "of a cell" if name.startswith("%%") else "of a line"
        raise UsageError(
            f"{where} expected {name} at the beginning {place}, found it in another magic or in a "
            "statement. Move it there, and export again."
        )


def _magics_of_ranks(source: str, *, lines_only: bool) -> Iterator[str]:
    """Yields the magics in a cell by which ranks run code or get variables, as they are typed.

    With ``lines_only``, lines that are a whole command of ``%distributed`` are left out.
    """
    lines = source.splitlines()
    if lines_only:
        lines = [line for line in lines if line.split()[:1] != [_COMMAND]]
    words = {line.split()[0] for line in lines if line.strip()}
    yield from sorted(words & {f"{percent}{name}" for name in _PX for percent in ("%", "%%")})
    try:
        tree = ast.parse(TransformerManager().transform_cell("\n".join(lines)))
    except (SyntaxError, ValueError):
        # Without a percent sign, where that is no Python.
        yield from sorted(f"%{name}" for name in words & {*_PX})
        return
    for call, method in _shell_calls(tree):
        given = [str(one.value) for one in call.args if isinstance(one, ast.Constant)]
        name, *rest = [*given, ""]
        if method == "run_cell_magic" and name in (*_PX, *_CELL_MAGICS):
            yield f"%%{name}"
        elif method == "run_line_magic" and (
            name in _PX or (f"%{name}" == _COMMAND and rest[0].split()[:1] in _LINE_COMMANDS)
        ):
            yield f"%{name}"
        for inner in rest:  # as of %time and %%capture
            if "%" in inner:
                yield from _magics_of_ranks(inner, lines_only=False)


def _in_notebook(source: str, where: str) -> Iterator[NotebookCell]:
    rest = []
    for line in source.strip("\n").splitlines():
        words = line.split()
        if words[:1] != [_COMMAND]:
            if words[:1] not in (["%load_ext"], ["%reload_ext"]):
                rest.append(line)
            continue
        if words[1:2] in ([], ["help"]) or {"-h", "--help"} & set(words):
            continue
        with _named(where):
            command, options = parse_command(line.strip().removeprefix(_COMMAND))
        cell = CellOptions(cluster=options.cluster, ranks=options.ranks)
        if command == "push":
            yield NotebookCell(PUSH, where, ", ".join(options.names), line.strip(), cell)
        elif command in ("on", "off"):
            yield NotebookCell(NOTEBOOK, where, "", command)
        else:
            yield NotebookCell(NOTEBOOK, where, "", line.strip(), cell)
    if "".join(rest).strip():
        yield NotebookCell(NOTEBOOK, where, "\n".join(rest))


class Plain(NamedTuple):
    """A cell as plain Python; ``notes`` are the parts left out.

    Imports from ``__future__`` are apart, because they must be at the top of a script.
    """

    source: str
    future: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class _Change(NamedTuple):
    """A replacement for some lines of a text, counted from 1, the last one included."""

    first: int
    last: int
    text: str


def plain_python(source: str, where: str, show: str) -> Plain:
    """Returns a cell, without its own magic but perhaps with IPython's syntax, as plain Python.

    ``show`` is the function to call with the value of the last expression. Raises UsageError for
    syntax without a counterpart in plain Python.
    """
    notes: list[str] = []
    source = _below_magics(source, where, notes)
    text, tree = _parsed(source, where)
    changes = [*_magics(tree, text, where, notes)]
    changed = {line for one in changes for line in range(one.first, one.last + 1)}
    future: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            future.append(ast.unparse(node))
            changes.append(_Change(node.lineno, node.end_lineno or 0, f"pass  # {future[-1]}"))
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr) and last.lineno not in changed and _has_value(last, text):
        changes.append(_shown(last, text, show))
    # The caller may put it under an `if`, which needs a statement.
    text = _changed(text, changes).strip("\n") if tree.body else f"{text.strip()}\npass".lstrip()
    return Plain(text, tuple(future), tuple(notes))


def _parsed(source: str, where: str) -> tuple[str, ast.Module]:
    try:
        text = TransformerManager().transform_cell(source)
        tree = ast.parse(text)
        compile(tree, where, "exec", dont_inherit=True)
    # ValueError: a lone surrogate, which Python 3.12 and later find in transform_cell.
    except (SyntaxError, ValueError) as error:
        hint = "Write asyncio.run(…)" if "await" in str(error) else "Mend the cell"
        line, found = getattr(error, "lineno", None), getattr(error, "msg", error)
        at = f"line {line}: " if line else ""
        raise UsageError(
            f"{where} expected Python that a script may have, found {at}{found}. "
            f"{hint}, and export again."
        ) from None
    return text, tree


def _below_magics(source: str, where: str, notes: list[str]) -> str:
    head = ""
    while match := re.match(r"\s*%%(\w+)(.*)\n?", source):
        if match[1] not in _BODY_ONLY:
            raise UsageError(
                f"{where} expected Python, found %%{match[1]}, which is IPython's. "
                "Write the cell in Python, and export again."
            )
        notes.append(f"%%{match[1]} is left out")
        head += f"# %%{match[1]}{match[2]}\n"
        source = source[match.end() :]
    return head + source


def _magics(tree: ast.Module, text: str, where: str, notes: list[str]) -> Iterator[_Change]:
    statements = {id(node.value): node for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for call, method in _shell_calls(tree):
        statement = statements.get(id(call))
        words = [one.value for one in call.args if isinstance(one, ast.Constant)]
        done = None
        if statement is not None and len(words) == len(call.args):
            done = _without_shell(method, [str(word) for word in words], where)
        if statement is None or done is None:
            typed = _typed(method, [str(word) for word in words])
            raise UsageError(
                f"{where} expected Python, found {typed}, which is IPython's. "
                "Write it in Python, and export again."
            )
        source, note = done
        if note:
            notes.append(note)
        first = text.split("\n")[statement.lineno - 1]
        indent = first[: len(first) - len(first.lstrip())]
        yield _Change(statement.lineno, statement.end_lineno or 0, indent + source)


def _shell_calls(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Yields the calls as which IPython writes its own syntax, ``get_ipython().METHOD(…)``."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(ast.Call(ast.Name(name)), method)) if name == _SHELL:
                yield node, method


def _typed(method: str, words: list[str]) -> str:
    if method == "run_line_magic":
        return " ".join(["%" + words[0], *words[1:]]).rstrip()
    return f"!{' '.join(words)}" if method in ("system", "getoutput") else f"{_SHELL}().{method}"


def _without_shell(method: str, words: list[str], where: str) -> tuple[str, str] | None:
    typed = _typed(method, words)
    if method == "system":
        # IPython expands variables: {name} and $name.
        expanded = re.search(r"[{$]", words[0])
        if words[0].split()[:1] == ["pip"]:
            return f"pass  # {typed}", f"{typed} is left out: install it where the script runs"
        if expanded:
            return None
        return f"__import__('subprocess').run({words[0]!r}, shell=True)  # {typed}", ""
    if method != "run_line_magic":
        return None
    name, rest = words[0], words[1] if len(words) > 1 else ""
    if name in _LEFT_OUT:
        return f"pass  # {typed}", f"{typed} is left out"
    if name == "time":
        return plain_python(f"{rest};", where, "").source.removesuffix(";") if rest else "pass", ""
    if name == "cd" and rest:
        return f"__import__('os').chdir({rest.strip()!r})  # {typed}", ""
    variable, equals, value = (part.strip() for part in rest.partition("="))
    if name in ("env", "set_env") and equals and not re.search(r"[{$]", value):
        return f"__import__('os').environ[{variable!r}] = {value!r}  # {typed}", ""
    return None


def _has_value(last: ast.Expr, text: str) -> bool:
    if text.rstrip().endswith(";"):
        return False
    call = last.value
    if not isinstance(call, ast.Call):
        return not isinstance(call, ast.Constant) or not isinstance(call.value, str)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    # A call that prints or draws has no value worth showing.
    return name not in ("barrier", "display", "print", "show")


def _shown(last: ast.Expr, text: str, show: str) -> _Change:
    lines = text.split("\n")
    assert last.end_lineno is not None
    assert last.end_col_offset is not None
    before = lines[last.lineno - 1].encode()[: last.col_offset].decode()
    after = lines[last.end_lineno - 1].encode()[last.end_col_offset :].decode()
    value = ast.get_source_segment(text, last)
    return _Change(last.lineno, last.end_lineno, f"{before}{show}({value}){after}")


def _changed(text: str, changes: list[_Change]) -> str:
    lines = text.split("\n")
    for one in sorted(changes, reverse=True):
        lines[one.first - 1 : one.last] = [one.text]
    return "\n".join(lines)


def indented(source: str) -> str:
    """Returns a source indented by four blanks, except for lines within its strings."""
    inside: set[int] = set()
    begun: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "STRING":
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
        elif kind.endswith("STRING_START"):  # of an f-string, from Python 3.12 on
            begun.append(token.start[0])
        elif kind.endswith("STRING_END"):
            inside.update(range(begun.pop() + 1, token.end[0] + 1))
    return "\n".join(
        line if number in inside or not line.strip() else f"    {line}"
        for number, line in enumerate(source.split("\n"), 1)
    )
