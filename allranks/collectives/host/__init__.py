"""Memory that the ranks of one host share, and data through it."""
