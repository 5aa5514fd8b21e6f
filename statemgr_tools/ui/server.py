"""Serves the pages over HTTP: a WSGI application, and the standard library's server for it.

It refuses a Host header that is not ours (DNS rebinding), anything but GET, HEAD and the POST that starts a check, and
requests from another site. The pages load nothing from elsewhere and have no scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl
from wsgiref.simple_server import WSGIServer, make_server

from statemgr.errors import InvalidError, MissingError, StatemgrError, UnavailableError
from statemgr.telemetry.threaded_http import QuietHandler, SixServer, ThreadedServer
from statemgr_tools.ui import pages
from statemgr_tools.ui.faults import deeper_checks
from statemgr_tools.ui.markup import Child, page, tag
from statemgr_tools.ui.model import JobView

StartResponse = Callable[[str, list[tuple[str, str]]], Any]
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
#: Maximum bytes of a POST.
_MOST_BODY = 1000
_HEADERS = [
    ("Cache-Control", "no-store"),
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    ("Referrer-Policy", "same-origin"),  # without a referrer, a browser names no origin with the page's own forms
    ("X-Content-Type-Options", "nosniff"),
]
_PAGES: dict[str, tuple[str, Callable[[JobView, pages.Parameters], pages.Page]]] = {
    "": ("Tasks", pages.tasks),
    "task": ("", pages.task),
    "store": ("", pages.store),
    "blobs": ("Blobs", pages.blobs),
}


class Application:
    """The WSGI application for some jobs. ``hosts``: names and addresses that a Host header may have, without port."""

    def __init__(self, views: Sequence[JobView], hosts: Collection[str] = LOOPBACK) -> None:
        self._views = views
        self._hosts = frozenset(host.lower() for host in hosts)
        self._style = files("statemgr_tools.ui").joinpath("style.css").read_bytes()

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        status, headers, body = self._answer(environ)
        start_response(status, [*_HEADERS, *headers, ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _answer(self, environ: dict[str, Any]) -> tuple[str, list[tuple[str, str]], bytes]:
        method, path = environ["REQUEST_METHOD"], environ.get("PATH_INFO", "/")
        if _host(environ.get("HTTP_HOST", "")) not in self._hosts:
            return _plain("421 Misdirected Request", "This server does not answer for that host: see --allow-host.")
        number, _, name = path.removeprefix("/").partition("/")
        view = {str(place): one for place, one in enumerate(self._views)}.get(number)
        if method == "POST" and view is not None and name == "run":
            return self._run(view, environ, f"/{number}/")
        if method not in ("GET", "HEAD"):
            return _plain("405 Method Not Allowed", "Only GET and HEAD.", [("Allow", "GET, HEAD")])
        if path == "/style.css":
            return "200 OK", [("Content-Type", "text/css; charset=utf-8")], self._style
        if path == "/runbook":
            return self._page(None, "", "runbook", {})
        if (path == "/" and len(self._views) == 1) or (view is not None and "/" not in path[1:]):
            return _moved(f"/{number or 0}/")
        if path != "/" and (view is None or name not in _PAGES):
            return _plain("404 Not Found", "There is no such page.")
        if name and _from_elsewhere(environ):
            return _plain("403 Forbidden", "Another site made this request.")
        return self._page(view, number, name, dict(parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True)))

    def _page(
        self, view: JobView | None, number: str, name: str, given: dict[str, str]
    ) -> tuple[str, list[tuple[str, str]], bytes]:
        status = "200 OK"
        try:
            if view is None:
                made = pages.runbook_page() if name == "runbook" else pages.jobs(self._views)
            else:
                made = _PAGES[name][1](view, given)
            if made.error is not None:
                status = _status(made.error)
        except StatemgrError as error:
            status = _status(error)
            made = pages.failed(error if view is None else _without_secrets(error, view))
        headers = [("Content-Type", "text/html; charset=utf-8")]
        return status, headers, page(made.title, self._navigation(number, name), made.body, made.refresh_s)

    def _navigation(self, number: str, current: str) -> Child:
        if not number:
            return None
        links = [
            tag("a", title, href=f"/{number}/{name}", aria_current="page" if name == current else None)
            for name, (title, _) in _PAGES.items()
            if title
        ]
        return tag("nav", *links, aria_label="Job")

    def _run(self, view: JobView, environ: dict[str, Any], back: str) -> tuple[str, list[tuple[str, str]], bytes]:
        length = environ.get("CONTENT_LENGTH") or "0"
        # Python refuses to convert thousands of digits
        is_number = length.isascii() and length.isdecimal() and len(length) <= len(str(_MOST_BODY))
        if _from_elsewhere(environ) or not is_number or int(length) > _MOST_BODY:
            return _plain("403 Forbidden", "Start a check with the button on the page.")
        try:
            body = environ["wsgi.input"].read(int(length))
        except TimeoutError:
            return _plain("408 Request Timeout", "The rest of the request did not arrive.")
        given = dict(parse_qsl(body.decode("latin-1")))
        kind = given.get("kind", "")
        try:
            for one in deeper_checks(view) if kind == "deeper" else [kind]:
                view.start(one)
        except InvalidError as error:
            return _plain("400 Bad Request", error.message)
        return _moved(back if kind == "deeper" else f"{back}blobs")


def _host(header: str) -> str:
    """Return the name in a Host header, without the port."""
    name, colon, port = header.lower().rpartition(":")
    return name if colon and port.isdecimal() else header.lower()


def _from_elsewhere(environ: dict[str, Any]) -> bool:
    """Return whether a page of another origin made the browser send this, which one of two headers reports."""
    site, origin = environ.get("HTTP_SEC_FETCH_SITE"), environ.get("HTTP_ORIGIN")
    if site is not None:
        return site not in ("same-origin", "none")
    return origin is not None and origin.partition("//")[2].lower() != environ.get("HTTP_HOST", "").lower()


def _without_secrets(error: StatemgrError, view: JobView) -> StatemgrError:
    hide = view.config.hider()
    where = {name: hide(str(value)) for name, value in error.where.items()}
    return StatemgrError(hide(error.message), hint=error.hint and hide(error.hint), **where)


def _status(error: StatemgrError) -> str:
    if isinstance(error, MissingError):
        return "404 Not Found"
    if isinstance(error, InvalidError):
        return "400 Bad Request"
    return "503 Service Unavailable" if isinstance(error, UnavailableError) else "500 Internal Server Error"


def _plain(
    status: str, message: str, headers: Sequence[tuple[str, str]] = ()
) -> tuple[str, list[tuple[str, str]], bytes]:
    return status, [("Content-Type", "text/plain; charset=utf-8"), *headers], message.encode()


def _moved(to: str) -> tuple[str, list[tuple[str, str]], bytes]:
    return "303 See Other", [("Location", to), ("Content-Type", "text/plain; charset=utf-8")], b""


def make(host: str, port: int, application: Application) -> WSGIServer:
    """Return a listening server, ready for ``serve_forever``. Port 0 takes a free one. Raises: UnavailableError."""
    try:
        kind = SixServer if ":" in host else ThreadedServer
        return make_server(host.strip("[]"), port, application, kind, QuietHandler)
    except OSError as error:
        raise UnavailableError(
            f"{host} port {port} cannot be used: {error}",
            hint="choose another with --host and --port; 0 is any free one",
        ) from error
