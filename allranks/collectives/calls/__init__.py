"""Calls: their arguments, their agreement, their waits, and the state of the other ranks."""
