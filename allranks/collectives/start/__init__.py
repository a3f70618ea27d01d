"""How a process becomes a rank, how dead ranks are replaced, and how a rank ends."""
