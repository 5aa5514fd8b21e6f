"""Administers an S3 bucket: listing, lifecycle rules, clock, multipart uploads. Touches one prefix of it.

statemgr itself sends each part of a file as its own object. Multipart uploads come from other software that copied
blobs here. An upload that never ended is in no listing, but it costs storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any

from botocore.exceptions import ClientError

from statemgr.blobs.s3.abilities import Abilities
from statemgr.blobs.s3.client import Place
from statemgr.blobs.s3.errors import code_and_status, translated
from statemgr.blobs.s3.expiry import TTL_TAG, Records
from statemgr.errors import AccessDenied, InvalidError, MissingBlob
from statemgr.ports import BlobInfo, BlobPage, UnfinishedUpload

_MINIMUM_SIZE = "TransitionDefaultMinimumObjectSize"
#: Days after which the versions of deleted blobs are deleted. Until then somebody can bring a blob back.
_VERSION_DAYS = 7


class S3Administration:
    """Implements :class:`statemgr.ports.BlobAdministration` for the blobs below a place.

    Args:
        ttl_days: the TTL whose lifecycle rule :meth:`probe` looks for.
        abilities: what the server can do.
        own: the prefix of the names of the job's blobs, within the place.
    """

    #: A listing has no tags and no records.
    listing_tells_ttl = False

    def __init__(self, place: Place, ttl_days: int, abilities: Abilities, own: str) -> None:
        self._place = place
        self._ttl_days = ttl_days
        self._abilities = abilities
        self._own = place.prefix + own

    def list(self, prefix: str, token: str | None = None) -> BlobPage:
        """Leaves expiry records out. A page of a directory bucket has no order."""
        place = self._place
        start: Any = {"ContinuationToken": token} if token else {}
        wanted = place.prefix + prefix
        with translated(place.bucket):
            page = place.client.list_objects_v2(Bucket=place.bucket, Prefix=place.listable(wanted), **start)
        blobs = [
            BlobInfo(found["Key"].removeprefix(place.prefix), found["Size"], _epoch_ms(found["LastModified"]))
            for found in page.get("Contents", ())
            if found["Key"].startswith(wanted) and not Records.is_one(found["Key"])
        ]
        return BlobPage(blobs, page.get("NextContinuationToken"))

    def time_ms(self) -> int:
        """The date of an answer (whole seconds)."""
        place = self._place
        with translated(place.bucket):
            # no HEAD of the bucket: the body that it lacks tells a missing bucket from the answer of a proxy
            page = place.client.list_objects_v2(Bucket=place.bucket, Prefix=self._own, MaxKeys=1)
        try:
            return _epoch_ms(parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"]))
        except (KeyError, ValueError) as error:
            raise InvalidError(
                "this S3 server does not tell its time (the header Date)", bucket=place.bucket
            ) from error

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        place, wanted = self._place, self._place.prefix + prefix
        uploads = place.client.get_paginator("list_multipart_uploads")
        pages = iter(uploads.paginate(Bucket=place.bucket, Prefix=place.listable(wanted)))
        while True:
            with translated(place.bucket):
                page = next(pages, None)
            if page is None:
                return
            for found in page.get("Uploads", ()):
                if found["Key"].startswith(wanted):  # some servers ignore the prefix
                    blob_id = found["Key"].removeprefix(place.prefix)
                    yield UnfinishedUpload(blob_id, found["UploadId"], _epoch_ms(found["Initiated"]))

    def abandon(self, upload: UnfinishedUpload) -> None:
        place, key = self._place, self._place.prefix + upload.blob_id
        with suppress(MissingBlob), translated(place.bucket, upload.blob_id):
            place.client.abort_multipart_upload(Bucket=place.bucket, Key=key, UploadId=upload.token)

    def probe(self) -> Sequence[str]:
        """Says what the server lacks as far as requests have shown it: make one of each kind before."""
        problems = [self._rule_problem(), self._versions_problem()]
        if not self._abilities.checks_uploads():
            problems.append("note: this server does not check checksums: every upload is read back")
        if not self._abilities.deletes_many:
            problems.append("note: this server deletes one object with a request: a clean-up takes one for each blob")
        return [problem for problem in problems if problem]

    def fix(self) -> Sequence[str]:
        """Add the lifecycle rules that are missing; the bucket's other rules stay. One expires objects with the TTL
        tag, unless a late PUT could tag a published object again. In a bucket that keeps versions, another one deletes
        those of the job's deleted blobs.

        Raises: InvalidError if the server has no lifecycle rules.
        """
        place, days, done = self._place, self._ttl_days, list[str]()
        if not self._abilities.lacks & {"Tagging", "IfNoneMatch"}:
            tag = {"Key": TTL_TAG, "Value": str(days)}
            which: Any = {"And": {"Prefix": place.prefix, "Tags": [tag]}} if place.prefix else {"Tag": tag}
            rule: dict[str, Any] = {"Filter": which, "Expiration": {"Days": days}}
            self._install(f"{TTL_TAG}-{days}-{place.prefix}", rule, lambda one: _covers(one, place.prefix, days))
            done.append("the lifecycle rule is installed")
        if self._keeps_versions():
            rule = {
                "Filter": {"Prefix": self._own},
                "NoncurrentVersionExpiration": {"NoncurrentDays": _VERSION_DAYS},
                # what hides deleted blobs when no version of theirs is left
                "Expiration": {"ExpiredObjectDeleteMarker": True},
            }
            self._install(f"statemgr-versions-{self._own}", rule, lambda one: _deletes_versions(one, self._own))
            done.append(f"a lifecycle rule deletes the versions of deleted blobs after {_VERSION_DAYS} days")
        return tuple(done)

    def _install(self, identity: str, rule: Mapping[str, Any], is_enough: Callable[[Any], bool]) -> None:
        """Add a rule, unless one of the bucket's rules is enough."""
        place, identity = self._place, identity.rstrip("-/")[:255]
        found = self._rules()
        rules = found.get("Rules", ())
        if any(map(is_enough, rules)):
            return
        others = [one for one in rules if one.get("ID") != identity]
        configuration: Any = {"Rules": [*others, {"ID": identity, "Status": "Enabled", **rule}]}
        # S3 resets the setting of the other rules if a request lacks it
        kept = {_MINIMUM_SIZE: found[_MINIMUM_SIZE]} if _MINIMUM_SIZE in found else {}
        with translated(place.bucket):
            place.client.put_bucket_lifecycle_configuration(
                Bucket=place.bucket, LifecycleConfiguration=configuration, **kept
            )

    def _keeps_versions(self) -> bool:
        """Whether deleted objects stay as versions. False if the server has no such request, or refuses it."""
        place = self._place
        if place.is_directory:
            return False
        with suppress(AccessDenied, InvalidError, MissingBlob), translated(place.bucket):
            # a suspended bucket still has its older versions
            return place.client.get_bucket_versioning(Bucket=place.bucket).get("Status") in ("Enabled", "Suspended")
        return False

    def _versions_problem(self) -> str | None:
        if not self._keeps_versions():
            return None
        with suppress(AccessDenied, InvalidError):
            if any(_deletes_versions(rule, self._own) for rule in self._rules().get("Rules", ())):
                return None
        return (
            f"note: bucket {self._place.bucket} keeps a version of every deleted blob, which costs storage for ever; "
            f"`statemgr doctor --fix` installs a lifecycle rule that deletes them after {_VERSION_DAYS} days"
        )

    def _rule_problem(self) -> str | None:
        if "Tagging" in self._abilities.lacks:
            place = "directory buckets have" if self._place.is_directory else "this S3 server has"
            return f"note: {place} no tags: what failed commits leave behind stays until `statemgr gc --write`"
        try:
            rules = self._rules().get("Rules", ())
        except InvalidError:
            return (
                "note: this S3 server has no lifecycle rules: what failed commits leave behind "
                "stays until `statemgr gc --write`"
            )
        except AccessDenied as error:
            return f"the bucket's lifecycle rules cannot be read: {error.message}; grant s3:GetLifecycleConfiguration"
        is_covered = any(_covers(rule, self._place.prefix, self._ttl_days) for rule in rules)
        if "IfNoneMatch" in self._abilities.lacks:
            late = "without conditional PUTs (If-None-Match), an upload that arrives late tags a published blob again"
            if is_covered:
                return f"{late}, and a lifecycle rule of bucket {self._place.bucket} would delete it: remove this rule"
            return f"note: {late}, so no lifecycle rule is needed here: run `statemgr gc --write` regularly"
        if is_covered:
            return None
        return (
            f"no lifecycle rule of bucket {self._place.bucket} expires objects tagged {TTL_TAG}={self._ttl_days}: "
            "what failed commits leave behind would stay for ever; `statemgr doctor --fix` installs the rule"
        )

    def _rules(self) -> Mapping[str, Any]:
        place = self._place
        with translated(place.bucket):
            try:
                return place.client.get_bucket_lifecycle_configuration(Bucket=place.bucket)
            except ClientError as error:
                if code_and_status(error)[0] != "NoSuchLifecycleConfiguration":
                    raise
                return {}


def _epoch_ms(time: Any) -> int:
    return int(time.timestamp() * 1000)


def _covers(rule: Any, prefix: str, ttl_days: int) -> bool:
    found = rule.get("Filter", {})
    both = found.get("And", {})
    tags = both.get("Tags", [found["Tag"]] if "Tag" in found else [])
    wanted = [{"Key": TTL_TAG, "Value": str(ttl_days)}]
    starts = both.get("Prefix") or found.get("Prefix") or ""
    days = rule.get("Expiration", {}).get("Days")
    return bool(rule.get("Status") == "Enabled" and tags == wanted and prefix.startswith(starts) and days == ttl_days)


def _deletes_versions(rule: Any, prefix: str) -> bool:
    """Whether a lifecycle rule deletes every old version of the objects below a prefix."""
    found = rule.get("Filter", {"Prefix": rule.get("Prefix", "")})
    versions = rule.get("NoncurrentVersionExpiration", {})
    is_whole = found.keys() <= {"Prefix"} and prefix.startswith(found.get("Prefix", ""))
    is_every = "NoncurrentDays" in versions and not versions.get("NewerNoncurrentVersions")
    return bool(rule.get("Status") == "Enabled" and is_whole and is_every)
