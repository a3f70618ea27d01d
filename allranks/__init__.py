"""allranks: a notebook cell on every rank of an MPI cluster."""

__version__ = "0.1.0"
