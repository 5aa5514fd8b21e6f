"""Configuration of a job: keys, defaults, validation, secrets (floor 0).

``keys`` is the one table that loading, defaults and documentation come from.
"""

from statemgr.config.blob_stores import blob_store_of
from statemgr.config.job import ClientKind, JobConfig
from statemgr.config.retry import RetryPolicy
from statemgr.config.store import StoreConfig
from statemgr.config.values import Value

__all__ = ["ClientKind", "JobConfig", "RetryPolicy", "StoreConfig", "Value", "blob_store_of"]
