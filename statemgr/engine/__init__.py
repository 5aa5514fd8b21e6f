"""The engine surface: for an engine that commits many tasks at once, on many machines.

Steps of one atomic commit of a whole job::

    epoch = manager.acquire()                                  # fences older owners and reads the topic
    with open_attempt(config, task, checkpoint, epoch) as a:   # on any machine; needs no Kafka to commit
        a.store("totals").put(key, value)
        a.attach("output", rows)
        prepared = a.prepare(input_offsets)                    # everything it names is durable
    manager.publish(list_of_prepared)                          # all tasks, one Kafka transaction

An attempt that is never published leaves only blobs that expire.

``materialize_task`` builds the first snapshots of a task next to the running job, and ``wanted_stores`` says which are
needed. An engine can spread them over its machines, which need Kafka for this. In the same way, ``rescale_job`` gives
its orders to ``rescale_unit`` on other machines.

``FollowedStore`` reads a store of another job at its newest checkpoint.
"""

from __future__ import annotations

from statemgr.engine.attempts import (
    Attempt,
    Epoch,
    open_attempt,
    read_attachment,
    read_attachments,
)
from statemgr.engine.followed_store import FollowedStore
from statemgr.engine.health import Condition
from statemgr.engine.materializer import materialize_task, wanted_stores
from statemgr.engine.rescaler import RescaledJob, rescale_job, rescale_unit
from statemgr.engine.shared_checkpoints import SharedCheckpoints, share_checkpoints
from statemgr.flows.materialize import Materialized
from statemgr.model.checkpoint import Attachment, MicroBatch
from statemgr.model.codecs import decode_checkpoint as checkpoint_from_bytes
from statemgr.model.codecs import decode_prepared as prepared_from_bytes
from statemgr.model.codecs import encode_checkpoint as checkpoint_to_bytes
from statemgr.model.codecs import encode_prepared as prepared_to_bytes
from statemgr.model.commit import PreparedCommit, ProducedRecord
from statemgr.model.permissions import PERMISSIONS, PermissionFlags

__all__ = [
    "PERMISSIONS",
    "Attachment",
    "Attempt",
    "Condition",
    "Epoch",
    "FollowedStore",
    "Materialized",
    "MicroBatch",
    "PermissionFlags",
    "PreparedCommit",
    "ProducedRecord",
    "RescaledJob",
    "SharedCheckpoints",
    "checkpoint_from_bytes",
    "checkpoint_to_bytes",
    "materialize_task",
    "open_attempt",
    "prepared_from_bytes",
    "prepared_to_bytes",
    "read_attachment",
    "read_attachments",
    "rescale_job",
    "rescale_unit",
    "share_checkpoints",
    "wanted_stores",
]
