"""``StateTable``: looks up values in a store of another job, at its newest checkpoint, on the driver and on executors.

Each process opens a table once, however many Spark tasks use it, and keeps it open until the process ends.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa

from spark_integration.failures import marked
from spark_integration.reading.columns import value_column
from statemgr import FollowedStore, JobConfig
from statemgr.errors import ConfigError, RetryableError
from statemgr.ids import task_name
from statemgr.serdes import key_serde, value_serde

_open: dict[tuple[str, str, tuple[str, ...]], FollowedStore] = {}
_opening = threading.Lock()


class StateTable:
    """A store of another job, read-only. Use it in ``mapInArrow``, ``mapInPandas`` and process functions.

    It reads the job's checkpoint topic, and fetches only what is new. It fences nobody and writes nothing. All Python
    workers of a machine share the fetched files in ``state.dir``.

    Args:
        config: the other job. Executors need its Kafka and its blob store.
        store: may be left out if the job has only one.
        tasks: numbers of the tasks to read, if not all.
        refresh_seconds: how old the copy may be before a look-up asks the topic for a newer checkpoint.

    Raises: ConfigError if there is no such store.
    """

    def __init__(
        self,
        config: JobConfig,
        store: str | None = None,
        *,
        tasks: Iterable[int] = (),
        refresh_seconds: float = 1.0,
    ) -> None:
        if store is None and len(config.stores) == 1:
            store = next(iter(config.stores))
        if store is None or store not in config.stores:
            raise ConfigError(
                "the job has several stores" if store is None else f"the job has no store {store!r}",
                hint=f"choose one with StateTable(config, store): it has {', '.join(config.stores) or 'none'}",
            )
        # secrets stay unresolved
        self._mapping = json.dumps(config.to_mapping(), sort_keys=True)
        self._store = store
        self._tasks = tuple(task_name(task) for task in tasks)
        self._refresh_seconds = refresh_seconds

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name.startswith("_") and name != "_serdes"}

    def __repr__(self) -> str:
        return f"StateTable(store={self._store!r}, tasks={self._tasks!r})"

    def get(self, key: Any) -> Any | None:
        """Return the value of a key, or None."""
        return self.get_many([key])[0]

    def get_many(self, keys: Iterable[Any]) -> list[Any | None]:
        """Return the values of keys in their order, decoded by the store's serdes. Null and absent keys give None.

        All values of a call come from the same checkpoints. Raises: RetryableError (Kafka or the blob store does not
        answer; Spark runs the task again), MissingState if the job has no checkpoint yet, CorruptError, AccessDenied.
        """
        _, read, _ = self._serdes
        return [None if value is None else read(value) for value in self._found(keys)]

    def lookup(self, keys: pa.Array | pa.ChunkedArray) -> pa.Array:
        """Like :meth:`get_many`, from and to Arrow. The values have the type that ``statemgr.state`` shows."""
        return self._serdes[2](self._found(keys.to_pylist()))

    @cached_property
    def _serdes(
        self,
    ) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any], Callable[[Sequence[bytes | None]], pa.Array]]:
        store = JobConfig.from_mapping(json.loads(self._mapping)).stores[self._store]
        return key_serde(store).serialize, value_serde(store).deserialize, value_column(store).decode

    def _found(self, keys: Iterable[Any]) -> list[bytes | None]:
        write = self._serdes[0]
        wanted = [None if key is None else write(key) for key in keys]
        try:
            table = self._opened()
            table.refresh(self._refresh_seconds)
            values = iter(table.get_many([key for key in wanted if key is not None]))
        except RetryableError as error:
            raise RetryableError(marked(error)) from error
        return [None if key is None else next(values) for key in wanted]

    def _opened(self) -> FollowedStore:
        at = (self._mapping, self._store, self._tasks)
        with _opening:
            if at not in _open:
                _open[at] = FollowedStore(JobConfig.from_mapping(json.loads(self._mapping)), self._store, self._tasks)
            return _open[at]
