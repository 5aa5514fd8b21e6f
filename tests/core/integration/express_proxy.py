"""Turns a bucket of an ordinary S3 server into a directory bucket of S3 Express One Zone.

The differences come from "Differences for directory buckets" in Amazon's user guide and from the SDK's service model: a
session signs the requests, objects have no tags, and a listing has no order, no ``StartAfter`` and only prefixes that
end in ``/``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.core.integration.s3_proxy import Answer, S3Proxy, error_body

_SESSION = """<?xml version='1.0'?><CreateSessionResult><Credentials><AccessKeyId>session</AccessKeyId>
<SecretAccessKey>session-secret</SecretAccessKey><SessionToken>session-token</SessionToken>
<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></CreateSessionResult>"""
#: Headers that belong to the client's own signature.
_SIGNED = {"authorization", "x-amz-date", "x-amz-content-sha256", "x-amz-s3session-token", "x-amz-security-token"}


@dataclass
class ExpressProxy(S3Proxy):
    """``bucket`` is both the directory bucket and a bucket of the server; the keys are the server's."""

    bucket: str = ""
    access_key: str = ""
    secret_key: str = ""
    region: str = ""

    def create_bucket(self) -> None:
        """Create the bucket, empty."""
        path, headers = f"/{self.bucket}", {"host": urlsplit(self.upstream).netloc}
        status, _, body = super().forward("PUT", path, self._signed("PUT", path, headers, b""), b"")
        assert status == 200, body

    def forward(self, method: str, path: str, headers: Mapping[str, str], data: bytes) -> Answer:
        """Answer as Express would."""
        lower = {name.lower(): value for name, value in headers.items()}
        query = parse_qs(urlsplit(path).query, keep_blank_values=True)
        if "session" in query:
            return 200, [("Content-Type", "application/xml")], _SESSION.encode()
        if refusal := self._refusal(lower, query):
            return refusal
        status, answered, body = super().forward(method, path, self._signed(method, path, lower, data), data)
        if "list-type" in query:
            body = _shuffled(body)
        return status, answered, body

    def _refusal(self, headers: Mapping[str, str], query: Mapping[str, list[str]]) -> Answer | None:
        if "x-amz-s3session-token" not in headers:
            return _error(403, "AccessDenied", "directory buckets take the credentials of a session")
        if "tagging" in query or headers.get("x-amz-tagging"):
            return _error(501, "NotImplemented", "A header you provided implies functionality that is not implemented")
        prefix = query.get("prefix", [""])[0]
        if ("list-type" in query or "uploads" in query) and prefix and not prefix.endswith("/"):
            return _error(400, "InvalidRequest", "a prefix ends in the delimiter")
        if {"start-after", "upload-id-marker"} & query.keys():
            return _error(501, "NotImplemented", "this parameter is not supported for directory buckets")
        return None

    def _signed(self, method: str, path: str, headers: Mapping[str, str], data: bytes) -> Mapping[str, str]:
        kept = {name: value for name, value in headers.items() if name not in _SIGNED}
        request = AWSRequest(method=method, url=f"http://{headers['host']}{path}", data=data, headers=kept)
        S3SigV4Auth(Credentials(self.access_key, self.secret_key), "s3", self.region).add_auth(request)
        return dict(request.headers.items())


def _error(status: int, code: str, message: str) -> Answer:
    return status, [("Content-Type", "application/xml")], error_body(code, message)


def _shuffled(page: bytes) -> bytes:
    """Put the objects on a page of a listing in another order."""
    objects = re.findall(rb"<Contents>.*?</Contents>", page, re.DOTALL)
    if len(objects) < 2:
        return page
    start, end = page.index(objects[0]), page.rindex(objects[-1]) + len(objects[-1])
    random.Random(len(page)).shuffle(objects)
    return page[:start] + b"".join(objects) + page[end:]
