"""Translates the errors of S3 and botocore into statemgr's. The only place that reads their codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

import urllib3.exceptions
from botocore import exceptions as sdk

from statemgr.blobs.connections import body_refused, not_of_store, of_limit, of_network
from statemgr.blobs.names import BlobExists
from statemgr.errors import (
    AccessDenied,
    ConfigError,
    DiskFull,
    InvalidError,
    MissingBlob,
    StatemgrError,
    UnavailableError,
)
from statemgr.os_errors import limit_behind

_CREDENTIALS = {
    "AccessDenied", "AccountProblem", "AllAccessDisabled", "AuthFailure", "AuthorizationHeaderMalformed",
    "ExpiredToken", "ExpiredTokenException", "Forbidden", "InvalidAccessKeyId", "InvalidSecurity",
    "InvalidToken", "NotSignedUp", "RequestExpired", "SignatureDoesNotMatch", "TokenRefreshRequired",
    "UnauthorizedAccess",
}  # fmt: skip
_BUCKET = {"NoSuchBucket", "InvalidBucketName", "InvalidBucketState"}
_REGION = {"PermanentRedirect", "TemporaryRedirect", "IllegalLocationConstraintException", "301", "307"}
#: The bytes were damaged in transit, so a retry may succeed.
DIGEST = {
    "BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch",
    "IncompleteBody",
}  # fmt: skip
_BUSY = {
    "BandwidthLimitExceeded", "ConditionalRequestConflict", "IDPCommunicationError", "InternalError",
    "OperationAborted",
    "PriorRequestNotComplete", "RequestLimitExceeded", "RequestThrottled", "RequestTimeout",
    "RequestTimeoutException", "ServiceUnavailable",
    "SlowDown", "Throttling", "ThrottlingException", "TooManyRequestsException",
}  # fmt: skip
_FULL = {"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"}
_CREDENTIAL_EXCEPTIONS = (
    sdk.NoCredentialsError,
    sdk.PartialCredentialsError,
    sdk.UnauthorizedSSOTokenError,
    sdk.ProfileNotFound,
    sdk.NoRegionError,
)
#: The source of the credentials does not answer, or refuses: the SDK does not say which.
_RETRIEVAL_EXCEPTIONS = (sdk.CredentialRetrievalError, sdk.TokenRetrievalError)
_NETWORK_EXCEPTIONS = (
    sdk.ConnectionError,
    sdk.HTTPClientError,
    sdk.ResponseStreamingError,
    sdk.IncompleteReadError,
    urllib3.exceptions.HTTPError,
    ConnectionError,
    TimeoutError,
)

_NETWORK_HINT = "check blob.store.s3.endpoint and the network"
_SOURCE_HINT = (
    "check where the SDK gets them (the AWS profile, its credential_process, the machine's role, or SSO), and this "
    "machine's clock"
)
_KEYS_HINT = "check blob.store.s3.access.key, .secret.key and .session.token, the rights, and the clock of this machine"
#: Codes that mean that a right is missing. The answer to a HEAD has only its status.
_RIGHT_MISSING = {"AccessDenied", "AllAccessDisabled", "Forbidden", "UnauthorizedAccess", "403"}
#: Request → the right that it needs.
_RIGHTS = {
    "PutObject": "s3:PutObject and s3:PutObjectTagging",
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "DeleteObject": "s3:DeleteObject",
    "DeleteObjects": "s3:DeleteObject",
    "ListObjectsV2": "s3:ListBucket",
    "GetObjectTagging": "s3:GetObjectTagging",
    "DeleteObjectTagging": "s3:DeleteObjectTagging",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration",
    "PutBucketLifecycleConfiguration": "s3:PutLifecycleConfiguration",
}
#: Requests to which a server itself may answer 404 without a code: one whose answer has no body (Place.head asks
#: again), and one that some servers do not know.
_CODELESS = {"HeadObject", "GetBucketVersioning"}


@contextmanager
def translated(bucket: str, blob_id: str | None = None) -> Iterator[None]:
    """Raise errors of the SDK and of the network inside the block as statemgr's."""
    try:
        yield
    except sdk.ClientError as error:
        raise _of_answer(error, bucket, blob_id) from error
    except _CREDENTIAL_EXCEPTIONS as error:
        raise AccessDenied(f"there are no S3 credentials: {error}", hint=_KEYS_HINT, bucket=bucket) from error
    except _RETRIEVAL_EXCEPTIONS as error:
        raise UnavailableError(f"no S3 credentials were given: {error}", hint=_SOURCE_HINT, bucket=bucket) from error
    except (*_NETWORK_EXCEPTIONS,) as error:
        raise of_network(error, "S3", _NETWORK_HINT, bucket=bucket, blob=blob_id) from error
    except sdk.BotoCoreError as error:
        if limit := limit_behind(error):
            raise of_limit(limit, "S3", bucket=bucket, blob=blob_id) from error
        raise InvalidError(f"the S3 client refused the request: {error}", bucket=bucket, blob=blob_id) from error
    except OSError as error:
        raise of_limit(error, "S3", bucket=bucket, blob=blob_id) from error
    except Exception as error:
        if str(error).startswith("Invalid endpoint"):  # a ValueError
            raise ConfigError(
                "the endpoint of the S3 server is no address", key="blob.store.s3.endpoint",
                hint="set it (or AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the AWS profile) to one such as http://host:9000",
            ) from error  # fmt: skip
        if not _is_of_credentials(error):
            raise
        # RuntimeError is the SDK's own, for credentials that have expired; other texts may be from a secret
        text = str(error) if isinstance(error, RuntimeError) else f"they cannot be read ({type(error).__name__})"
        raise UnavailableError(f"no S3 credentials were given: {text}", hint=_SOURCE_HINT, bucket=bucket) from error


def _is_of_credentials(error: Exception) -> bool:
    """Whether the SDK's code that gets credentials raised an error: it translates few."""
    return any(
        frame.f_globals.get("__name__") in ("botocore.credentials", "botocore.tokens")
        for frame, _ in walk_tb(error.__traceback__)
    )


def code_and_status(error: sdk.ClientError) -> tuple[str, int]:
    """S3's error code and the HTTP status of an answer."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    return code, int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def too_large(text: str, bucket: str, blob_id: str | None) -> InvalidError:
    """The error for a blob that S3 does not take in one request."""
    return InvalidError(
        f"{text}: a request stores at most 5 GiB",
        hint="more tasks make the blobs of each smaller: `statemgr rescale --tasks` (docs/storage.md)",
        bucket=bucket,
        blob=blob_id,
    )


def of_key(code: str, message: str, bucket: str, blob_id: str) -> StatemgrError:
    """The error for one object in the answer to a request for many objects."""
    status = {"AccessDenied": 403, "NoSuchKey": 404}.get(code, 500)
    response: Any = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return _of_answer(sdk.ClientError(response, "DeleteObjects"), bucket, blob_id)


def _of_answer(error: sdk.ClientError, bucket: str, blob_id: str | None) -> StatemgrError:
    code, status = code_and_status(error)
    message = str(error.response.get("Error", {}).get("Message", ""))[:200]
    text = f"S3 answered {status or '?'} {code}: {message}".rstrip(": ")
    where = {"bucket": bucket, "blob": blob_id}
    if code in _BUCKET:
        return AccessDenied(text, hint="create the bucket, or correct blob.store.uri", **where)
    if code in _REGION or status in (301, 307):
        return AccessDenied(text, hint="set blob.store.s3.region to the region of the bucket", **where)
    # the answer to a HEAD has no body: 400 is all that S3 says of an expired token there
    if code in _CREDENTIALS or status in (401, 403) or (status == 400 and code == "400"):
        hint = "set this machine's clock" if code == "RequestTimeTooSkewed" else _KEYS_HINT
        right = _RIGHTS.get(error.operation_name) if code in _RIGHT_MISSING else None
        if right:
            hint = f"grant this user the rights in docs/security.md, or {_KEYS_HINT}"
        return AccessDenied(text, hint=hint, missing_right=right, **where)
    if status == 412 or code == "PreconditionFailed":
        return BlobExists("a blob of this name exists already", **where)
    if code in _FULL or status == 507:
        return DiskFull(text, hint="free space in the object store: it is full", **where)
    if code == "EntityTooLarge":
        return too_large(text, bucket, blob_id)
    if status == 413:
        return body_refused(text, **where)
    if code == "NotImplemented" or status == 501:
        hint = "use another S3 server: this one lacks the function"
        if "Lifecycle" in error.operation_name:
            hint = "run `statemgr gc --write` regularly: this server has no lifecycle rules"
        return InvalidError(text, hint=hint, **where)
    if code in DIGEST or code in _BUSY or status in (408, 409, 429) or status >= 500:
        return UnavailableError(text, **where)
    if status in (404, 410):
        # the SDK puts the status in place of a code
        if error.operation_name not in _CODELESS and (not code or code.isdigit()):
            return not_of_store("S3", status, "blob.store.s3.endpoint", **where)
        return MissingBlob("the blob does not exist", **where)
    return InvalidError(text, **where)
