"""The host agent's entry: one process on each host, which starts and ends the ranks there.

It runs in no rank, but ranks are forked from it, with the features that it has loaded.
`allranks.notebook` is the same for the notebook.
"""

from __future__ import annotations

from allranks import features
from allranks.engine.host import host_agent

if __name__ == "__main__":
    host_agent.main(features.load)
