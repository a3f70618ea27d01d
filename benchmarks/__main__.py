"""``python -m benchmarks [NAME …]``: runs the named measurements (default: all), or ``report``."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys

import benchmarks
from benchmarks import report


def names() -> list[str]:
    # A measurement is a module with a main().
    modules = [m.name for m in pkgutil.iter_modules(benchmarks.__path__) if m.name != "__main__"]
    return [
        name for name in modules if hasattr(importlib.import_module(f"benchmarks.{name}"), "main")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    known = names()
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join([*known, "report"]))
    chosen = parser.parse_args().names
    unknown = set(chosen) - {*known, "report"}
    if unknown:
        parser.error(f"expected {', '.join([*known, 'report'])}; found {', '.join(unknown)}")
    for name in chosen or known:
        if name == "report":
            report.update()
        else:
            sys.argv = [f"benchmarks {name}"]  # a measurement may have other options
            importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
