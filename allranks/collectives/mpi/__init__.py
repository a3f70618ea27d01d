"""MPI: the communicators, data and letters through them. Runs in every rank."""
