"""What the stores on Google Cloud Storage and on Azure have in common. Touches one prefix of a bucket or container.

- A PUT has a checksum and the condition that the name does not exist. A probe shows once per process whether the server
  refuses a wrong checksum; if not, the verifying decorator reads every upload back.
- A body of more than :data:`WHOLE` bytes is sent in pieces. Both services drop the pieces of an upload that never ended
  after a week, and have no list of them.
- A clean-up deletes many blobs with one request.
"""

from __future__ import annotations

import base64
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, ClassVar, Protocol
from urllib.parse import quote

from statemgr.blobs.body import CHUNK, BytesReader, body_size, open_body
from statemgr.blobs.clouds.http import Answer, Damaged, Http, Lacking
from statemgr.blobs.names import check_blob_id, delete_each, unique_name
from statemgr.errors import AccessDenied, InvalidError, MissingBlob, StatemgrError, UnavailableError
from statemgr.ports import BlobInfo, BlobPage, BlobReader, BlobStore, Body, UnfinishedUpload

#: Bytes of the largest body that is sent with one request, and of the pieces of larger ones.
WHOLE, PIECE = 128 * 1024 * 1024, 32 * 1024 * 1024


class Checksum(Protocol):
    """As those of ``hashlib``."""

    def update(self, data: bytes, /) -> None: ...

    def digest(self) -> bytes: ...


class CloudBlobStore(ABC):
    """A store below a prefix, and its administration.

    Args:
        prefix: empty, or ends in ``/``.
        own: the prefix of the names of the job's blobs. Nothing is written elsewhere.
    """

    most_deletes: ClassVar[int]
    listing_tells_ttl: ClassVar[bool]

    def __init__(self, http: Http, prefix: str, own: str, ttl_days: int) -> None:
        self._http = http
        self._prefix = prefix
        self._own = own
        self._ttl_days = ttl_days
        self._lock = threading.Lock()
        self._checks: bool | None = None
        self._deletes_many = True

    # --- what each cloud has of its own ---

    @abstractmethod
    def _url(self, key: str) -> str:
        """The URL of a blob."""

    @abstractmethod
    def _body_url(self, key: str) -> str:
        """The URL of a blob's bytes."""

    @abstractmethod
    def _checksum(self) -> Checksum:
        """A new checksum of the kind that the service compares."""

    @abstractmethod
    def _send(self, key: str, stream: IO[bytes], size: int, digest: str, ttl_days: int | None, blob_id: str) -> None:
        """Write a new blob with one request. Raises: StatemgrError."""

    @abstractmethod
    def _send_pieces(self, key: str, stream: IO[bytes], size: int, digest: str, ttl_days: int | None) -> None:
        """Write a new blob with a request for each piece. Raises: StatemgrError."""

    @abstractmethod
    def _delete_together(self, keys: Sequence[str]) -> Sequence[Answer]:
        """The answers to deletes with one request. Raises: StatemgrError; ValueError for another answer."""

    @abstractmethod
    def _page(self, prefix: str, token: str | None, most: int) -> BlobPage:
        """A page of the listing of keys. Raises: StatemgrError."""

    @abstractmethod
    def stat(self, blob_id: str) -> BlobInfo:
        """As the port."""

    @abstractmethod
    def remove_ttl(self, blob_id: str) -> None:
        """As the port."""

    @abstractmethod
    def copy_from(self, source: BlobStore, wanted: BlobInfo, blob_id: str, *, ttl_days: int) -> bool:
        """As the port."""

    @abstractmethod
    def fix(self) -> Sequence[str]:
        """As the port."""

    @abstractmethod
    def _rule_problem(self) -> str | None:
        """What ``doctor`` says of the lifecycle rule."""

    # --- writing ---

    @property
    def administration(self) -> CloudBlobStore:
        return self

    @property
    def checks_uploads(self) -> bool:
        """Asked once, with a few bytes and a wrong checksum."""
        if self._checks is None:
            with self._lock:
                if self._checks is None:
                    self._checks = self._refuses_wrong_checksum()
        return self._checks

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        key, size = self._key(blob_id), body_size(body)
        with open_body(body) as stream:
            digest = self._digest(stream)
            if size > WHOLE:
                self._send_pieces(key, stream, size, digest, ttl_days)
            else:
                self._send(key, stream, size, digest, ttl_days, blob_id)

    def _digest(self, stream: IO[bytes]) -> str:
        """The checksum of a body, as the service takes it."""
        checksum = self._checksum()
        while data := stream.read(CHUNK):
            checksum.update(data)
        return base64.b64encode(checksum.digest()).decode()

    def _refuses_wrong_checksum(self) -> bool:
        key = self.probe_key()
        with open_body(b"other") as other, open_body(b"probe") as stream:
            try:
                self._send(key, stream, 5, self._digest(other), None, key)
            except Damaged:
                return True
        self.forget_probe(key)
        return False

    def probe_key(self) -> str:
        """A new name for a blob that a probe writes for a moment."""
        return f"{self._prefix}{self._own}_statemgr-probe-{unique_name()}"

    def forget_probe(self, key: str) -> None:
        """Delete it. If the job may write but not delete, a few bytes stay."""
        with suppress(AccessDenied, MissingBlob):
            self._http.ask("DELETE", self._url(key), what="delete", accept=(200, 202, 204))

    def delete(self, blob_id: str) -> None:
        with suppress(MissingBlob):
            self._http.ask("DELETE", self._url(self._key(blob_id)), what="delete", accept=(200, 202, 204), blob=blob_id)

    def delete_many(self, blob_ids: Sequence[str]) -> Mapping[str, StatemgrError]:
        """Deletes as many as the service takes with one request; one by one if the server has only that, or refuses.

        Raises: AccessDenied if it refuses one alone, too.
        """
        failed: dict[str, StatemgrError] = {}
        for start in range(0, len(blob_ids), self.most_deletes):
            chunk = blob_ids[start : start + self.most_deletes]
            answers: Sequence[Answer] | None = None
            if self._deletes_many and len(chunk) > 1:
                try:
                    answers = self._delete_together([self._key(blob_id) for blob_id in chunk])
                except (InvalidError, AccessDenied) as refusal:
                    self.delete(chunk[0])  # tells whether a right is missing
                    chunk = chunk[1:]
                    if isinstance(refusal, Lacking):  # an emulator or a proxy without batches
                        self._deletes_many = False
            if answers is None:
                failed |= delete_each(chunk, self.delete)
                continue
            for blob_id, answer in zip(chunk, answers, strict=True):
                if answer.status not in (200, 202, 204, 404):
                    failed[blob_id] = self._http.error_of(answer, "delete", blob=blob_id)
        return failed

    # --- reading ---

    @contextmanager
    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> Iterator[BlobReader]:
        key = self._key(blob_id)
        if length == 0:
            self.stat(blob_id)
            yield BytesReader(b"")
            return
        headers = {}
        if offset or length is not None:
            headers["Range"] = f"bytes={offset}-{'' if length is None else offset + length - 1}"
        with ExitStack() as opened:
            try:
                url = self._body_url(key)
                reader = opened.enter_context(self._http.read(url, headers, offset=offset, blob_id=blob_id))
            except MissingBlob as missing:
                self.stat(blob_id)  # tells a missing blob from a missing bucket, and from the answer of a proxy
                raise UnavailableError("the server does not find a blob that it has", blob=blob_id) from missing
            yield reader or BytesReader(b"")  # None: the range begins at the end of the blob

    def _key(self, blob_id: str) -> str:
        check_blob_id(blob_id)
        return self._prefix + blob_id

    # --- administration ---

    def list(self, prefix: str, token: str | None = None) -> BlobPage:
        return self._page(self._prefix + prefix, token, 1000)

    def time_ms(self) -> int:
        """The date of an answer (whole seconds)."""
        self._page(self._prefix + self._own, None, 1)
        return self._http.time_ms()

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        """None: the service has no list, and drops them after a week."""
        return iter(())

    def abandon(self, upload: UnfinishedUpload) -> None:  # noqa: B027 - not for subclasses
        """Nothing to do."""

    def probe(self) -> Sequence[str]:
        problems = [self._rule_problem()]
        if not self.checks_uploads:
            problems.append("note: this server does not check checksums: every upload is read back")
        if not self._deletes_many:
            problems.append("note: this server deletes one blob with a request: a clean-up takes one for each blob")
        return [problem for problem in problems if problem]

    def close(self) -> None:
        self._http.close()


def pieces(stream: IO[bytes], size: int) -> Iterator[bytes]:
    """The pieces of a body, from its beginning."""
    stream.seek(0)
    for begin in range(0, size, PIECE):
        wanted, data = min(PIECE, size - begin), bytearray()
        while len(data) < wanted and (more := stream.read(wanted - len(data))):
            data += more
        yield bytes(data)


def quoted(key: str) -> str:
    """A key as a part of a URL, with its slashes escaped too."""
    return quote(key, safe="")
