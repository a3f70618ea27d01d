"""Horovod's top level: ``import allranks.horovod`` lets ``import horovod`` find allranks.

The ranks of a notebook need no such line. Where Horovod itself is installed, ``import horovod``
finds Horovod. ``python -m allranks.horovod train.py`` runs a script unchanged. Both sides; standard
library only.
"""

from allranks.horovod import alias
from allranks.horovod.runner import run

# The version of Horovod that has these functions.
__version__ = "0.28.1"

__all__ = ["__version__", "run"]

alias.install()
