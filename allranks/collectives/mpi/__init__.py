"""MPI: the communicators, data and letters through them."""
