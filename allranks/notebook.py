"""The notebook's entry to the features: no other module of its side imports both.

`allranks.agent` is the same for the ranks.
"""

from __future__ import annotations

from functools import cache

from allranks import features
from allranks.cluster.features import register


@cache
def load_features() -> None:
    """Loads the features once; notebooks and clusters that are made later have them."""
    register(features.load("notebook"))
