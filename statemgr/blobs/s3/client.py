"""Makes boto3 clients: settings, connections, masked and limited logs, and the place in a bucket. Touches the SDK.

- The SDK's own retries are off, because the retrying decorator owns the deadline.
- A request to a server that does not answer lasts until its read time-out. The SDK's public ``close`` does not end it,
  and neither ``Config`` nor the event hooks give access to sockets. So :class:`Connections` uses two private
  attributes of botocore. It reads them when the client is made, so a botocore that renames them fails at once.
- At the level DEBUG the SDK logs the headers of every request and the text that it signs. Credentials are masked there.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import boto3
from botocore.config import Config

from statemgr.blobs.names import check_blob_id
from statemgr.blobs.s3.errors import translated
from statemgr.config.secrets import MASK, without
from statemgr.errors import AccessDenied, MissingBlob
from statemgr.logs import RateLimit

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 30
#: Settings that are credentials.
_SECRETS = ("access.key", "secret.key", "session.token")
_LIBRARIES = ("botocore", "boto3", "s3transfer", "urllib3")
#: A session token that the SDK has renewed itself, as a header or a parameter, in any quoting.
_TOKEN = re.compile(r"(x-amz-security-token\W{1,6})[\w+/=%-]{16,}", re.IGNORECASE)


def make_client(settings: Mapping[str, str | bool], connections: int) -> S3Client:
    """A client with the settings after ``blob.store.s3.``. boto3 finds credentials and region that are not set."""

    def text(name: str) -> str | None:
        return str(settings[name]) if settings.get(name) else None

    # before the SDK sees them, and again after it has made all its loggers
    secrets = [str(settings[name]) for name in _SECRETS if settings.get(name)]
    hide(secrets)
    style = "path" if settings.get("path.style") in (True, "true") else "auto"
    with translated(""):
        # an own session: other software in this process may use the default one
        client = boto3.session.Session().client(
            "s3",
            endpoint_url=text("endpoint"),
            region_name=text("region"),
            aws_access_key_id=text("access.key"),
            aws_secret_access_key=text("secret.key"),
            aws_session_token=text("session.token"),
            config=Config(
                max_pool_connections=connections,
                connect_timeout=_CONNECT_TIMEOUT_S,
                read_timeout=_READ_TIMEOUT_S,
                retries={"total_max_attempts": 1},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                # each PUT carries a signed CRC-32; an additional SHA-256 of its body would cost more than sending it
                s3={"addressing_style": cast(Any, style), "payload_signing_enabled": False},
            ),
        )
    hide(secrets)
    return client


@dataclass(frozen=True)
class Place:
    """The objects of a bucket below a prefix, which is empty or ends in ``/``."""

    client: S3Client
    bucket: str
    prefix: str

    @property
    def is_directory(self) -> bool:
        """A directory bucket (S3 Express One Zone): no tags, no order, and only whole directories are listed."""
        return self.bucket.endswith("--x-s3")

    def key(self, blob_id: str) -> str:
        """The key of a blob. Raises: InvalidError if it is not a blob's name."""
        check_blob_id(blob_id)
        return self.prefix + blob_id

    def listable(self, prefix: str) -> str:
        """The longest start of ``prefix`` that the bucket can list."""
        return prefix[: prefix.rfind("/") + 1] if self.is_directory else prefix

    def head(self, blob_id: str) -> Any:
        """The answer to a HEAD. Raises: MissingBlob."""
        try:
            with translated(self.bucket, blob_id):
                return self.client.head_object(Bucket=self.bucket, Key=self.key(blob_id))
        except MissingBlob:
            # the answer to a HEAD has no body to tell a missing bucket from a missing object
            try:
                with translated(self.bucket):
                    self.client.head_bucket(Bucket=self.bucket)
            except MissingBlob:
                raise AccessDenied(
                    "the bucket does not exist", bucket=self.bucket, hint="create it, or correct blob.store.uri"
                ) from None
            raise


class Connections:
    """The open connections of a client."""

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
            def connect(self) -> None:
                if connections._broken:
                    raise ConnectionAbortedError("the client is closed")
                super().connect()
                connections._open.add(self)

        return Watched

    def break_off(self) -> None:
        """Make requests in progress and later ones fail."""
        self._broken = True
        for connection in list(self._open):
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
_LIMIT = RateLimit("the S3 client", lambda record: str(record.msg)[:80], level=logging.WARNING)


def hide(texts: Iterable[str]) -> None:
    """Mask these texts in what the libraries log from now on, by all loggers that exist now, and limit how much they
    log."""
    _HIDING.add(texts)
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] in _LIBRARIES and isinstance(logger, logging.Logger):
            logger.addFilter(_LIMIT)
            logger.addFilter(_HIDING)
