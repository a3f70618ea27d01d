"""``import horovod`` and ``import tensorflow`` on ranks, as scripts for Horovod expect them."""
