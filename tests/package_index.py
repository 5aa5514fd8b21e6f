"""A local package index that accepts uploads from twine and serves them to pip, for testing releases."""

from __future__ import annotations

import email
import email.policy
import html
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class PackageIndex:
    """The files of one project. ``upload_url`` is for twine, ``simple_url`` for pip.

    Sources: the legacy upload API of the Python package index, and PEP 503.
    """

    def __init__(self, port: int) -> None:
        self.upload_url = f"http://127.0.0.1:{port}/upload/"
        self.simple_url = f"http://127.0.0.1:{port}/simple/"
        self.files: dict[str, bytes] = {}


@contextmanager
def package_index() -> Iterator[PackageIndex]:
    """Run an index inside the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
            message: Any = email.message_from_bytes(head + body, policy=email.policy.HTTP)
            for part in message.iter_parts():
                if part.get_filename():
                    index.files[part.get_filename()] = part.get_payload(decode=True)
            self._answer(b"")

        def do_GET(self) -> None:
            name = self.path.rstrip("/").rpartition("/")[2]
            if name in index.files:
                self._answer(index.files[name], "application/octet-stream")
            elif self.path == "/simple/statemgr/":
                links = (f'<a href="/files/{html.escape(file)}">{html.escape(file)}</a>' for file in index.files)
                self._answer("<br>".join(links).encode())
            else:
                self.send_error(404)

        def _answer(self, body: bytes, kind: str = "text/html") -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    index = PackageIndex(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
