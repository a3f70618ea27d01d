"""Runs in the notebook's kernel: many members, few ranks, one cell. What ``%%ensemble`` calls."""
