"""A proxy in front of the S3 server that spoils chosen answers, as networks and busy servers do."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

#: In place of an error code: the page of an ingress that does not reach the server.
PAGE = "page"
Answer = tuple[int, list[tuple[str, str]], bytes]
_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "content-length", "date", "server"}


@dataclass
class Fault:
    """What to do to the next ``times`` requests of ``method`` whose path contains ``path``.

    ``answer``: the (status, error code or :data:`PAGE`) sent instead of the server's answer. ``lands``: forward the
    request nevertheless. ``truncate``: end the body after this many bytes. ``alter``: a function applied to the body.
    ``reset``: reset the connection. ``wait``: seconds before anything is sent. ``trickle``: send the body at this many
    bytes a second, except the first ``after`` bytes, which are sent at once. ``chunked``: send the body in chunks,
    without its length.
    """

    method: str
    path: str = ""
    times: int = 1
    answer: tuple[int, str] | None = None
    lands: bool = False
    truncate: int | None = None
    alter: Callable[[bytes], bytes] | None = None
    reset: bool = False
    wait: float = 0.0
    trickle: int | None = None
    after: int = 0
    chunked: bool = False


@dataclass
class S3Proxy:
    """Listens on its own port while it is entered.

    ``requests`` are (method, path) in order; ``headers`` are the headers of each request, with names in lower case.
    """

    upstream: str
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def __enter__(self) -> S3Proxy:
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        """The URL that clients use."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def take(self, method: str, path: str, headers: Mapping[str, str]) -> Fault | None:
        """Return the fault for a request, and count it down."""
        with self._lock:
            self.headers.append({name.lower(): value for name, value in headers.items()})
            self.requests.append((method, path))
            for fault in self.faults:
                if fault.times and fault.method == method and fault.path in path:
                    fault.times -= 1
                    return fault
        return None

    def forward(self, method: str, path: str, headers: Mapping[str, str], data: bytes) -> Answer:
        """Return the server's answer: status, headers and body."""
        upstream = http.client.HTTPConnection(urlsplit(self.upstream).netloc, timeout=30)
        try:
            upstream.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                if name.lower() not in {"expect", "connection"}:
                    upstream.putheader(name, value)
            upstream.endheaders(data)
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            upstream.close()

    def error(self, status: int, code: str) -> tuple[list[tuple[str, str]], bytes]:
        """Return the headers and the body of an answer that refuses a request."""
        return [("Content-Type", "application/xml")], error_body(code)

    def wait(self, seconds: float) -> bool:
        """Hold an answer back, but no longer than the proxy runs. Returns whether the proxy has stopped."""
        return self._stopped.wait(seconds)


def error_body(code: str, message: str = "told to") -> bytes:
    """The body of an answer that refuses a request."""
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: S3Proxy

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Print nothing on the terminal."""

    def _serve(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.proxy.take(self.command, self.path, dict(self.headers)) or Fault(self.command)
        if fault.wait:
            self.proxy.wait(fault.wait)
        if fault.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return
        if fault.answer and not fault.lands:
            self._answer(*fault.answer)
            return
        status, headers, body = self.proxy.forward(self.command, self.path, dict(self.headers), data)
        if fault.answer:
            self._answer(*fault.answer)
            return
        body = fault.alter(body) if fault.alter else body
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in _HOP:
                self.send_header(name, value)
        length = next((v for n, v in headers if n.lower() == "content-length"), "0")
        if fault.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
        self.end_headers()
        if fault.trickle is not None:
            self.wfile.write(body[: fault.after])
            self._trickle(body[fault.after :], fault.trickle)
        elif fault.chunked:
            self._send_chunks(body, fault.truncate)
        else:
            self.wfile.write(body[: fault.truncate])
        if fault.truncate is not None:
            self.close_connection = True

    def _trickle(self, body: bytes, rate: int) -> None:
        try:
            for position in range(0, len(body), rate):
                self.wfile.write(body[position : position + rate])
                self.wfile.flush()
                if self.proxy.wait(1.0):
                    return
        except OSError:
            self.close_connection = True  # the client has given up

    def _send_chunks(self, body: bytes, truncate: int | None) -> None:
        for position in range(0, len(body), 10_000):
            if truncate is not None and position >= truncate:
                return
            piece = body[position : position + 10_000]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")

    def _answer(self, status: int, code: str) -> None:
        headers, body = self.proxy.error(status, code)
        if code == PAGE:
            headers, body = [("Content-Type", "text/html")], b"<html><head><title>404 Not Found</title></head></html>"
        body = b"" if self.command == "HEAD" else body
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_PATCH = do_HEAD = do_DELETE = _serve  # noqa: N815
