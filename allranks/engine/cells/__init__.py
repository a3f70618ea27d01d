"""One cell on a rank: its names, how it runs and is interrupted, and how it ended."""
