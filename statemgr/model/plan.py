"""Restore plans: whether the configuration fits a checkpoint, which factory supplies each store, and where each file
comes from. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from statemgr.errors import ConfigError, MissingState, PermissionNeeded
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord, Marker
from statemgr.model.jobs.permissions import NO_PERMISSIONS, Permissions
from statemgr.model.snapshot import DirIndex, FileIndex

#: The labels of a store's key serde and value serde; None: not known yet.
Labels = tuple[str | None, str | None]
_CONSEQUENCES = {
    "key": "what is stored under the old keys would not be found",
    "value": "the values that are stored could not be read",
}


@dataclass(frozen=True, slots=True)
class Successor:
    """The first retained checkpoint after the wanted one for which a backend has newer state.

    ``published_ms`` is the earliest time (epoch milliseconds) at which it may have been published: the earlier one by
    the clocks of the broker and of the machine that made it. None if the broker's time is not known. ``markers``: its
    marker, and the other ones of later retained checkpoints.
    """

    checkpoint_id: str
    published_ms: int | None
    markers: tuple[Marker, ...] = ()


@dataclass(frozen=True, slots=True)
class StorePlan:
    """How one store is restored.

    Attributes:
        candidates: the factories to try, in order, each with its marker.
        skipped: factory → why it is not a candidate.
        empty: the store has no candidates and is meant to start empty.
        older: factory → state ID → its marker in older retained checkpoints, if a restore may start from that state.
        successors: factory → the next checkpoint with newer state of it.
        retained: factory → its markers in the older retained checkpoints, newest first.
    """

    store: str
    state_id: str | None
    candidates: tuple[tuple[str, Marker], ...]
    skipped: Mapping[str, str]
    empty: bool = False
    older: Mapping[str, Mapping[str, Marker]] = field(default_factory=dict)
    successors: Mapping[str, Successor] = field(default_factory=dict)
    retained: Mapping[str, tuple[Marker, ...]] = field(default_factory=dict)


def plan_stores(
    checkpoint: Checkpoint | None,
    restore_factories: Mapping[str, Sequence[str]],
    *,
    durable: Mapping[str, bool],
    permissions: Permissions = NO_PERMISSIONS,
    older: Sequence[Checkpoint] = (),
    newer: Sequence[Checkpoint] = (),
    job: str = "",
    task: str = "",
) -> list[StorePlan]:
    """Choose for every configured store which factories can restore it.

    Args:
        checkpoint: the wanted one, or None at the job's first start.
        restore_factories: store → factories in order of preference.
        durable: store → whether it is backed up. A store that is not starts empty every time.
        older: the retained checkpoints before this one, newest first.
        newer: the retained checkpoints after this one, oldest first. There are none after the current one.

    Raises:
        PermissionNeeded: the checkpoint does not list a store, or the configuration lacks one that it lists.
        MissingState: no restore factory has a marker for a listed store.
    """
    if checkpoint is None:
        return [StorePlan(store, None, (), {}, empty=True) for store in sorted(restore_factories)]
    check_listing(checkpoint, restore_factories, permissions, durable=durable, job=job, task=task)
    plans = []
    for store in sorted(restore_factories):
        if not durable[store] or store not in checkpoint.stores:
            plans.append(StorePlan(store, None, (), {}, empty=True))
            continue
        found: list[tuple[str, Marker]] = []
        skipped: dict[str, str] = {}
        for factory in restore_factories[store]:
            marker = checkpoint.marker(factory, store)
            if marker is None:
                skipped[factory] = f"checkpoint {checkpoint.checkpoint_id} has no marker of it for this store"
            else:
                found.append((factory, marker))
        if not found:
            have = sorted(f for f, m in checkpoint.state_checkpoint_markers.items() if store in m)
            raise MissingState(
                "no restore factory can supply the store: "
                + "; ".join(
                    f"{factory}: {why}" for factory, why in skipped.items() or [("(none)", "no factory is configured")]
                ),
                hint="set task.restore.factories to a factory that the checkpoint has: "
                + (", ".join(have) or "it has none"),
                job=job,
                task=task,
                store=store,
            )
        states = {factory: _older_states(store, factory, (checkpoint, *older)) for factory, _ in found}
        later = {factory: _successor(store, factory, checkpoint, marker, newer) for factory, marker in found}
        successors = {factory: successor for factory, successor in later.items() if successor is not None}
        state_id = checkpoint.stores[store]
        retained = {factory: _markers_of(store, factory, older) for factory, _ in found}
        plans.append(StorePlan(store, state_id, tuple(found), skipped, False, states, successors, retained))
    return plans


def plan_retained(
    record: CheckpointRecord, checkpoint: Checkpoint, restore_factories: Mapping[str, Sequence[str]], *, job: str
) -> list[StorePlan]:
    """Plan the restore of some stores as of any retained checkpoint, for readers of published state.

    Args:
        restore_factories: store → factories in order of preference. Other stores of the checkpoint are left out.

    Raises: MissingState if the checkpoint does not have a store, or no restore factory has a marker for it.
    """
    for store in sorted(restore_factories.keys() - checkpoint.stores.keys()):
        raise MissingState(
            f"checkpoint {checkpoint.checkpoint_id} does not have the store {store!r}",
            hint=f"it has: {', '.join(sorted(checkpoint.stores)) or 'none'}. A store that is not backed up is in no "
            "checkpoint",
            job=job,
            task=record.task,
            store=store,
        )
    place = record.checkpoints.index(checkpoint)
    return plan_stores(
        checkpoint,
        restore_factories,
        durable=dict.fromkeys(restore_factories, True),
        permissions=Permissions(allow_removed_stores=True),
        older=record.checkpoints[place + 1 :],
        newer=record.checkpoints[:place][::-1],
        job=job,
        task=record.task,
    )


def _markers_of(store: str, factory: str, checkpoints: Sequence[Checkpoint]) -> tuple[Marker, ...]:
    found = [checkpoint.marker(factory, store) for checkpoint in checkpoints]
    return tuple(dict.fromkeys(marker for marker in found if marker is not None))


def _successor(
    store: str, factory: str, wanted: Checkpoint, marker: Marker, newer: Sequence[Checkpoint]
) -> Successor | None:
    """The first newer checkpoint with another marker. If retention has dropped checkpoints in between, one of them may
    have been the first with newer state. Then the time is that of the last checkpoint with this marker."""
    before = wanted
    for place, checkpoint in enumerate(newer):
        if checkpoint.marker(factory, store) != marker:
            earliest = checkpoint if checkpoint.sequence == before.sequence + 1 else before
            at_ms = earliest.published_ms
            if at_ms is not None:
                at_ms = min(at_ms, earliest.checkpoint_id.millis)
            return Successor(str(checkpoint.checkpoint_id), at_ms, _markers_of(store, factory, newer[place:]))
        before = checkpoint
    return None


def _older_states(store: str, factory: str, checkpoints: Sequence[Checkpoint]) -> dict[str, Marker]:
    """State ID → its marker in the checkpoints after the first. The search ends at a version 1 checkpoint: older
    software wrote to the changelog then, with its own timestamps."""
    found: dict[str, Marker] = {}
    for newer, checkpoint in pairwise(checkpoints):
        marker = checkpoint.marker(factory, store)
        if 1 in (newer.record_version, checkpoint.record_version):
            break
        if marker is not None and store in checkpoint.stores:
            found.setdefault(checkpoint.stores[store], marker)
    return found


def check_listing(
    checkpoint: Checkpoint,
    configured: Collection[str],
    permissions: Permissions,
    *,
    durable: Mapping[str, bool],
    job: str,
    task: str,
) -> None:
    """Check that the job has the stores that its checkpoint lists. Raises: PermissionNeeded."""
    new = sorted(store for store in configured if durable[store] and store not in checkpoint.stores)
    gone = sorted(store for store in checkpoint.stores if not durable.get(store, False))
    listed = ", ".join(sorted(checkpoint.stores)) or "none"
    if new and not permissions.allow_new_stores:
        raise PermissionNeeded(
            f"store {new[0]!r} is not among the stores of checkpoint {checkpoint.checkpoint_id} ({listed})",
            hint="correct its name; to start it empty, use `statemgr permit --allow-new-stores`, or open the job once "
            "with allow_new_stores=True",
            job=job,
            task=task,
            store=new[0],
        )
    if gone and not permissions.allow_removed_stores:
        raise PermissionNeeded(
            f"store {gone[0]!r} is in checkpoint {checkpoint.checkpoint_id} but "
            + ("is no longer backed up" if gone[0] in configured else "is not in the configuration"),
            hint="correct its name; to remove it, use `statemgr permit --allow-removed-stores`, or open the job once "
            "with allow_removed_stores=True",
            job=job,
            task=task,
            store=gone[0],
        )


def changed_serde(checkpoint: Checkpoint | None, store: str, now: Labels) -> tuple[str, str, str] | None:
    """What has changed (``key`` or ``value``), the serde in the checkpoint and the current one. None if nothing has."""
    recorded = checkpoint.serdes.get(store) if checkpoint else None
    for what, was, label in zip(("key", "value"), recorded or (), now, strict=False):
        if label is not None and label != was:
            return what, was, label
    return None


def check_serdes(
    checkpoint: Checkpoint | None, configured: Mapping[str, Labels], *, allowed: bool, job: str, task: str
) -> None:
    """Raises: PermissionNeeded if a store's serdes are not those of the checkpoint."""
    for store, labels in configured.items():
        found = changed_serde(checkpoint, store, labels)
        if found is None or allowed:
            continue
        assert checkpoint is not None
        what, was, now = found
        key = f"stores.{store}.key.serde" if what == "key" else f"stores.{store}.value.serde"
        raise PermissionNeeded(
            f"the {what}s of checkpoint {checkpoint.checkpoint_id} were written with the serde {was!r}, "
            f"but the store now has {now!r}: {_CONSEQUENCES[what]}",
            hint=f"set {key} back, or pass the old serde. To continue with the new one, use "
            "`statemgr permit --allow-serde-change`, or open the job once with allow_serde_change=True",
            job=job,
            task=task,
            store=store,
        )


def check_ttl(checkpoint: Checkpoint, has_ttl: Mapping[str, bool], *, job: str, task: str) -> None:
    """Check that a store has a TTL if and only if its stored values have an expiry.

    Args:
        has_ttl: store → whether a TTL is configured.

    Raises: ConfigError.
    """
    for store in checkpoint.serdes:
        was, key = checkpoint.has_ttl(store), f"stores.{store}.ttl.ms"
        if has_ttl.get(store, was) == was:
            continue
        raise ConfigError(
            f"checkpoint {checkpoint.checkpoint_id} was written {'with' if was else 'without'} {key}, "
            f"which the configuration {'lacks' if was else 'has'}: the stored values "
            f"{'begin with their expiry' if was else 'have no expiry'}",
            hint=f"set {key} again; a larger number lets entries live longer"
            if was
            else f"remove {key}. To let entries expire, declare a new store with a TTL, and write them there",
            job=job,
            task=task,
            store=store,
        )


@dataclass(frozen=True, slots=True)
class FilePlan:
    """Where each file of a directory comes from.

    ``link``: target path → number of a local directory and path of a file in it that is the same. ``inline``: target
    path → a file with its content in the index. ``fetch``: target path → a file to fetch in parts.
    """

    dirs: tuple[str, ...]
    link: Mapping[str, tuple[int, str]]
    inline: Mapping[str, FileIndex]
    fetch: Mapping[str, FileIndex]

    @property
    def fetch_bytes(self) -> int:
        """Bytes to fetch from the blob store."""
        return sum(file.size for file in self.fetch.values())


def plan_files(root: DirIndex, local: Sequence[Mapping[str, tuple[int, bytes]]]) -> FilePlan:
    """Decide where every file of an index comes from.

    Args:
        root: the index's directory.
        local: for each local directory that may be used, relative path → verified identity (size, hash).
    """
    known: dict[tuple[int, bytes], tuple[int, str]] = {}
    for number, files in enumerate(local):
        for path, identity in files.items():
            known.setdefault(identity, (number, path))
    link: dict[str, tuple[int, str]] = {}
    inline: dict[str, FileIndex] = {}
    fetch: dict[str, FileIndex] = {}
    for path, file in root.walk():
        if file.inline is not None:
            inline[path] = file
        elif file.identity in known:
            link[path] = known[file.identity]
        else:
            fetch[path] = file
    return FilePlan(tuple(root.walk_dirs()), link, inline, fetch)
