"""Samza's names for keys and classes that statemgr has too. Pure.

Loading replaces them and tells the user. A name of Samza's that means something else here is an unknown key.
"""

from __future__ import annotations

from typing import Final

from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG

#: Samza's key → ours.
SAMZA_KEYS: Final = {
    "task.commit.manager": "task.backup.factories",
    "task.restore.manager": "task.restore.factories",
    "stores.backup.factories": "task.backup.factories",
    "stores.restore.factories": "task.restore.factories",
    "stores.<name>.changelog": "stores.<name>.changelog.topic",
    "stores.<name>.factory": "stores.<name>.type",
}
#: Samza's class → our name.
SAMZA_CLASSES: Final = {
    "org.apache.samza.storage.KafkaChangelogStateBackendFactory": KAFKA_CHANGELOG,
    "org.apache.samza.storage.blobstore.BlobStoreStateBackendFactory": BLOB_STORE,
    "org.apache.samza.storage.kv.RocksDbKeyValueStorageEngineFactory": "rocksdb",
    "org.apache.samza.storage.kv.inmemory.InMemoryKeyValueStorageEngineFactory": "memory",
}


def our_key(key: str) -> str:
    """Our name for a key of Samza's; any other key as it is."""
    first, _, rest = key.partition(".")
    name, _, setting = rest.partition(".")
    if key in SAMZA_KEYS or first != "stores":
        return SAMZA_KEYS.get(key, key)
    pattern = SAMZA_KEYS.get(f"stores.<name>.{setting}")
    return pattern.replace("<name>", name) if pattern else key


def translated(given: str, value: object) -> tuple[str, object, list[str]]:
    """A key and its value with our names instead of Samza's, and a sentence for each name that was replaced."""
    key, replaced = our_key(given), {}
    if key != given:
        replaced[given] = key
    if key != given and key.endswith(".changelog.topic") and isinstance(value, str):
        value = value.removeprefix("kafka.")  # <system>.<stream>
    if key.endswith((".factories", ".type")):
        items = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else []
        names = {name: name.strip() for name in items if isinstance(name, str)}
        classes = {name: SAMZA_CLASSES[text] for name, text in names.items() if text in SAMZA_CLASSES}
        if classes:
            ours = [classes.get(item, item) for item in items]
            value = ",".join(ours) if isinstance(value, str) else ours
            replaced |= {name.strip(): our for name, our in classes.items()}
    return key, value, [f"{name} is Samza's name for {ours}; statemgr uses {ours}" for name, ours in replaced.items()]
