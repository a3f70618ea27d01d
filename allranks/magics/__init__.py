"""Runs in the notebook's kernel: parses a line, calls one method, displays."""
