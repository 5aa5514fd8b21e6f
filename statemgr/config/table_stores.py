"""The keys of one store, a part of the table of configuration keys. Pure."""

from __future__ import annotations

from statemgr.config.entry import Key
from statemgr.config.rocksdb_options import ROCKSDB_OPTIONS
from statemgr.config.values import AVRO_SCHEMAS, FACTORIES, TOPIC, choice, integer

#: Serdes that give equal values equal bytes whatever their version, so that keys can be found by them.
KEY_SERDES = ("bytes", "string", "integer", "json", "msgpack")
VALUE_SERDES = (*KEY_SERDES, "avro")
_DAY_MS = 24 * 3600 * 1000

_OF_STORES = (
    Key(pattern="stores.<name>.type", kind=choice("rocksdb", "memory"), default="rocksdb", doc="Store type."),
    Key(
        pattern="stores.<name>.backup.factories",
        kind=FACTORIES,
        default_text="`task.backup.factories`",
        doc="Backup of this store alone.",
    ),
    Key(
        pattern="stores.<name>.restore.factories",
        kind=FACTORIES,
        default_text="`task.restore.factories`",
        doc="Restore of this store alone.",
    ),
    Key(
        pattern="stores.<name>.changelog.topic",
        kind=TOPIC,
        default_text="`<job.name>-<job.id>-<name>-changelog`",
        doc="The store's changelog topic.",
    ),
    Key(
        pattern="stores.<name>.changelog",
        kind=TOPIC,
        alias_of="stores.<name>.changelog.topic",
        doc="Samza's name for `stores.<name>.changelog.topic`; a leading `kafka.` is left out.",
    ),
    Key(
        pattern="stores.<name>.changelog.min.compaction.lag.ms",
        kind=integer(0, 365 * _DAY_MS, "milliseconds"),
        default=4 * 3600 * 1000,
        doc="Age below which the changelog is not compacted.",
    ),
    Key(
        pattern="stores.<name>.key.serde",
        kind=choice(*KEY_SERDES),
        default="bytes",
        doc="Serde of keys; `integer` is 8 bytes that sort as numbers do.",
    ),
    Key(
        pattern="stores.<name>.value.serde",
        kind=choice(*VALUE_SERDES),
        default="bytes",
        doc="Serde of values.",
    ),
    Key(
        pattern="stores.<name>.value.avro.schemas",
        kind=AVRO_SCHEMAS,
        default_text="none",
        deferred=True,
        doc="Every version of the values' schema for the serde `avro`, oldest first; the last is written. "
        "`${file:PATH}` reads the JSON array from a file.",
    ),
    Key(
        pattern="stores.<name>.write.batch.size",
        kind=integer(1, 1_000_000),
        default=5000,
        doc="Changes gathered in memory (at most 4 MiB) and written in one batch; reads see them at once.",
    ),
)
_ROCKSDB = tuple(
    Key(pattern=f"stores.<name>.rocksdb.{o.name}", kind=o.kind, default=o.default, doc=o.doc) for o in ROCKSDB_OPTIONS
)

#: Keys below `stores.<name>`, in the order of the documentation.
STORE_KEYS: tuple[Key, ...] = (*_OF_STORES, *_ROCKSDB)
