"""Runs in the notebook's kernel: starts the ranks, sends cells, collects what became of them."""
