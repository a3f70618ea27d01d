"""Runs in the notebook's kernel: shows the members of an ensemble, live and still."""
