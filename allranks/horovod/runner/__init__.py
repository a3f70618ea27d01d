"""What Horovod keeps in ``horovod.runner``. Standard library only."""

from allranks.horovod import run

__all__ = ["run"]
