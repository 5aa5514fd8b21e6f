"""Units that limits and defaults are written in."""

from typing import Final

MEBIBYTE: Final = 1024**2
GIBIBYTE: Final = 1024**3
HOUR_MS: Final = 3600 * 1000
DAY_MS: Final = 24 * HOUR_MS
