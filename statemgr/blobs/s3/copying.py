"""Copies objects inside a bucket, so that their bytes do not pass through this process. Touches one object of it.

A copy has the condition that its name does not exist, like a PUT: one that the server makes late would otherwise put
back the TTL of an object that its repetition made, and that was published meanwhile.

Steps for an object that is too large for one request:

1. begin a multipart upload, with the TTL and the encryption of the copy
2. let the server copy one range after the other
3. complete the upload, which makes the object; if that fails, abandon the upload

An upload whose process is killed costs storage until ``statemgr gc`` abandons it.
Source: Amazon S3, "Copying an object using multipart upload".
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from statemgr.blobs.s3.client import Place
from statemgr.blobs.s3.errors import translated
from statemgr.errors import StatemgrError

_MIB = 1024 * 1024
#: Bytes that S3 copies with one request.
_MOST = 5 * 1024 * _MIB
#: Bytes of a part. An object of the largest possible size (5 TiB) has no more parts than S3 allows (10,000), and the
#: server answers each request before the client's read time-out.
_PART = 640 * _MIB


def copy_object(
    source: Place, source_id: str, size: int, target: Place, blob_id: str, fields: Mapping[str, Any], condition: Any
) -> None:
    """Write a new object with the bytes of one in the same bucket.

    Args:
        size: bytes of the source.
        fields: those of a PUT of the copy.
        condition: the fields of a request that makes an object only if its name is free.

    Raises: ClientError, outside of :func:`translated`.
    """
    where: Any = {"Bucket": target.bucket, "Key": target.key(blob_id)}
    origin: Any = {"CopySource": {"Bucket": source.bucket, "Key": source.key(source_id)}}
    client = target.client
    if size <= _MOST:
        directives: Any = {"MetadataDirective": "REPLACE"}
        if "Tagging" in fields:
            directives["TaggingDirective"] = "REPLACE"
        client.copy_object(**where, **origin, **directives, **fields, **condition)
        return
    upload: Any = {**where, "UploadId": client.create_multipart_upload(**where, **fields)["UploadId"]}  # 1
    try:
        parts: list[Any] = []
        for number, start in enumerate(range(0, size, _PART), 1):  # 2
            piece = f"bytes={start}-{min(start + _PART, size) - 1}"
            answer = client.upload_part_copy(**upload, **origin, PartNumber=number, CopySourceRange=piece)
            parts.append({"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]})
        client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, **condition)  # 3
    except BaseException:
        with suppress(StatemgrError), translated(target.bucket, blob_id):
            client.abort_multipart_upload(**upload)
        raise
