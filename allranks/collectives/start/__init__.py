"""How a process, or a thread, becomes a rank, and how it ends."""
