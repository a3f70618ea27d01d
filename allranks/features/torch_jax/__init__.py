"""Ends waits in torch's and JAX's collectives for a rank that has left the cell."""
