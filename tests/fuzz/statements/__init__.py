"""The grammar's statements, by subject. Each says what may come of it."""

from importlib import import_module

_FILES = ("right", "wrong", "ends", "presses", "output", "python", "talk", "clusters", "places")


def load() -> None:
    """Adds all statements to the grammar."""
    for name in _FILES:
        import_module(f"{__name__}.{name}")
