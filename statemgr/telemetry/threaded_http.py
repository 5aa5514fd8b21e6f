"""The standard library's WSGI server with a thread for each connection, for ports that anybody may connect to.

A connection that sends nothing, resets or sends nonsense leaves no trace on standard error. The number of connections
at a time is limited.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

log = logging.getLogger(__name__)
#: The most connections at a time. Another one is closed at once.
MOST_CONNECTIONS = 64


class ThreadedServer(ThreadingMixIn, WSGIServer):
    """Its threads end with the process."""

    daemon_threads = True

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(*arguments, **named)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on another thread, or close the connection if too many are open."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room for another connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that sends nothing or goes away. Anything else is one line of the log."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            log.warning("a request of %s could not be answered: %r", client_address[0], error)


class SixServer(ThreadedServer):
    """The same on IPv6. On ``::`` it takes connections of IPv4, too."""

    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        """Bind, whatever the system's default is for connections of IPv4."""
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class QuietHandler(WSGIRequestHandler):
    """Logs no requests: probes come every few seconds, and requests of a page name keys."""

    #: Seconds until a connection that sends nothing is closed.
    timeout = 30

    def log_message(self, *_: object) -> None:
        """Log nothing."""
