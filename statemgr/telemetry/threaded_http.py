"""The standard library's WSGI server with a thread for each connection, for ports that anybody may connect to.

A connection that sends nothing, resets or sends nonsense leaves no trace on standard error. The number of connections
at a time is limited: one that has not sent its request makes room for another one.
"""

from __future__ import annotations

import io
import logging
import socket
import sys
import threading
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any, TextIO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

log = logging.getLogger(__name__)
#: The most connections at a time. If all of them have sent a request, another one is closed at once.
MOST_CONNECTIONS = 64
#: Seconds in which the thread of a connection that was closed ends.
_ENDS_S = 1.0


class ThreadedServer(ThreadingMixIn, WSGIServer):
    """Its threads end with the process."""

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS  # with fewer, a client that is not accepted at once waits for a second

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        #: Connections that have not sent their request yet, oldest first.
        self._silent: dict[socket.socket, None] = {}
        super().__init__(*arguments, **named)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on another thread. If too many connections are open, close the oldest one that has sent no request, or
        else this one."""
        if not (self._free.acquire(blocking=False) or self._has_room()):
            self.shutdown_request(request)
            return
        self._silent[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self.has_request(request)
            self._free.release()
            raise

    def _has_room(self) -> bool:
        oldest = next(iter(tuple(self._silent)), None)
        if oldest is None:
            return False
        self.has_request(oldest)
        with suppress(OSError):  # it has just been closed
            oldest.shutdown(socket.SHUT_RDWR)
        return self._free.acquire(timeout=_ENDS_S)

    def has_request(self, request: socket.socket) -> None:
        """A connection has sent its request: it is not closed to make room."""
        self._silent.pop(request, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room for another connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.has_request(request)
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

    def parse_request(self) -> bool:
        """Read the head of a request."""
        parsed = super().parse_request()
        if isinstance(self.server, ThreadedServer):
            self.server.has_request(self.connection)
        return parsed

    def handle(self) -> None:
        """Answer one request. An error of the application is one line of the log."""
        self._errors = io.StringIO()
        super().handle()
        error = self._errors.getvalue().strip().rpartition("\n")[2]
        if error and not error.startswith("TimeoutError"):  # of a client that sends or reads nothing
            log.warning("a request of %s could not be answered: %s", self.client_address[0], error)

    def get_stderr(self) -> TextIO:
        """Where tracebacks of the application are written to."""
        return self._errors

    def log_message(self, *_: object) -> None:
        """Log nothing."""
