"""The name under which `loopback` is known: a whole world in one process, each rank a thread."""

from allranks.collectives.start import loopback

__all__ = ["loopback"]
