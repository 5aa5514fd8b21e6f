"""What all clients of blob stores over HTTP need: connections that can be broken off, and logs without secrets."""

from __future__ import annotations

import logging
import re
import socket
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from statemgr.config.loading import MASK, without
from statemgr.errors import AccessDenied, InvalidError, StatemgrError, UnavailableError
from statemgr.logs import RateLimit
from statemgr.os_errors import Fault, limit_behind, translate

#: Seconds without progress after which a request fails: until it is connected, and from then on.
CONNECT_TIMEOUT_S, TIMEOUT_S = 5, 30
_LIBRARIES = ("azure", "boto3", "botocore", "google", "msal", "s3transfer", "urllib3")
#: A token that the SDK has renewed itself, as a header or a parameter, in any quoting; a signature of a URL.
_TOKEN = re.compile(r"(x-amz-security-token\W{1,6}|[?&]sig=|Bearer )[\w+/=%.~-]{16,}", re.IGNORECASE)


def of_network(error: BaseException, service: str, hint: str, **where: Any) -> StatemgrError:
    """The error for a request that got no answer. A limit of this process, such as open files, has its own text."""
    if limit := limit_behind(error):
        return of_limit(limit, service, **where)
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        advice = "install the certificate of its authority, or set AWS_CA_BUNDLE or SSL_CERT_FILE"
        return AccessDenied(f"the {service} endpoint's certificate is not trusted", hint=advice, **where)
    if "Tunnel connection failed: 407" in f"{error} {getattr(error, 'kwargs', {}).get('error')}":
        return refused_by_proxy(service, **where)
    # the text may contain the signed address; the type says enough
    return UnavailableError(f"{service} could not be reached: {type(error).__name__}", hint=hint, **where)


def refused_by_proxy(service: str, **where: Any) -> AccessDenied:
    """The error for a request that a proxy wants a password for, or another one."""
    hint = "check the user and the password in HTTPS_PROXY or HTTP_PROXY"
    return AccessDenied(f"the proxy to {service} refuses these credentials (407)", hint=hint, **where)


def of_limit(error: OSError, service: str, **where: Any) -> StatemgrError:
    """The error for a limit of this process, such as open files. The same request may succeed later."""
    kinds = {Fault.LIMIT: UnavailableError, Fault.FAILED: UnavailableError}
    return translate(error, f"no request can be sent to {service}", kinds=kinds, **where)


def body_refused(text: str, **where: Any) -> InvalidError:
    """The error for 413: what is in front of the server takes only smaller requests."""
    hint = (
        "let the proxy take larger requests (nginx: client_max_body_size): up to 1.25 times blob.store.part.size for "
        "files, and any size for the changes of a commit (docs/storage.md)"
    )
    return InvalidError(text, hint=hint, **where)


def not_of_store(service: str, status: int, setting: str, **where: Any) -> UnavailableError:
    """The error for "not found" without an error of the service: so answers an ingress whose server is away. It says
    nothing about a blob."""
    hint = f"check {setting}: a proxy or a load balancer may have answered, because it does not reach the server"
    return UnavailableError(f"{service} answered {status} without an error of its own", hint=hint, **where)


class Connections:
    """The open connections of a client. A server that stops reading an upload has as long as one that does not answer:
    urllib3 itself gives it only the time to connect.

    Args:
        classes: the classes of urllib3's pools by scheme, which the client uses from now on. Changed in place.
    """

    def __init__(self, classes: dict[str, Any]) -> None:
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()
        self._broken = False
        for scheme, pool in classes.items():
            classes[scheme] = type(pool.__name__, (pool,), {"ConnectionCls": self._watched(pool.ConnectionCls)})

    def _watched(self, kind: Any) -> Any:
        connections = self

        class Watched(kind):  # type: ignore[misc]
            def connect(self) -> None:
                if connections._broken:
                    raise ConnectionAbortedError("the client is closed")
                super().connect()
                self.sock.settimeout(TIMEOUT_S)
                if not connections._added(self):
                    self.close()
                    raise ConnectionAbortedError("the client is closed")

            def request(self, *args: Any, **more: Any) -> None:
                if self.sock is not None:
                    self.timeout = TIMEOUT_S  # urllib3 sets it to the time to connect before each request
                super().request(*args, **more)

        return Watched

    def _added(self, connection: Any) -> bool:
        """Note a new connection. Returns: whether it may be used."""
        with self._lock:
            self._open.add(connection)
            return not self._broken

    def break_off(self) -> None:
        """Make requests in progress and later ones fail."""
        with self._lock:
            self._broken = True
            found = list(self._open)
        for connection in found:
            sock = connection.sock
            if sock is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


class _Hiding(logging.Filter):
    """Masks secrets in the text of a log record and of its error."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._texts: frozenset[str] = frozenset()

    def add(self, texts: Iterable[str]) -> None:
        """Also hide these texts."""
        with self._lock:
            self._texts |= {text for text in texts if len(text) > 3}

    def filter(self, record: logging.LogRecord) -> bool:
        """Mask a record, and let it pass."""
        try:
            record.msg, record.args = self._masked(record.getMessage()), ()
        except Exception:  # the library made a wrong record
            record.msg, record.args = "(a message that cannot be formatted)", ()
        if record.exc_info and not record.exc_text:
            record.exc_text = self._masked(logging.Formatter().formatException(record.exc_info))
        return True

    def _masked(self, text: str) -> str:
        return _TOKEN.sub(rf"\g<1>{MASK}", without(self._texts, text))


_HIDING = _Hiding()
#: The text without its arguments says what kind of line it is. It comes before the filter that puts them in.
_LIMIT = RateLimit("the blob store's client", lambda record: str(record.msg)[:80], level=logging.WARNING)


def hide(texts: Iterable[str]) -> None:
    """Mask these texts in what the libraries log from now on, by all loggers that exist now, and limit how much they
    log."""
    _HIDING.add(texts)
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] in _LIBRARIES and isinstance(logger, logging.Logger):
            logger.addFilter(_LIMIT)
            logger.addFilter(_HIDING)
