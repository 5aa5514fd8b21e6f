"""Answers of a Schema Registry with a deadline and a size. The client has a time-out for each read alone."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from statemgr.errors import UnavailableError

#: A list of all subjects is the largest answer.
MAX_ANSWER = 16 * 1024 * 1024
_HINT = "check schema.registry.url, the server and what is between, then try again"


class Session:
    """Takes the place of the client's session, for the one method that the client calls.

    Args:
        session: the client's, from httpx.
        timeout_s: for a call of the serdes with all its requests and repetitions.
        addresses: how many the client tries in turn; a request to one has its share of the time.
    """

    def __init__(self, session: Any, timeout_s: float, addresses: int) -> None:
        self._session = session
        self._request_s = timeout_s / addresses
        self._timeout_s = timeout_s
        self._deadlines = threading.local()

    def begin(self) -> None:
        """From now on, this thread's requests have the time-out together."""
        self._deadlines.at = time.monotonic() + self._timeout_s

    def request(self, method: str, url: str, **options: Any) -> Any:
        """Send a request. Raises: UnavailableError after the deadline, and for a longer answer; httpx's errors."""
        left = getattr(self._deadlines, "at", time.monotonic() + self._timeout_s) - time.monotonic()
        late = UnavailableError(f"the Schema Registry has not answered within {self._timeout_s:g} s", hint=_HINT)
        if left <= 0:
            raise late
        left = min(left, self._request_s)
        cut = _Cut(left)
        # a connection of its own can be cut; an answer that is packed can be larger than it looks
        headers = {**(options.pop("headers", None) or {}), "Connection": "close", "Accept-Encoding": "identity"}
        options |= {"headers": headers, "extensions": {"trace": cut.trace}}
        try:
            with self._session.stream(method, url, timeout=left, **options) as answer:
                if answer.headers.get("Content-Encoding", "identity") != "identity":
                    raise UnavailableError("the Schema Registry packs its answer, though it must not", hint=_HINT)
                data = bytearray()
                for part in answer.iter_raw(64 * 1024):
                    data += part
                    if len(data) > MAX_ANSWER:
                        problem = f"an answer of the Schema Registry is larger than {MAX_ANSWER >> 20} MiB"
                        raise UnavailableError(problem, hint=_HINT)
        except UnavailableError:
            raise
        except Exception:
            if cut.is_done:
                raise late from None
            raise
        finally:
            cut.cancel()
        return type(answer)(answer.status_code, headers=answer.headers, content=bytes(data), request=answer.request)

    def close(self) -> None:
        """Close the client's session."""
        self._session.close()


class _Cut:
    """Cuts a connection after some seconds, whatever the client waits for on it."""

    def __init__(self, seconds: float) -> None:
        self.is_done = False
        self._lock = threading.Lock()
        self._descriptors: list[int] = []
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        self._timer.start()

    def trace(self, name: str, info: Mapping[str, Any]) -> None:
        """httpcore calls this at each step. A copy of the descriptor reaches the connection below TLS, too."""
        if name.startswith("connection.connect_") and name.endswith(".complete"):
            taken = info["return_value"].get_extra_info("socket")
            with self._lock:
                self._descriptors.append(os.dup(taken.fileno()))
            if self.is_done:
                self._cut()

    def cancel(self) -> None:
        """Release the connection."""
        self._timer.cancel()
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.pop())

    def _cut(self) -> None:
        self.is_done = True
        with self._lock:
            for descriptor in self._descriptors:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
