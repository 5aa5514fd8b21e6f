"""The lifecycle rule that expires objects with the TTL tag. Touches the bucket's lifecycle rules only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from statemgr.blobs.s3.errors import code_and_status, translated
from statemgr.errors import AccessDenied, InvalidError

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

TTL_TAG = "statemgr-ttl"


def problem(client: S3Client, bucket: str, prefix: str, ttl_days: int) -> str | None:
    """What is wrong with the rule for ``ttl_days``, or None."""
    try:
        rules = _rules(client, bucket)
    except InvalidError:
        return (
            "note: this S3 server has no lifecycle rules: what failed commits leave behind "
            "stays until it is collected by hand"
        )
    except AccessDenied as error:
        return f"the bucket's lifecycle rules cannot be read (s3:GetLifecycleConfiguration): {error.message}"
    if any(_covers(rule, prefix, ttl_days) for rule in rules):
        return None
    return (
        f"no lifecycle rule of bucket {bucket} expires objects tagged {TTL_TAG}={ttl_days}: "
        "what failed commits leave behind would stay for ever; let `statemgr doctor --fix` install it"
    )


def ensure(client: S3Client, bucket: str, prefix: str, ttl_days: int) -> None:
    """Add the rule if no enabled rule does its work. Raises: InvalidError where the server has none."""
    rules = _rules(client, bucket)
    if any(_covers(rule, prefix, ttl_days) for rule in rules):
        return
    tag = {"Key": TTL_TAG, "Value": str(ttl_days)}
    identity = f"{TTL_TAG}-{ttl_days}-{prefix}".rstrip("-/")[:255]
    rule = {
        "ID": identity,
        "Status": "Enabled",
        "Filter": {"And": {"Prefix": prefix, "Tags": [tag]}} if prefix else {"Tag": tag},
        "Expiration": {"Days": ttl_days},
    }
    configuration: Any = {"Rules": [*(r for r in rules if r.get("ID") != identity), rule]}
    with translated(bucket):
        client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=configuration)


def _rules(client: S3Client, bucket: str) -> list[Any]:
    with translated(bucket):
        try:
            return list(client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"])
        except ClientError as error:
            if code_and_status(error)[0] != "NoSuchLifecycleConfiguration":
                raise
            return []


def _covers(rule: Any, prefix: str, ttl_days: int) -> bool:
    found = rule.get("Filter", {})
    both = found.get("And", {})
    tags = both.get("Tags", [found["Tag"]] if "Tag" in found else [])
    wanted = [{"Key": TTL_TAG, "Value": str(ttl_days)}]
    starts = both.get("Prefix") or found.get("Prefix") or ""
    days = rule.get("Expiration", {}).get("Days")
    return bool(rule.get("Status") == "Enabled" and tags == wanted and prefix.startswith(starts) and days == ttl_days)
