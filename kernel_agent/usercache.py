"""Where this user's caches are kept: below the folder for caches that the platform names."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def user_cache(room: str) -> Path:
    """The folder of one cache; it need not exist. A relative XDG_CACHE_HOME is ignored, as its specification says."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if named and Path(named).is_absolute():
        base = Path(named)
    else:
        base = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return base / "kernel-agent" / room
