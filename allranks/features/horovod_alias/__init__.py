"""Scripts for Horovod: the names that they import, and the arguments of ``horovod.run``."""
