"""A proxy in front of an S3 server that delays every answer by a random latency, like a distant store.

It can also limit the bandwidth of all answers together.

It listens on this machine only. It passes requests on unchanged, because their signature covers the host.

``FLIP_158`` has the latencies in Flink's proposal for generalised incremental checkpoints (FLIP-158): a PUT has a
median of 459 ms and a 99.9th percentile of 3.2 s. Values in between are interpolated on a logarithmic scale.
"""

from __future__ import annotations

import bisect
import http.client
import math
import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from statemgr.local.machine import SystemClock

#: The latency of a distant S3 server, in seconds.
LATENCY_S = 0.024
_BUFFER = 256 * 1024
_DEADLINE_S = 60.0
_NOT_PASSED_ON = {"connection", "transfer-encoding", "expect", "date", "server"}


@dataclass(frozen=True, slots=True)
class Latencies:
    """A distribution of latencies, defined by some quantiles: ``(share, seconds)``, ascending, from 0 to 1."""

    name: str
    quantiles: Sequence[tuple[float, float]]

    def at(self, share: float) -> float:
        """Return the quantile of a share from 0 to 1, in seconds."""
        shares = [known for known, _ in self.quantiles]
        above = min(max(bisect.bisect_left(shares, share), 1), len(shares) - 1)
        (left, low), (right, high) = self.quantiles[above - 1], self.quantiles[above]
        part = (share - left) / (right - left)
        return math.exp(math.log(low) + part * (math.log(high) - math.log(low)))

    def sample(self, source: random.Random) -> float:
        """Return a random latency in seconds."""
        return self.at(source.random())


FLIP_158 = Latencies(
    "FLIP-158", ((0.0, 0.2), (0.5, 0.459), (0.9, 0.74), (0.99, 1.57), (0.999, 3.2), (1.0, 5.0))
)  # fmt: skip


def fixed(seconds: float) -> Latencies:
    """Return a distribution with the same latency for every request."""
    return Latencies(f"{seconds * 1000:g} ms", ((0.0, seconds), (1.0, seconds)))


class SlowProxy:
    """A context manager that runs on its own port.

    Args:
        upstream: the server's URL.
        latencies: the delays of the answers, in addition to the server's own time. None means no delay.
        bandwidth: bytes per second of all answers together. None means no limit.
    """

    def __init__(self, upstream: str, latencies: Latencies | None, bandwidth: float | None = None) -> None:
        source, lock, free_at = random.Random(0), threading.Lock(), 0.0

        def wait() -> None:
            if latencies is not None:
                with lock:
                    seconds = latencies.sample(source)
                SystemClock().sleep(seconds)

        def take(size: int) -> None:
            nonlocal free_at
            if bandwidth is None:
                return
            with lock:
                now = SystemClock().monotonic()
                free_at = max(free_at, now) + size / bandwidth
                seconds = free_at - now
            SystemClock().sleep(seconds)

        parts = {"upstream": urlsplit(upstream).netloc, "wait": staticmethod(wait), "take": staticmethod(take)}
        handler = type("Handler", (_Handler,), parts)
        self._server = _Server(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def endpoint(self) -> str:
        """The URL for clients."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that closes its connection is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    """A client's connection, with its own connection to the server."""

    protocol_version = "HTTP/1.1"
    #: Otherwise a body waits 40 ms until the client has acknowledged the header.
    disable_nagle_algorithm = True
    upstream: str
    wait: Callable[[], None]
    take: Callable[[int], None]

    def setup(self) -> None:
        super().setup()
        self._to_server = http.client.HTTPConnection(self.upstream, timeout=_DEADLINE_S, blocksize=_BUFFER)

    def finish(self) -> None:
        self._to_server.close()
        super().finish()

    def _pass_on(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size) if size else None
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _NOT_PASSED_ON}
        self._to_server.request(self.command, self.path, body, headers)
        answer = self._to_server.getresponse()
        self.wait()
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in _NOT_PASSED_ON:
                self.send_header(name, value)
        if answer.length is None:  # sent in chunks: the length is only known after reading
            content = answer.read()
            self.take(len(content))
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            return
        self.end_headers()
        while piece := answer.read(_BUFFER):
            self.take(len(piece))
            self.wfile.write(piece)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Log nothing."""
