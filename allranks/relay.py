"""The entry of the program that a launcher runs once on every host, where ranks are on several.

python -m allranks.relay                    an invitation on standard input
python -m allranks.relay --join FILE NAME   one in a file; NAME holds the host's name
"""

from __future__ import annotations

import sys

from allranks.features.hosts import relay

if __name__ == "__main__":
    sys.exit(relay.main(sys.argv[1:]))
