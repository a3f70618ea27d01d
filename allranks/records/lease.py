"""How long a host and the notebook believe in each other. Both sides."""

BEAT_SECONDS = 1.0
LIMIT_SECONDS = 10.0
"""Without a sign for so long, the other one is lost: a host then ends its ranks."""
FIRST_SECONDS = 15.0
"""For a host to reach the notebook at all."""
