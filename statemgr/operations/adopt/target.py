"""Checks that the configuration of a new job suits the old job that it adopts. Writes nothing."""

from __future__ import annotations

from statemgr.config import StoreConfig
from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG
from statemgr.errors import ConfigError
from statemgr.operations.adopt.changelogs import listed
from statemgr.operations.adopt.found import OldJob
from statemgr.operations.adopt.origins import PLAIN, Kind
from statemgr.operations.adopt.snapshots import OldSnapshots
from statemgr.serdes.windows import parts_of
from statemgr.services import Services


def check_target(services: Services, found: OldJob, blobs: OldSnapshots | None, *, in_place: bool) -> None:
    """Check that the job's configuration suits what was found. Raises: ConfigError."""
    config = services.config
    durable = {name for name, is_durable in services.durable.items() if is_durable}
    if durable != set(found.names):
        raise ConfigError(
            f"the old job has the stores {listed(found.names)}, but the configuration backs up {listed(durable)}",
            hint="name the same stores: give each changelog the name of its store with `statemgr adopt --changelog "
            "STORE=TOPIC`, or change the tables of the stores; add new stores after the adoption",
            job=config.job_name,
        )
    for name in found.names:
        factory, there = (BLOB_STORE, "snapshots") if name in found.snapshots else (KAFKA_CHANGELOG, "a changelog")
        ours = config.stores[name]
        _check_kind(ours, found.stores[name].proof.kind if name in found.stores else PLAIN)
        for key, factories in (("backup", ours.backup_factories), ("restore", ours.restore_factories)):
            if factory not in factories:
                raise ConfigError(
                    f"store {name!r} must have {factory} in task.{key}.factories: its state is in {there}",
                    hint="add it; `statemgr migrate` and docs/migrating.md say how to move to blobs later",
                    key=f"task.{key}.factories",
                    store=name,
                )
    if blobs is not None:
        blobs.check_target(found.snapshots, in_place=in_place)
    for name, store in found.stores.items():
        ours = config.stores[name]
        key = f"stores.{name}.changelog.topic"
        if in_place and store.topic.name in found.input_topics:
            raise ConfigError(
                f"the changelog to adopt in place is an input topic, {store.topic.name}: the new job would read "
                "what it writes",
                hint="use `statemgr adopt` without `--in-place`",
                store=name,
            )
        if in_place and ours.changelog_topic != store.topic.name:
            raise ConfigError(
                f"{key} is {ours.changelog_topic}, but the changelog to adopt in place is {store.topic.name}",
                hint=f"set stores.{name}.changelog.topic to that topic",
                key=key,
            )
        moved = [task for task, partition in enumerate(store.partitions) if partition.number != task]
        if in_place and moved:
            raise ConfigError(
                f"task {moved[0]} of the old job has partition {store.partitions[moved[0]].number} of "
                f"{store.topic.name}, but a task of the new job has the partition of its own number",
                hint="use `statemgr adopt` without `--in-place`: the copy moves the partitions",
                store=name,
            )
        if not in_place and ours.changelog_topic == store.topic.name:
            raise ConfigError(
                f"{key} is the changelog of the old job, {store.topic.name}: nothing would be copied",
                hint=f"remove stores.{name}.changelog.topic, or make the topic the new job's with `statemgr adopt "
                "--in-place`",
                key=key,
            )
    taken = {config.stores[name].changelog_topic for name in found.stores} & {
        s.topic.name for s in found.stores.values()
    }
    if taken and not in_place:
        raise ConfigError(
            f"topic {min(taken)} is a changelog of the old job, and of another store of the new one",
            hint="give each store a topic of its own with stores.<name>.changelog.topic",
        )


def _check_kind(ours: StoreConfig, kind: Kind) -> None:
    """Check that a new store suits a kind of old ones. Raises: ConfigError."""
    if ours.ttl_ms is not None and kind.time_ms is None and kind.with_expiry is None:
        raise ConfigError(
            f"store {ours.name!r} has a TTL, and the values of the old job have no expiry",
            hint=f"remove stores.{ours.name}.ttl.ms; to let entries expire, write them to a new store with a TTL later",
            key=f"stores.{ours.name}.ttl.ms",
            store=ours.name,
        )
    kind_of_keys, _ = parts_of(ours.key_serde) or ("bytes", "")
    if kind_of_keys != kind.key_serde:
        key = f"stores.{ours.name}.key.serde"
        hint = (
            f'set {key} = "{kind.key_serde}", or with the serde of the keys inside, "{kind.key_serde}(string)"'
            if kind.key_serde != "bytes"
            else f"set {key} to the serde of its keys"
        )
        raise ConfigError(
            f"store {ours.name!r} of the old job has {kind.title}, and {key} is {ours.key_serde}",
            hint=hint,
            key=key,
            store=ours.name,
        )
