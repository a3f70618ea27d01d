"""Waits in the collectives of other libraries: for whom, and how they end."""
