"""Makes boto3 clients: settings, connections, masked and limited logs, and the place in a bucket. Touches the SDK.

- The SDK's own retries are off, because the retrying decorator owns the deadline.
- A request to a server that does not answer lasts until its read time-out. The SDK's public ``close`` does not end it,
  and neither ``Config`` nor the event hooks give access to sockets. So :func:`connections_of` uses two private
  attributes of botocore. It reads them when the client is made, so a botocore that renames them fails at once.
- At the level DEBUG the SDK logs the headers of every request and the text that it signs. Credentials are masked there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.utils import parse_timestamp

from statemgr.blobs.connections import CONNECT_TIMEOUT_S, TIMEOUT_S, Connections, hide
from statemgr.blobs.names import check_blob_id
from statemgr.blobs.s3.errors import code_and_status, translated
from statemgr.errors import UnavailableError
from statemgr.version import __version__

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

#: Settings that are credentials.
_SECRETS = ("access.key", "secret.key", "session.token")


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
        own = botocore.session.get_session()
        own.register_component("data_loader", _descriptions())
        own.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=parsed_time)
        # for the services of the credentials, too: by default, they are asked several times for 60 seconds
        own.set_default_client_config(
            Config(
                max_pool_connections=connections,
                connect_timeout=CONNECT_TIMEOUT_S,
                read_timeout=TIMEOUT_S,
                retries={"total_max_attempts": 1},
                # a fixed text: the SDK puts its own together for each request, a tenth of the time of a GET
                user_agent=f"statemgr/{__version__}",
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                # each PUT carries a signed CRC-32; an additional SHA-256 of its body would cost more than sending it
                s3={"addressing_style": cast(Any, style), "payload_signing_enabled": False},
            )
        )
        client = boto3.session.Session(botocore_session=own).client(
            "s3",
            endpoint_url=text("endpoint"),
            region_name=text("region"),
            aws_access_key_id=text("access.key"),
            aws_secret_access_key=text("secret.key"),
            aws_session_token=text("session.token"),
        )
    hide(secrets)
    return client


@cache
def _descriptions() -> object:
    """The SDK's descriptions of services. A session reads its own otherwise, which takes 70 ms for each client."""
    return botocore.session.get_session().get_component("data_loader")


def parsed_time(text: Any) -> datetime:
    """The time in an answer: ISO 8601 in a list, RFC 9110 in a header. The SDK's own parser accepts more, such as
    numbers, and takes fifty times as long, or a thousand times for a name of a list. Raises: ValueError."""
    for parse in (datetime.fromisoformat, parsedate_to_datetime) if isinstance(text, str) else ():
        try:
            time = parse(text)
        except ValueError:
            continue
        if time.tzinfo is not None:
            return time
    return parse_timestamp(text)


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

    def head(self, blob_id: str, key: str | None = None) -> Any:
        """The answer to a HEAD of a blob, or of another key that belongs to it. Raises: MissingBlob."""
        key = key or self.key(blob_id)
        with translated(self.bucket, blob_id):
            try:
                return self.client.head_object(Bucket=self.bucket, Key=key)
            except ClientError as error:
                if code_and_status(error)[1] != 404:
                    raise
                # the body that an answer to a HEAD lacks tells a missing object from a missing bucket, and from a proxy
                self.client.get_object(Bucket=self.bucket, Key=key)["Body"].close()
                raise UnavailableError(
                    "the S3 server does not find an object that it has", bucket=self.bucket, blob=blob_id
                ) from error


def connections_of(client: S3Client) -> Connections:
    """The open connections of a client, to break them off."""
    session: Any = client._endpoint.http_session  # type: ignore[attr-defined]
    return Connections(session._pool_classes_by_scheme)
