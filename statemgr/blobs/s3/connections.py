"""The connections of an S3 client, so that requests in progress can be broken off. Touches the SDK's connection pool.

A request to a server that does not answer lasts until its read time-out, and the SDK's own ``close`` leaves it alone.
"""

from __future__ import annotations

import socket
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


class Connections:
    """All connections that a client has open."""

    def __init__(self, client: S3Client) -> None:
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()
        self._broken = False
        session: Any = client._endpoint.http_session  # type: ignore[attr-defined]
        classes: dict[str, Any] = session._pool_classes_by_scheme
        for scheme, pool in classes.items():
            classes[scheme] = type(pool.__name__, (pool,), {"ConnectionCls": self._watched(pool.ConnectionCls)})

    def _watched(self, kind: Any) -> Any:
        connections = self

        class Watched(kind):  # type: ignore[misc]
            """A connection that can be broken off."""

            def connect(self) -> None:
                if connections._broken:
                    raise ConnectionAbortedError("the client is closed")
                super().connect()
                connections._open.add(self)

        return Watched

    def break_off(self) -> None:
        """Requests in progress end with an error of the connection; there are no further ones."""
        self._broken = True
        for connection in list(self._open):
            sock = connection.sock
            if sock is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
