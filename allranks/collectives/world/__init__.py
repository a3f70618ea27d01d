"""One rank: its groups, process sets, scopes, and its calls under way."""

from allranks.collectives.world.world import World, current, exists, set_process, set_thread

__all__ = ["World", "current", "exists", "set_process", "set_thread"]
