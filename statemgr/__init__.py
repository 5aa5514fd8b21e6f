"""statemgr: keyed state of stream jobs, restored from a blob store in bulk, with Kafka as the source of truth.

The public surface: the names below, :mod:`statemgr.engine`, :mod:`statemgr.errors` and :mod:`statemgr.phases`.
Names are loaded when first used, so that importing one part does not import every client library.
"""

from __future__ import annotations

import atexit
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from statemgr.version import __version__ as __version__

if TYPE_CHECKING:
    from statemgr.config import JobConfig
    from statemgr.consumer.messages import InputMessage
    from statemgr.engine.task import Task
    from statemgr.errors import StatemgrError
    from statemgr.kafka.registry.schema_registry import SchemaRegistry
    from statemgr.logs import configure_logging
    from statemgr.manager import StateManager
    from statemgr.model.checkpoint import Checkpoint
    from statemgr.operations.standby.followed_store import FollowedStore
    from statemgr.reader import JobReader
    from statemgr.serdes import Serde
    from statemgr.stores.store import Store

__all__ = [
    "Checkpoint",
    "FollowedStore",
    "InputMessage",
    "JobConfig",
    "JobReader",
    "SchemaRegistry",
    "Serde",
    "StateManager",
    "StatemgrError",
    "Store",
    "Task",
    "configure_logging",
]

_HOME = {
    "Checkpoint": "statemgr.model.checkpoint",
    "FollowedStore": "statemgr.operations.standby.followed_store",
    "InputMessage": "statemgr.consumer.messages",
    "JobConfig": "statemgr.config",
    "JobReader": "statemgr.reader",
    "SchemaRegistry": "statemgr.kafka.registry.schema_registry",
    "Serde": "statemgr.serdes",
    "StateManager": "statemgr.manager",
    "StatemgrError": "statemgr.errors",
    "Store": "statemgr.stores.store",
    "Task": "statemgr.engine.task",
    "configure_logging": "statemgr.logs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'statemgr' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


@atexit.register
def _end() -> None:
    """Runs after what a program registers once it has imported this package: that may still close managers."""
    handle = sys.modules.get("statemgr.local.rocksdb.handle")
    if handle is not None:
        handle.wait_for_calls()
