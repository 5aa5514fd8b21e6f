"""Keeps the TTLs of blobs in an S3 bucket: in tags, or in metadata and records. Touches one prefix of the bucket.

- :class:`Tags`: the tag ``statemgr-ttl=<days>``, set by a header of the PUT. A lifecycle rule of the bucket expires
  tagged objects, and removing the tag keeps an object for ever.
- :class:`Records`, for servers without tags and for directory buckets (S3 Express One Zone): the days are in the
  object's own metadata, also set by the PUT, and an empty object ``.<name>.kept`` next to it says that the TTL was
  removed. No lifecycle rule sees this, so only ``statemgr gc`` deletes what failed commits left behind.

Their methods raise ClientError or StatemgrError, outside of :func:`~statemgr.blobs.s3.errors.translated`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from botocore.exceptions import ClientError

from statemgr.blobs.s3.client import Place
from statemgr.blobs.s3.errors import code_and_status
from statemgr.errors import MissingBlob

TTL_TAG = "statemgr-ttl"


class Expiry(Protocol):
    """How a bucket keeps TTLs."""

    def fields(self, ttl_days: int) -> Mapping[str, Any]:
        """The fields of a PUT that set a TTL."""

    def days(self, blob_id: str, head: Mapping[str, Any]) -> str | None:
        """A blob's TTL as text. None if it has none. ``head`` is the answer to the HEAD of the blob."""

    def remove(self, blob_id: str) -> None:
        """Remove a TTL. Raises: MissingBlob."""

    def keys(self, blob_id: str) -> Sequence[str]:
        """The keys of a blob and of its record."""


class Tags:
    """TTLs are tags."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def fields(self, ttl_days: int) -> Mapping[str, Any]:
        return {"Tagging": f"{TTL_TAG}={ttl_days}"}

    def days(self, blob_id: str, head: Mapping[str, Any]) -> str | None:
        place = self._place
        tags = place.client.get_object_tagging(Bucket=place.bucket, Key=place.key(blob_id))["TagSet"]
        return next((tag["Value"] for tag in tags if tag["Key"] == TTL_TAG), None)

    def remove(self, blob_id: str) -> None:
        place = self._place
        try:
            place.client.delete_object_tagging(Bucket=place.bucket, Key=place.key(blob_id))
        except ClientError as error:
            if code_and_status(error)[1] == 500:
                # some servers answer 500 for an object that does not exist
                place.head(blob_id)
            raise

    def keys(self, blob_id: str) -> Sequence[str]:
        return (self._place.key(blob_id),)


class Records:
    """TTLs are metadata, and a record says that one was removed."""

    def __init__(self, place: Place, encryption: Mapping[str, Any]) -> None:
        self._place = place
        self._encryption = encryption

    def fields(self, ttl_days: int) -> Mapping[str, Any]:
        return {"Metadata": {TTL_TAG: str(ttl_days)}}

    def days(self, blob_id: str, head: Mapping[str, Any]) -> str | None:
        days: str | None = head["Metadata"].get(TTL_TAG)
        if days is None:
            return None
        try:
            self._place.head(blob_id, self.keys(blob_id)[1])
        except MissingBlob:
            return days
        return None

    def remove(self, blob_id: str) -> None:
        place = self._place
        head = place.head(blob_id)
        if head.get("TagCount"):
            # the server had tags when the blob was written, and a lifecycle rule may know this one
            Tags(place).remove(blob_id)
        if TTL_TAG in head["Metadata"]:
            place.client.put_object(Bucket=place.bucket, Key=self.keys(blob_id)[1], Body=b"", **self._encryption)

    def keys(self, blob_id: str) -> Sequence[str]:
        parent, slash, name = self._place.key(blob_id).rpartition("/")
        return (f"{parent}{slash}{name}", f"{parent}{slash}.{name}.kept")

    @staticmethod
    def is_one(key: str) -> bool:
        """Whether a key is that of a record."""
        name = key.rpartition("/")[2]
        return name.startswith(".") and name.endswith(".kept")
