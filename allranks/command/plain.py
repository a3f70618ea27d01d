"""A cell's source as plain Python: magics are done without IPython, left out, or refused."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

from IPython.core.inputtransformer2 import TransformerManager

from allranks.errors import UsageError

_BODY_ONLY = ("time", "capture")
"""Magics of a cell that run what stands below them."""
_LEFT_OUT = (
    *("autoreload", "colors", "config", "gui", "load_ext", "matplotlib", "pip", "precision"),
    *("pprint", "reload_ext", "who", "whos", "xmode"),
)
"""Magics of a line without which the rest does the same."""
_SHELL = "get_ipython"


class Plain(NamedTuple):
    """Plain Python that a cell has become.

    Attributes:
        source: without magics.
        future: its imports from ``__future__``, which a script has at its top.
        notes: what was left out.
    """

    source: str
    future: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class _Change(NamedTuple):
    """Lines of a text, counted from 1, the last one included, and what takes their place."""

    first: int
    last: int
    text: str


def plain(source: str, where: str, show: str) -> Plain:
    """Returns a cell as plain Python.

    Args:
        source: below the cell's own magic; it may use IPython's syntax.
        where: what the cell is called, for errors.
        show: the function that is given the value of the last expression.

    Raises:
        UsageError: it does what plain Python cannot do so.
    """
    notes: list[str] = []
    source = _below_magics(source, where, notes)
    text = TransformerManager().transform_cell(source)
    tree = _parsed(text, where)
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
    # What is put under an `if` needs a statement.
    text = _changed(text, changes).strip("\n") if tree.body else f"{text.strip()}\npass".lstrip()
    return Plain(text, tuple(future), tuple(notes))


def _parsed(text: str, where: str) -> ast.Module:
    try:
        tree = ast.parse(text)
        compile(tree, where, "exec", dont_inherit=True)
    except SyntaxError as error:
        hint = "Write asyncio.run(…)" if "await" in str(error) else "Mend the cell"
        line = f"line {error.lineno}: " if error.lineno else ""
        raise UsageError(
            f"{where} expected Python that a script may have, found {line}{error.msg}. "
            f"{hint}, and export again."
        ) from None
    except ValueError as error:  # half a character
        raise UsageError(
            f"{where} expected Python that a script may have, found {error}. "
            "Mend the cell, and export again."
        ) from None
    return tree


def _below_magics(source: str, where: str, notes: list[str]) -> str:
    """What stands below magics of the cell itself, which stay as comments."""
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
    """What takes the place of lines that IPython has a magic or a command of the shell for."""
    statements = {id(node.value): node for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for call in ast.walk(tree):
        if not _asks_shell(call):
            continue
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Attribute)
        statement = statements.get(id(call))
        words = [one.value for one in call.args if isinstance(one, ast.Constant)]
        done = None
        if statement is not None and len(words) == len(call.args):
            done = _without_shell(call.func.attr, [str(word) for word in words], where)
        if statement is None or done is None:
            typed = _typed(call.func.attr, [str(word) for word in words])
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


def _asks_shell(node: ast.AST) -> bool:
    """Whether a node is ``get_ipython().…(…)``, as IPython writes its own syntax."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    shell = node.func.value
    return (
        isinstance(shell, ast.Call) and isinstance(shell.func, ast.Name) and shell.func.id == _SHELL
    )


def _typed(method: str, words: list[str]) -> str:
    if method == "run_line_magic":
        return " ".join(["%" + words[0], *words[1:]]).rstrip()
    return f"!{' '.join(words)}" if method in ("system", "getoutput") else f"{_SHELL}().{method}"


def _without_shell(method: str, words: list[str], where: str) -> tuple[str, str] | None:
    """Python for a line of IPython's, and what is to be noted; None where there is none."""
    typed = _typed(method, words)
    if method == "system":
        # IPython puts variables in: {name} and $name.
        expanded = re.search(r"[{$]", words[0])
        if words[0].split()[:1] == ["pip"]:
            return f"pass  # {typed}", f"{typed} is left out: install it where the script runs"
        return (
            None
            if expanded
            else (
                f"__import__('subprocess').run({words[0]!r}, shell=True)  # {typed}",
                "",
            )
        )
    if method != "run_line_magic":
        return None
    name, rest = words[0], words[1] if len(words) > 1 else ""
    if name in _LEFT_OUT:
        return f"pass  # {typed}", f"{typed} is left out"
    if name == "time":
        return plain(f"{rest};", where, "").source.removesuffix(";") if rest else "pass", ""
    if name == "cd" and rest:
        return f"__import__('os').chdir({rest.strip()!r})  # {typed}", ""
    variable, equals, value = (part.strip() for part in rest.partition("="))
    if name in ("env", "set_env") and equals and not re.search(r"[{$]", value):
        return f"__import__('os').environ[{variable!r}] = {value!r}  # {typed}", ""
    return None


def _has_value(last: ast.Expr, text: str) -> bool:
    """Whether a notebook shows the value; of what prints or draws there is none."""
    if text.rstrip().endswith(";"):
        return False
    call = last.value
    if not isinstance(call, ast.Call):
        return not isinstance(call, ast.Constant) or not isinstance(call.value, str)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
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
    """Returns a source four blanks further in, but for what stands within its strings."""
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
