"""What an S3 server can do, tried once per process, endpoint and bucket. Touches objects of one prefix, for a moment.

Servers that speak S3's protocol lack parts of it: tags, the condition that a name does not exist, checksums, or the
deletion of many objects. Each says so in its own way (501, or 400 with the name of the header), and a proxy may answer
like that for a moment. A job that gave up a part for such an answer could overwrite blobs, or lose them to a lifecycle
rule. So an answer that means "not supported" only raises the question, and probes answer it. The server lacks a part if
it refuses an object with that part, accepts one without it, and refuses the first again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from botocore.exceptions import ClientError

from statemgr.blobs.names import unique_name
from statemgr.blobs.s3.client import Place
from statemgr.blobs.s3.errors import DIGEST, code_and_status, translated
from statemgr.errors import AccessDenied

_CONTENT = b"probe"
#: The parts that are tried: fields of a PUT of :data:`_CONTENT`.
_PARTS: Mapping[str, Any] = {"Tagging": "statemgr-probe=1", "IfNoneMatch": "*", "ChecksumCRC32": "115vKg=="}


@dataclass
class _Known:
    lock: threading.Lock = field(default_factory=threading.Lock)
    checks: bool | None = None
    lacks: frozenset[str] = frozenset()
    deletes_many: bool = True


_KNOWN: dict[tuple[str, str], _Known] = {}


class Abilities:
    """What the server of a place can do.

    Args:
        own: the prefix of the names of probes, within the place.
        encryption: fields of every PUT that ask for encryption at rest.
    """

    def __init__(self, place: Place, own: str, encryption: Mapping[str, Any]) -> None:
        self._place = place
        self._own = own
        self._encryption = encryption
        self._known = _KNOWN.setdefault((place.client.meta.endpoint_url, place.bucket), _Known())
        #: A directory bucket has no tags, which is documented.
        self._tried = {name: value for name, value in _PARTS.items() if name != "Tagging" or not place.is_directory}

    @property
    def lacks(self) -> frozenset[str]:
        """The parts of a PUT that the server is known to lack: Tagging, IfNoneMatch, ChecksumCRC32. Asks nothing."""
        return self._known.lacks if not self._place.is_directory else self._known.lacks | {"Tagging"}

    @property
    def deletes_many(self) -> bool:
        """Whether one request deletes many objects. Asks nothing."""
        return self._known.deletes_many

    def deletes_one_by_one(self) -> None:
        """The server has refused to delete many objects with one request, in an answer that says so."""
        self._known.deletes_many = False

    def checks_uploads(self) -> bool:
        """Whether the server refuses an object with a wrong checksum. Raises: StatemgrError."""
        known = self._known
        if known.checks is None:
            with known.lock:
                if known.checks is None:
                    known.checks = "ChecksumCRC32" not in known.lacks and self._refuses_wrong_checksum()
        return known.checks

    def learn(self, lacks: frozenset[str]) -> None:
        """Try each part, after a request that left out ``lacks`` was refused. Raises: StatemgrError."""
        with self._known.lock:
            if self.lacks == lacks:
                self._known.lacks |= {part for part in self._tried if part not in lacks and self._has_not(part)}

    # --- probes ---

    def _has_not(self, part: str) -> bool:
        fields = {part: self._tried[part]}
        if self._refuses(fields):
            return not self._refuses({}) and self._refuses(fields)
        return False

    def _refuses(self, fields: Mapping[str, Any]) -> bool:
        """Whether the server says that it does not support an object with these fields. Raises: StatemgrError."""
        key = self._probe_key()
        with translated(self._place.bucket):
            try:
                self._put(key, fields)
                try:
                    return "Tagging" in fields and not self._is_tagged(key)
                finally:
                    self._delete(key)
            except ClientError as error:
                if not is_unsupported(error):
                    raise
                return True

    def _is_tagged(self, key: str) -> bool:
        """Whether tags can be read and removed, and the PUT has set one. Raises: ClientError."""
        where: Any = {"Bucket": self._place.bucket, "Key": key}
        try:
            if not self._place.client.get_object_tagging(**where)["TagSet"]:
                return False
        except ClientError as error:
            if code_and_status(error)[1] != 403:  # a job that has begun can do without the right to read tags
                raise
        self._place.client.delete_object_tagging(**where)
        return True

    def _refuses_wrong_checksum(self) -> bool:
        key = self._probe_key()
        with translated(self._place.bucket):
            try:
                self._put(key, {"ChecksumCRC32": "AAAAAA=="})
            except ClientError as error:
                code, status = code_and_status(error)
                if is_unsupported(error):
                    return False
                if code in DIGEST or (status == 400 and code == "InvalidRequest"):
                    return True
                raise
        self._delete(key)
        return False

    def _probe_key(self) -> str:
        return f"{self._place.prefix}{self._own}_statemgr-probe-{unique_name()}"

    def _put(self, key: str, fields: Mapping[str, Any]) -> None:
        self._place.client.put_object(
            Bucket=self._place.bucket, Key=key, Body=_CONTENT, **{**self._encryption, **fields}
        )

    def _delete(self, key: str) -> None:
        # if the job may write but not delete, five bytes stay
        with suppress(AccessDenied), translated(self._place.bucket):
            self._place.client.delete_object(Bucket=self._place.bucket, Key=key)


def is_unsupported(error: ClientError) -> bool:
    """Whether an answer means that the server lacks something: 501, or a refusal of a header by its name."""
    code, status = code_and_status(error)
    message = str(error.response.get("Error", {}).get("Message", "")).lower()
    names_header = "header" in message and ("unsupported" in message or "not supported" in message)
    return code == "NotImplemented" or status == 501 or (400 <= status < 500 and names_header)
