"""Standard library only."""
