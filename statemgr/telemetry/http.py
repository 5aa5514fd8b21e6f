"""The HTTP server on ``metrics.port``: ``/metrics`` for Prometheus, ``/healthz`` and ``/readyz`` for probes.

A process has one server for each port. Managers of several jobs with the same port share it, and the pages are about
all of them.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import make_server

from prometheus_client import CollectorRegistry, Metric, make_wsgi_app
from prometheus_client.registry import Collector

from statemgr.errors import UnavailableError
from statemgr.telemetry.liveness import Health, together
from statemgr.telemetry.threaded_http import QuietHandler, SixServer, ThreadedServer

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_PAGES = "/metrics, /healthz and /readyz"
_lock = threading.Lock()
#: Port → the server of this process there.
_servers: dict[int, _Server] = {}


@dataclass(eq=False)
class Served:
    """What one manager serves. :meth:`close` ends that, and the server with the last one."""

    registry: CollectorRegistry
    health: Health
    port: int = 0

    def close(self) -> None:
        """Serve it no more. Idempotent."""
        with _lock:
            server = _servers.get(self.port)
            if server is None or self not in server.served:
                return
            server.served.remove(self)
            if server.served:
                return
            del _servers[self.port]
        server.end()


def serve(port: int, registry: CollectorRegistry, health: Health) -> Served:
    """Serve the pages of a manager on ``port``; 0 takes a free one.

    Raises: UnavailableError if another process has the port, or this one may not use it.
    """
    served = Served(registry, health, port)
    with _lock:
        server = _servers.get(port) if port else None
        if server is None:
            server = _Server(port)
            _servers[server.port] = server
        server.served.append(served)
        served.port = server.port
    return served


class _Server:
    """One server, with a thread that accepts connections and one for each request."""

    def __init__(self, port: int) -> None:
        self.served: list[Served] = []
        self._metrics: WSGIApplication = make_wsgi_app(_All(self.served))
        # all addresses: in a cluster with IPv6 alone, probes and Prometheus use the pod's only one
        host, kind = ("::", SixServer) if socket.has_dualstack_ipv6() else ("0.0.0.0", ThreadedServer)
        try:
            self._http = make_server(host, port, self._answer, kind, QuietHandler)
        except OSError as error:
            raise UnavailableError(
                f"metrics.port {port} cannot be used: {error.strerror or error}",
                key="metrics.port",
                hint="another process listens there, or the port needs more rights: choose a free port above 1023, "
                "0 for any free port, or remove the key",
            ) from error
        self.port: int = self._http.server_port
        self._thread = threading.Thread(target=self._http.serve_forever, name=f"http-{self.port}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Close the port."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO") or "/"
        if path in ("/", "/metrics"):
            return self._metrics(environ, start)
        if path not in ("/healthz", "/readyz"):
            return _reply(start, "404 Not Found", {"error": f"there is no page {path[:100]}; there are {_PAGES}"})
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _reply(start, "405 Method Not Allowed", {"error": "use GET"})
        try:
            found = together(one.health.condition() for one in tuple(self.served))
        except Exception as error:  # whoever asks has to know that the answer is not known
            return _reply(start, "500 Internal Server Error", {"error": repr(error)})
        if path == "/healthz":
            return _reply(start, _status(not found.dead), {"alive": not found.dead, "why": list(found.dead)})
        why = [*found.dead, *found.unready]
        body = {"ready": found.is_ready, "open": found.open, "restoring": list(found.restoring), "why": why}
        return _reply(start, _status(found.is_ready), body)


def _status(good: bool) -> str:
    return "200 OK" if good else "503 Service Unavailable"


def _reply(start: StartResponse, status: str, body: dict[str, Any]) -> Iterable[bytes]:
    content = json.dumps(body).encode() + b"\n"
    start(status, [("Content-Type", "application/json"), ("Content-Length", str(len(content)))])
    return [content]


class _All(Collector):
    """The metrics of all managers of a server. A metric that several have is one, with the series of all."""

    def __init__(self, served: list[Served]) -> None:
        self._served = served

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for one in tuple(self._served):
            for metric in one.registry.collect():
                if metric.name in found:
                    found[metric.name].samples += metric.samples
                else:
                    found[metric.name] = metric
        yield from found.values()

    def restricted_registry(self, names: Iterable[str]) -> _Restricted:
        """Called for ``/metrics?name[]=…``."""
        return _Restricted(self, frozenset(names))


class _Restricted(Collector):
    """The samples with one of these names."""

    def __init__(self, every: _All, names: frozenset[str]) -> None:
        self._every = every
        self._names = names

    def collect(self) -> Iterator[Metric]:
        for metric in self._every.collect():
            metric.samples = [sample for sample in metric.samples if sample.name in self._names]
            if metric.samples:
                yield metric
