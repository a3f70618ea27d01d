"""What a launcher tells the processes that it starts. Both sides; standard library only."""

from allranks.launched.process import local_place, rank, size

__all__ = ["local_place", "rank", "size"]
