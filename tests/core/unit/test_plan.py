"""plan: which factory supplies a store, and what is refused before a restore starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from statemgr.errors import MissingState, PermissionNeeded
from statemgr.ids import CheckpointId
from statemgr.model.checkpoint import ChangelogMarker, Checkpoint, Marker
from statemgr.model.jobs.permissions import Permissions
from statemgr.model.plan import Successor, plan_files, plan_retained, plan_stores
from statemgr.model.snapshot import DirIndex
from tests import model_samples as sample

#: A checkpoint with one store, a changelog marker and a blob marker.
CHECKPOINT = replace(
    sample.CHECKPOINT,
    stores={"totals": "1700-ab-totals"},
    state_checkpoint_markers={
        factory: {"totals": stores["totals"]} for factory, stores in sample.CHECKPOINT.state_checkpoint_markers.items()
    },
)
BOTH = ("blob-store", "kafka-changelog")


def test_first_start_is_empty() -> None:
    """Without a checkpoint every store starts empty, and no permission is needed."""
    plans = plan_stores(None, {"b": BOTH, "a": ()}, durable={"a": False, "b": True})
    assert [(plan.store, plan.empty, plan.candidates) for plan in plans] == [("a", True, ()), ("b", True, ())]


@pytest.mark.parametrize("order", [BOTH, BOTH[::-1]])
def test_factories_are_tried_in_the_configured_order(order: tuple[str, ...]) -> None:
    """The restore tries the factories in the order of the list, each with its own marker."""
    (plan,) = plan_stores(CHECKPOINT, {"totals": order}, durable={"totals": True})
    assert tuple(factory for factory, _ in plan.candidates) == order
    assert all(marker == CHECKPOINT.marker(factory, "totals") for factory, marker in plan.candidates)
    assert plan.state_id == "1700-ab-totals"
    assert not plan.empty


def test_factory_without_a_marker_is_skipped_with_its_reason() -> None:
    """A backend without a marker is left out, and the plan gives the reason."""
    (plan,) = plan_stores(CHECKPOINT, {"totals": ("elsewhere", "blob-store")}, durable={"totals": True})
    assert [factory for factory, _ in plan.candidates] == ["blob-store"]
    assert str(CHECKPOINT.checkpoint_id) in plan.skipped["elsewhere"]


@pytest.mark.parametrize("factories", [("elsewhere",), ()])
def test_listed_store_that_nothing_can_supply_is_an_error(factories: tuple[str, ...]) -> None:
    """The store never starts empty without notice. The error names it and the backends that the checkpoint has."""
    with pytest.raises(MissingState, match="blob-store, custom, kafka-changelog") as caught:
        plan_stores(CHECKPOINT, {"totals": factories}, durable={"totals": True}, job="orders", task=sample.TASK)
    assert caught.value.where == {"job": "orders", "task": sample.TASK, "store": "totals"}


def test_blob_restore_of_a_version_one_checkpoint_is_an_error() -> None:
    """The blob store cannot supply a store of a version 1 checkpoint, and the store does not start empty."""
    markers = {"kafka-changelog": CHECKPOINT.state_checkpoint_markers["kafka-changelog"]}
    with pytest.raises(MissingState):
        plan_stores(
            replace(CHECKPOINT, state_checkpoint_markers=markers),
            {"totals": ("blob-store",)},
            durable={"totals": True},
        )


def test_new_store_needs_permission() -> None:
    """A store that the checkpoint does not list starts empty only with a permission."""
    configured = {"totals": BOTH, "totasl": BOTH}
    durable = {"totals": True, "totasl": True}
    with pytest.raises(PermissionNeeded, match="totasl"):
        plan_stores(CHECKPOINT, configured, durable=durable)
    with pytest.raises(PermissionNeeded, match="totasl"):
        plan_stores(CHECKPOINT, configured, durable=durable, permissions=Permissions(allow_removed_stores=True))
    plans = plan_stores(CHECKPOINT, configured, durable=durable, permissions=Permissions(allow_new_stores=True))
    assert [(plan.store, plan.empty) for plan in plans] == [("totals", False), ("totasl", True)]


def test_removed_store_needs_permission() -> None:
    """A listed store that the configuration lacks is dropped only with a permission."""
    with pytest.raises(PermissionNeeded, match="totals"):
        plan_stores(CHECKPOINT, {}, durable={})
    with pytest.raises(PermissionNeeded, match="totals"):
        plan_stores(CHECKPOINT, {}, durable={}, permissions=Permissions(allow_new_stores=True))
    assert plan_stores(CHECKPOINT, {}, durable={}, permissions=Permissions(allow_removed_stores=True)) == []


def test_renamed_store_needs_both_permissions() -> None:
    """A renamed store is one removed store and one new store, so it needs both permissions."""
    for allowed in (Permissions(allow_new_stores=True), Permissions(allow_removed_stores=True)):
        with pytest.raises(PermissionNeeded):
            plan_stores(CHECKPOINT, {"renamed": BOTH}, durable={"renamed": True}, permissions=allowed)


def test_a_reader_of_a_store_that_the_checkpoint_lacks_gets_no_permission() -> None:
    """A reader opens no task. So nothing tells people to give the next opening a permission to lose state."""
    with pytest.raises(MissingState, match="does not have the store 'cache'") as raised:
        plan_retained(replace(sample.RECORD, checkpoints=(CHECKPOINT,)), CHECKPOINT, {"cache": BOTH}, job="orders")
    assert "it has: totals" in str(raised.value.hint)
    assert "permit" not in str(raised.value.hint)


def test_store_without_backup_starts_empty_every_time() -> None:
    """A store without backup needs neither a permission nor a marker."""
    plans = plan_stores(CHECKPOINT, {"totals": BOTH, "cache": ()}, durable={"totals": True, "cache": False})
    assert [(plan.store, plan.empty) for plan in plans] == [("cache", True), ("totals", False)]


def test_files_come_from_the_index_then_from_here_then_from_afar() -> None:
    """Inline files come from the index. Local files are reused by content under any name. The rest is fetched."""
    identity = (sample.BLOB.size, sample.HASH)
    nothing = plan_files(sample.INDEX.root, [])
    assert (set(nothing.inline), set(nothing.fetch)) == ({"CURRENT", "journal/empty"}, {"000012.sst"})
    assert nothing.dirs == ("journal", "journal/old", "z")
    assert nothing.fetch_bytes == 3
    reuse = plan_files(sample.INDEX.root, [{"other": (9, b"x" * 16)}, {"d/renamed.sst": identity}])
    assert reuse.link == {"000012.sst": (1, "d/renamed.sst")}
    assert (reuse.fetch, reuse.fetch_bytes) == ({}, 0)


def test_local_file_of_the_same_name_and_other_content_is_not_reused() -> None:
    """A local file with the same name and size but other content is not reused."""
    plan = plan_files(sample.INDEX.root, [{"000012.sst": (3, b"x" * 16)}])
    assert set(plan.fetch) == {"000012.sst"}


def test_empty_store_needs_nothing() -> None:
    """An empty directory gives an empty plan."""
    plan = plan_files(DirIndex(""), [])
    assert (plan.dirs, plan.link, plan.inline, plan.fetch) == ((), {}, {}, {})


def _older(number: int, state: str, **fields: object) -> Checkpoint:
    marker = {"kafka-changelog": {"totals": ChangelogMarker("totals", "id", 0, number)}}
    values = {"checkpoint_id": CheckpointId(number, 0), "stores": {"totals": state}, "state_checkpoint_markers": marker}
    return replace(CHECKPOINT, **(values | fields))  # type: ignore[arg-type]


def test_older_checkpoints_tell_of_their_states() -> None:
    """The plan has the marker of each earlier state for each factory, from the newest checkpoint that has it."""
    older = [_older(30, "b"), _older(20, "b"), _older(10, "a", stores={"totals": "a", "other": "x"})]
    (plan,) = plan_stores(_older(40, "c"), {"totals": BOTH[1:]}, durable={"totals": True}, older=older)
    assert plan.older == {
        "kafka-changelog": {
            "b": ChangelogMarker("totals", "id", 0, 30),
            "a": ChangelogMarker("totals", "id", 0, 10),
        }
    }


@pytest.mark.parametrize(
    ("versions", "states"), [((2, 2, 2), "ba"), ((2, 2, 1), "b"), ((2, 1, 2), ""), ((1, 2, 2), "")]
)
def test_older_software_ends_what_older_checkpoints_tell(versions: tuple[int, ...], states: str) -> None:
    """Older software broke the rules that a replay from an older state relies on, so states before it do not count."""
    current, *older = [
        _older(30 - 10 * n, state, record_version=version)
        for n, (state, version) in enumerate(zip("cba", versions, strict=True))
    ]
    (plan,) = plan_stores(current, {"totals": BOTH[1:]}, durable={"totals": True}, older=older)
    assert list(plan.older["kafka-changelog"]) == list(states)


def _markers(*checkpoints: Checkpoint) -> tuple[Marker, ...]:
    found = [checkpoint.marker("kafka-changelog", "totals") for checkpoint in checkpoints]
    return tuple(marker for marker in found if marker is not None)


def test_what_followed_an_older_checkpoint() -> None:
    """FAULT 53: the plan has each factory's first newer checkpoint with another marker, and its earliest time."""
    wanted = _older(10, "a", sequence=1, published_ms=11)
    same = replace(wanted, checkpoint_id=CheckpointId(15, 0), sequence=2, published_ms=15)
    newer = [same, _older(20, "b", sequence=3, published_ms=25), _older(30, "c", sequence=4, published_ms=20)]

    def successors(*after: Checkpoint) -> object:
        return plan_stores(wanted, {"totals": BOTH[1:]}, durable={"totals": True}, newer=after)[0].successors

    assert successors() == successors(same) == {}
    assert successors(*newer) == {"kafka-changelog": Successor("20-000000", 20, _markers(*newer[1:]))}
    unknown = _older(20, "b", sequence=3)
    later = _markers(unknown, newer[2])
    assert successors(same, unknown, newer[2]) == {"kafka-changelog": Successor("20-000000", None, later)}
    gone = _older(20, "b", sequence=2, state_checkpoint_markers={}, published_ms=20)
    assert successors(gone) == {"kafka-changelog": Successor("20-000000", 20)}


def test_what_followed_a_kept_checkpoint() -> None:
    """FAULT 53: retention drops checkpoints in between, so the time of the last one with the same marker counts."""
    wanted = _older(10, "a", sequence=1, published_ms=11)
    same = replace(wanted, checkpoint_id=CheckpointId(15, 0), sequence=2, published_ms=16)
    late = _older(30, "c", sequence=4, published_ms=33)
    for newer, at_ms in (([late], 10), ([same, late], 15)):
        (plan,) = plan_stores(wanted, {"totals": BOTH[1:]}, durable={"totals": True}, newer=newer)
        assert plan.successors == {"kafka-changelog": Successor("30-000000", at_ms, _markers(late))}
