"""Requests to a cloud's blob store: connections, time-outs, credentials, and answers as errors. Touches the network.

Retries are off, because the retrying decorator owns the deadline. Only a refused token is renewed once.
"""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from email.parser import BytesParser
from email.utils import parsedate_to_datetime
from io import BytesIO
from typing import IO, Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit
from xml.etree.ElementTree import ParseError

import urllib3
from urllib3.exceptions import HTTPError

from statemgr.blobs.connections import (
    CONNECT_TIMEOUT_S,
    TIMEOUT_S,
    Connections,
    of_limit,
    of_network,
    refused_by_proxy,
)
from statemgr.blobs.names import unique_name
from statemgr.blobs.reading import BodyReader, LargeReads
from statemgr.errors import AccessDenied, ConfigError, InvalidError, StatemgrError, UnavailableError
from statemgr.os_errors import limit_behind
from statemgr.ports import Clock

T = TypeVar("T")
_TIMEOUT = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=TIMEOUT_S)
_BLOCK = 256 * 1024


@dataclass(frozen=True)
class Answer:
    """An answer of the server: its status, its headers (names in any case) and its body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Damaged(UnavailableError):
    """The server refused a body that does not match its checksum. A retry may succeed."""


class Lacking(InvalidError):
    """The server does not have this kind of request."""


class Credentials(Protocol):
    """Signs requests. Raises: AccessDenied without credentials, UnavailableError if their service does not answer."""

    def sign(self, method: str, url: str, headers: dict[str, str]) -> str:
        """Add to the headers what proves the right to a request. Returns: the URL to ask."""

    def renew(self) -> bool:
        """Get a new token after one was refused. Returns: whether there is one."""


class Anonymous:
    """No credentials, for servers on this machine."""

    def sign(self, method: str, url: str, headers: dict[str, str]) -> str:
        return url

    def renew(self) -> bool:
        return False


class Renewals:
    """Lets one thread at a time get a token. Those that wait while that fails get the same error: one after the other,
    they would wait as long for a service that does not answer."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._failed: StatemgrError | None = None

    def __call__(self, get: Callable[[], T]) -> T:
        """The result of ``get``. Raises: its error, or that of another thread's call that failed meanwhile."""
        before = self._failed
        with self.lock:
            if self._failed is not None and self._failed is not before:
                raise copy(self._failed)
            try:
                return get()
            except StatemgrError as error:
                self._failed = copy(error)  # without the traceback
                raise


@contextmanager
def loading(vendor: str, hint: str, expected: type[Exception]) -> Iterator[None]:
    """A block that loads credentials with a vendor's library, whose own errors are ``expected``.

    Raises: AccessDenied for others, such as those about a directory in place of a file.
    """
    try:
        yield
    except expected:
        raise
    except Exception as error:
        if limit := limit_behind(error):
            raise of_limit(limit, vendor) from error
        # other texts may be from a secret
        text = str(error) if isinstance(error, OSError) else type(error).__name__
        raise AccessDenied(f"the {vendor} credentials cannot be read: {text}", hint=hint) from error


#: Makes an error of an answer. The text is the kind of the request, such as ``put``.
Meaning = Callable[[Answer, str, Mapping[str, str]], StatemgrError]


class Http:
    """The connections to a server.

    Args:
        service: the vendor's name of the service, for messages.
        most: connections that stay open.
        meaning: makes the errors.
        always: headers of every request.
        where: the place of the store, for errors.
    """

    def __init__(
        self, service: str, most: int, clock: Clock, meaning: Meaning, always: Mapping[str, str], **where: str
    ) -> None:
        self.service = service
        self._always = always
        self._clock = clock
        self._meaning = meaning
        self.where = where
        self.credentials: Credentials = Anonymous()
        self._large = LargeReads(clock)
        self._offset_ms: int | None = None
        self._pools: dict[str, urllib3.PoolManager] = {}
        self._most = most
        self._connections: list[Connections] = []

    def pool(self, url: str) -> urllib3.PoolManager:
        """The pool for a URL: direct, or through the proxy that the environment names. Raises: ConfigError."""
        try:
            return self._pool(url)
        except ValueError as error:  # urllib3's own errors are some, too; their text may have a password
            raise ConfigError(
                f"the address of {self.service}, or that of a proxy, cannot be used",
                hint="check the endpoint of the store, and HTTPS_PROXY and HTTP_PROXY: each is http://host:port or "
                "https://host:port", **self.where,
            ) from error  # fmt: skip

    def _pool(self, url: str) -> urllib3.PoolManager:
        parts = urlsplit(url)
        _ = parts.port  # is checked only when it is read
        proxy = urllib.request.getproxies().get(parts.scheme)
        if proxy and urllib.request.proxy_bypass(parts.hostname or ""):
            proxy = None
        if proxy and "://" not in proxy:
            proxy = f"http://{proxy}"
        if (found := self._pools.get(proxy or "")) is None:
            options: Any = {"maxsize": self._most, "block": False, "blocksize": _BLOCK, "timeout": _TIMEOUT}
            if proxy:
                user = urlsplit(proxy).netloc.rpartition("@")[0]
                proof = urllib3.make_headers(proxy_basic_auth=unquote(user)) if user else None
                found = urllib3.ProxyManager(proxy, proxy_headers=proof, **options)
            else:
                found = urllib3.PoolManager(**options)
            found.pool_classes_by_scheme = dict(found.pool_classes_by_scheme)
            self._connections.append(Connections(found.pool_classes_by_scheme))
            found = self._pools.setdefault(proxy or "", found)
        return found

    # --- requests ---

    def ask(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | IO[bytes] | None = None,
        *,
        what: str,
        size: int | None = None,
        accept: Sequence[int] = (200,),
        **where: str,
    ) -> Answer:
        """Make a request and read its whole answer.

        Args:
            what: the kind of the request, which decides what a refusal means.
            size: bytes of a body that is a stream. A body of bytes knows its own.
            accept: statuses that are no errors.
            where: added to the place of the store.

        Raises: StatemgrError.
        """
        with self._asked(method, url, headers or {}, body, size, where) as response, self._network(where):
            answer = Answer(response.status, response.headers, response.read(decode_content=False))
        if answer.status not in accept:
            raise self._meaning(answer, what, {**self.where, **where})
        return answer

    @contextmanager
    def read(self, url: str, headers: Mapping[str, str], *, offset: int, blob_id: str) -> Iterator[BodyReader | None]:
        """Open a body. Gives None if the range begins behind its end. Raises: StatemgrError."""
        with self._asked("GET", url, {"Accept-Encoding": "identity", **headers}, None, None, {"blob": blob_id}) as raw:
            where = {**self.where, "blob": blob_id}
            if raw.status == 416:
                yield None
                return
            if raw.status not in (200, 206):
                with self._network(where):
                    answer = Answer(raw.status, raw.headers, raw.read(decode_content=False))
                raise self._meaning(answer, "get", where)
            if offset and raw.status != 206:
                raise InvalidError(f"this {self.service} server ignores ranges", **where)
            length = raw.headers.get("Content-Length")
            size = int(length) if length is not None and length.isdigit() else None
            yield BodyReader(raw, size, self._large, lambda: self._network(where), **where)

    @contextmanager
    def _asked(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | IO[bytes] | None,
        size: int | None,
        where: Mapping[str, str],
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        if body is not None:
            headers = {**headers, "Content-Length": str(len(body) if isinstance(body, bytes) else size)}
        elif method in ("PUT", "POST"):
            headers = {**headers, "Content-Length": "0"}
        response = self._send(method, url, headers, body, where)
        if response.status == 401 and self.credentials.renew():
            response.close()
            response = self._send(method, url, headers, body, where)
        try:
            yield response
        finally:
            response.close()

    def _send(
        self, method: str, url: str, headers: Mapping[str, str], body: Any, where: Mapping[str, str]
    ) -> urllib3.BaseHTTPResponse:
        if isinstance(body, bytes):
            body = BytesIO(body)  # is sent in blocks, each with the time-out
        elif body is not None:
            body.seek(0)
        pool, signed = self.pool(url), {**self._always, **headers}
        target = self.credentials.sign(method, url, signed)
        with self._network(where):
            response = pool.request(
                method, target, body=body, headers=signed, retries=False, redirect=False, preload_content=False,
                decode_content=False,
            )  # fmt: skip
        if response.status == 407:
            response.close()
            raise refused_by_proxy(self.service, **{**self.where, **where})
        self._notice_time(response.headers.get("Date"))
        return response

    @contextmanager
    def _network(self, where: Mapping[str, str]) -> Iterator[None]:
        try:
            yield
        except (HTTPError, OSError) as error:
            hint = f"check the network to {self.service}, and the endpoint of the store"
            raise of_network(error, self.service, hint, **{**self.where, **where}) from error

    def error_of(self, answer: Answer, what: str, **where: str) -> StatemgrError:
        """The error of an answer that is a part of another one."""
        return self._meaning(answer, what, {**self.where, **where})

    @contextmanager
    def understood(self, **where: str) -> Iterator[None]:
        """A block that reads an answer. Raises: InvalidError if it is not as the service documents it."""
        try:
            yield
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, ParseError) as error:
            raise InvalidError(
                f"an answer is not one of {self.service}: {type(error).__name__}",
                hint="check the endpoint of the store: a proxy or another service may have answered",
                **{**self.where, **where},
            ) from error

    # --- the server's clock ---

    def _notice_time(self, date: str | None) -> None:
        try:
            told = int(parsedate_to_datetime(date or "").timestamp() * 1000)
        except ValueError:
            return
        self._offset_ms = told - int(self._clock.elapsed() * 1000)

    def time_ms(self) -> int:
        """The time of the server's clock, from its last answer (epoch milliseconds).

        Raises: InvalidError if no answer had the time.
        """
        if self._offset_ms is None:
            raise InvalidError(f"this {self.service} server does not tell its time (the header Date)", **self.where)
        return self._offset_ms + int(self._clock.elapsed() * 1000)

    def close(self) -> None:
        """Break off requests in progress."""
        for connections in self._connections:
            connections.break_off()
        self._large.close()
        for pool in list(self._pools.values()):
            pool.clear()


def batch(requests: Sequence[tuple[str, str, Mapping[str, str]]], name: str = "{}") -> tuple[str, bytes]:
    """Several requests (method, path, headers) as the body of one. Returns: the content type and the body.

    Both clouds take ``multipart/mixed`` with a request in each part.

    Args:
        name: what a part is called after its number.
    """
    boundary = f"batch_{unique_name()}"
    parts = []
    for number, (method, path, headers) in enumerate(requests):
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        parts.append(
            f"--{boundary}\r\nContent-Type: application/http\r\nContent-Transfer-Encoding: binary\r\n"
            f"Content-ID: {name.format(number)}\r\n\r\n{method} {path} HTTP/1.1\r\n{lines}\r\n\r\n"
        )
    return f"multipart/mixed; boundary={boundary}", ("".join(parts) + f"--{boundary}--\r\n").encode()


def batch_answers(answer: Answer, expected: int) -> list[Answer]:
    """The answers to the parts of a batch, in the order of the requests. To be called in :meth:`Http.understood`."""
    found: dict[int, Answer] = {}
    kind = answer.headers.get("Content-Type", "")
    message = BytesParser().parsebytes(f"Content-Type: {kind}\r\n\r\n".encode() + answer.body)
    parts: Any = message.get_payload() if message.is_multipart() else ()
    for place, part in enumerate(parts):
        line, _, rest = part.get_payload(decode=True).lstrip().partition(b"\n")
        inner = BytesParser().parsebytes(rest)
        body: Any = inner.get_payload(decode=True) or b""
        number = "".join(character for character in part.get("Content-ID", "") if character.isdigit())
        found[int(number or place)] = Answer(int(line.split()[1]), dict(inner.items()), body)
    return [found[number] for number in range(expected)]
