"""The line behind ``%%ensemble``, cut as a person would cut it: not inside brackets or quotes."""

from __future__ import annotations

from collections.abc import Callable

from allranks.errors import UsageError

_PAIRS = {"(": ")", "[": "]", "{": "}"}


def split(text: str, at: Callable[[str], bool]) -> list[str]:
    """Returns the pieces between the characters that ``at`` names, quotes and brackets kept whole.

    Raises:
        UsageError: a quote or a bracket is not closed.
    """
    pieces, piece, closing, quote = [], "", [], ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in _PAIRS:
            closing.append(_PAIRS[character])
        elif closing and character == closing[-1]:
            closing.pop()
        elif not closing and at(character):
            pieces.append(piece)
            piece = ""
            continue
        piece += character
    if quote or closing:
        missing = quote or closing[-1]
        raise UsageError(f"expected a closing {missing}, found the end of {text!r}. Type it.")
    return [*pieces, piece]


def words(line: str) -> list[str]:
    """Returns the words of a line, quotes kept."""
    return [word for word in split(line, str.isspace) if word]


def unquoted(word: str) -> str:
    """Returns a word without the quotes around it."""
    quoted = len(word) > 1 and word[0] == word[-1] and word[0] in "\"'"
    return word[1:-1] if quoted else word
