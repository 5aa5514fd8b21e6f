"""Counts this process's HTTP requests to an S3 server as they leave the SDK."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

#: The requests of a commit count as finished after this many seconds without a request.
_QUIET_S = 0.08
_POLL_S = 0.01


class Requests:
    """Counts of requests by kind, and the body bytes of PUTs, since the last :meth:`reset`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kinds: Counter[str] = Counter()
        self._bytes = 0
        self._last = time.perf_counter()

    def add(self, kind: str, size: int) -> None:
        """Count a request."""
        with self._lock:
            self._kinds[kind] += 1
            self._bytes += size if kind == "PUT" else 0
            self._last = time.perf_counter()

    def reset(self) -> None:
        """Set the counts to zero."""
        with self._lock:
            self._kinds.clear()
            self._bytes = 0

    def settled(self) -> dict[str, float]:
        """Return kind → requests, with ``bytes`` and ``all``, after a pause (a clean-up ends later)."""
        while time.perf_counter() - self._last < _QUIET_S:
            threading.Event().wait(_POLL_S)
        with self._lock:
            return {**{kind: float(n) for kind, n in self._kinds.items()}, "bytes": self._bytes, "all": self._all()}

    def _all(self) -> float:
        return float(sum(self._kinds.values()))


@contextmanager
def counted() -> Iterator[Requests]:
    """Count every botocore request of this process inside the block."""
    import botocore.httpsession

    session_class: Any = botocore.httpsession.URLLib3Session
    found = Requests()
    send = session_class.send

    def counting(session: Any, request: Any) -> Any:
        found.add(kind_of(request.method, request.url), int(request.headers.get("Content-Length") or 0))
        return send(session, request)

    session_class.send = counting
    try:
        yield found
    finally:
        session_class.send = send


def kind_of(method: str, url: str) -> str:
    """Return ``PUT``, ``GET``, ``HEAD``, ``DELETE``, ``UNTAG``, ``LIST``, or the method of any other request."""
    query = parse_qs(urlsplit(url).query, keep_blank_values=True)
    if method == "GET" and ({"list-type", "prefix", "uploads"} & query.keys()):
        return "LIST"
    if method == "DELETE" and "tagging" in query:
        return "UNTAG"
    if method == "POST" and "delete" in query:
        return "DELETE"
    return method
