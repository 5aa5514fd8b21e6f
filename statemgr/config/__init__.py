"""Configuration of a job: keys, defaults, validation, secrets.

``keys`` is the one place for what a key accepts, its default and its meaning.
"""

from statemgr.config.factories import blob_store_of
from statemgr.config.job import ClientKind, JobConfig
from statemgr.config.policies import RetryPolicy
from statemgr.config.store import StoreConfig
from statemgr.config.values import Value

__all__ = ["ClientKind", "JobConfig", "RetryPolicy", "StoreConfig", "Value", "blob_store_of"]
