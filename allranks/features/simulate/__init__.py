"""Simulated ranks: ``%%distributed -n 1024 --simulate`` runs a cell on tasks of one process."""
