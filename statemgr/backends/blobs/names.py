"""The names of blobs. Pure.

Snapshots: ``<job>/<id>/<Partition_i>/<store>/<attempt>/index`` and ``…/<attempt>/<file>.<part>``. Segments of all
stores of a task: ``<job>/<id>/<Partition_i>/_segments/<attempt>``. Names are unique per attempt, so that no blob is
ever overwritten, and below the store's or the task's own prefix, so that no other blob is ever deleted. An extra
attempt of a hedged upload adds ``-1`` or ``-2`` to the name.
"""

from __future__ import annotations

import re

from statemgr.ids import task_prefix
from statemgr.model.hashing import content_hash
from statemgr.ports import StoreIdentity

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\Z")
_INDEX = re.compile(r"/index(-\d)?\Z")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


def store_prefix(identity: StoreIdentity) -> str:
    """The prefix of all blobs of a store; ends in ``/``."""
    return f"{task_prefix(identity.job_key, identity.task)}{identity.store}/"


def index_blob(identity: StoreIdentity, attempt: str) -> str:
    """The name of the index blob of an attempt."""
    return f"{store_prefix(identity)}{attempt}/index"


def is_index_blob(blob_id: str) -> bool:
    """Whether a blob with this name is an index, also that of an extra attempt."""
    return _INDEX.search(blob_id) is not None


def segments_prefix(identity: StoreIdentity) -> str:
    """The prefix of all blobs of segments of a task; ends in ``/``."""
    return f"{task_prefix(identity.job_key, identity.task)}_segments/"


def segments_blob(identity: StoreIdentity, attempt: str) -> str:
    """The name of the blob of segments of an attempt."""
    return f"{segments_prefix(identity)}{attempt}"


def pack_blob(identity: StoreIdentity, attempt: str, number: int) -> str:
    """The name of a blob of several small files of an attempt. No part of a file has such a name."""
    return f"{store_prefix(identity)}{attempt}/packs/{number}"


def shared_segments_blob(identity: StoreIdentity, attempt: str) -> str:
    """The name of a blob of segments of several tasks."""
    return f"{identity.job_key}/_segments/{attempt}"


def file_prefix(identity: StoreIdentity, attempt: str, path: str) -> str:
    """The name of a file's parts before ``.<number>``: a plain file name, or for any other path its end and a hash, so
    that different paths never share a name."""
    name = path
    if not _PLAIN.match(path):
        readable = _UNSAFE.sub("_", path)[-40:]
        name = f"_{readable}-{content_hash(path.encode('utf-8', 'surrogatepass')).hex()}"
    return f"{store_prefix(identity)}{attempt}/{name}"
