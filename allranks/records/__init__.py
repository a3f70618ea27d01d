"""Frozen records that cross the wire, with units. Both sides; standard library only."""
