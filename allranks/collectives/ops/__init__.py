"""The public operations, and mpi4py's own calls."""
