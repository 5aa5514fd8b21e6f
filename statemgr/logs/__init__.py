"""The log: named events with fields, as text or as JSON lines, and a rate limit for the client libraries' lines."""

from __future__ import annotations

from statemgr.logs.events import Event, RateLimit, counted, flush_suppressed, ranges, size, tell
from statemgr.logs.formats import utc
from statemgr.logs.setup import configure_logging

__all__ = ["Event", "RateLimit", "configure_logging", "counted", "flush_suppressed", "ranges", "size", "tell", "utc"]
