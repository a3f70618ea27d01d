"""Nothing here runs on ranks: this only lets the launching tests find `launch`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
collect_ignore = ["ranks"]
