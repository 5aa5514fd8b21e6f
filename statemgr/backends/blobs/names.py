"""What the blobs of a store's snapshots are called. Pure.

``<job>/<id>/<Partition_i>/<store>/<attempt>/index`` and ``…/<attempt>/<file>.<part>``: unique per attempt, so that
nothing is ever overwritten, and below the store's own prefix, so that nothing of others is ever deleted. Segments of
all stores of a task lie together: ``<job>/<id>/<Partition_i>/_segments/<attempt>``.
"""

from __future__ import annotations

import re

from statemgr.ids import task_path
from statemgr.model.hashing import content_hash
from statemgr.ports import StoreIdentity

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\Z")
_INDEX = re.compile(r"/index(-\d)?\Z")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


def store_prefix(identity: StoreIdentity) -> str:
    """What the names of all blobs of a store start with; ends in ``/``."""
    return f"{identity.job_name}/{identity.job_id}/{task_path(identity.task)}/{identity.store}/"


def index_blob(identity: StoreIdentity, attempt: str) -> str:
    """The name of the index blob of an attempt; of a hedged upload's further tries, ``-1`` and ``-2`` follow."""
    return f"{store_prefix(identity)}{attempt}/index"


def is_index_blob(blob_id: str) -> bool:
    """Whether a blob of this name is an index."""
    return _INDEX.search(blob_id) is not None


def segments_prefix(identity: StoreIdentity) -> str:
    """What the names of all blobs of segments of a task start with, whichever of its stores; ends in ``/``."""
    return f"{identity.job_name}/{identity.job_id}/{task_path(identity.task)}/_segments/"


def segments_blob(identity: StoreIdentity, attempt: str) -> str:
    """The name of the blob of segments of an attempt; of a hedged upload, ``-1`` and ``-2`` follow."""
    return f"{segments_prefix(identity)}{attempt}"


def pack_blob(identity: StoreIdentity, attempt: str, number: int) -> str:
    """The name of a blob that holds several small files of an attempt; no file's parts are called so."""
    return f"{store_prefix(identity)}{attempt}/packs/{number}"


def shared_segments_blob(identity: StoreIdentity, attempt: str) -> str:
    """The name of a blob of segments of several tasks of the job."""
    return f"{identity.job_name}/{identity.job_id}/_segments/{attempt}"


def file_prefix(identity: StoreIdentity, attempt: str, path: str) -> str:
    """The name of a file's parts before ``.<number>``.

    A plain file name is kept for people to read; any other path becomes a readable rest and a hash, so that
    different paths never share a name.
    """
    name = path
    if not _PLAIN.match(path):
        readable = _UNSAFE.sub("_", path)[-40:]
        name = f"_{readable}-{content_hash(path.encode('utf-8', 'surrogatepass')).hex()}"
    return f"{store_prefix(identity)}{attempt}/{name}"
