"""What Horovod keeps in ``horovod.common``. Standard library only."""
