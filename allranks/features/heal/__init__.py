"""Processes that take the places of dead ranks, and variables that come back."""
