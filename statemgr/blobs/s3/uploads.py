"""Multipart uploads that were begun and never ended, and the server's time. Touches such uploads only.

statemgr itself sends each part of a file as an object of its own; multipart uploads come from other software that
copied blobs here. Nobody sees what they hold, and it is paid for.
"""

from __future__ import annotations

from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from statemgr.blobs.s3.errors import translated
from statemgr.errors import InvalidError, MissingBlob
from statemgr.ports import UnfinishedUpload

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


def unfinished(client: S3Client, bucket: str, prefix: str, below: str) -> Iterator[UnfinishedUpload]:
    """Uploads of keys that start with ``prefix`` and ``below``. Raises: InvalidError where the server has no list."""
    pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix + below)
    iterator = iter(pages)
    while True:
        with translated(bucket):
            page = next(iterator, None)
        if page is None:
            return
        for found in page.get("Uploads", ()):
            key = found["Key"]
            if key.startswith(prefix + below):  # some servers leave the prefix out of account
                started_ms = int(found["Initiated"].timestamp() * 1000)
                yield UnfinishedUpload(key.removeprefix(prefix), found["UploadId"], started_ms)


def abandon(client: S3Client, bucket: str, key: str, upload: UnfinishedUpload) -> None:
    """Abort one upload; one that is gone is no error."""
    try:
        with translated(bucket, upload.blob_id):
            client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload.token)
    except MissingBlob:
        pass


def time_ms(client: S3Client, bucket: str) -> int:
    """The server's clock by the date of an answer (whole seconds). Raises: InvalidError where there is none."""
    with translated(bucket):
        headers = client.head_bucket(Bucket=bucket)["ResponseMetadata"]["HTTPHeaders"]
    try:
        return int(parsedate_to_datetime(headers["date"]).timestamp() * 1000)
    except (KeyError, ValueError) as error:
        raise InvalidError("this S3 server does not tell its time (the header Date)", bucket=bucket) from error
