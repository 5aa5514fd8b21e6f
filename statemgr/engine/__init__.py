"""The engine surface: for an engine that commits many tasks at once, on many machines.

Steps of one atomic commit of a whole job::

    epoch = manager.acquire()                                  # fences older owners and reads the topic
    with open_attempt(config, task, checkpoint, epoch) as a:   # on any machine; needs no Kafka to commit
        a.store("totals").put(key, value)
        a.attach("output", rows)
        prepared = a.prepare(input_offsets)                    # everything it names is durable
    manager.publish(list_of_prepared, refill=epoch.refill)     # all tasks, one Kafka transaction

An attempt that is never published leaves only blobs that expire.

An engine can also spread work of some operations over its machines, which need Kafka for this:
:mod:`statemgr.operations.materialize.tasks` and :mod:`statemgr.operations.rescale.spread`.
:mod:`statemgr.operations.standby.followed_store` reads a store of another job at its newest checkpoint.
"""

from __future__ import annotations

from statemgr.engine.attempts import (
    Attempt,
    Epoch,
    open_attempt,
    read_attachment,
    read_attachments,
)
from statemgr.engine.shared_checkpoints import SharedCheckpoints, share_checkpoints
from statemgr.local.shared_directories import Scratch
from statemgr.model.checkpoint import Attachment, MicroBatch
from statemgr.model.codecs import decode_checkpoint as checkpoint_from_bytes
from statemgr.model.codecs import decode_prepared as prepared_from_bytes
from statemgr.model.codecs import encode_checkpoint as checkpoint_to_bytes
from statemgr.model.codecs import encode_prepared as prepared_to_bytes
from statemgr.model.commit import PreparedCommit, ProducedRecord
from statemgr.model.jobs.permissions import PERMISSIONS, PermissionFlags
from statemgr.telemetry.liveness import Condition

__all__ = [
    "PERMISSIONS",
    "Attachment",
    "Attempt",
    "Condition",
    "Epoch",
    "MicroBatch",
    "PermissionFlags",
    "PreparedCommit",
    "ProducedRecord",
    "Scratch",
    "SharedCheckpoints",
    "checkpoint_from_bytes",
    "checkpoint_to_bytes",
    "open_attempt",
    "prepared_from_bytes",
    "prepared_to_bytes",
    "read_attachment",
    "read_attachments",
    "share_checkpoints",
]
