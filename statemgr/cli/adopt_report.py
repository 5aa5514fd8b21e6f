"""What ``statemgr adopt`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from statemgr.cli.output import print_table, say, size
from statemgr.flows.adopt import Adopted
from statemgr.flows.adopt_snapshots import SnapshotCounts
from statemgr.logs import counted

#: Store → what each task's snapshot has.
_Snapshots = Mapping[str, Sequence[SnapshotCounts]]


def _rows(adopted: Adopted) -> list[dict[str, Any]]:
    rows = []
    for name, store in adopted.old.stores.items():
        for task, old in enumerate(store.partitions):
            counts = store.counts[task] if store.counts else None
            row: dict[str, Any] = {
                "store": name,
                "topic": store.topic.name,
                "task": task,
                "partition": old.number,
                "end": old.end,
                "not_committed": old.bounds.end - old.end,
            }
            if counts is not None:
                row |= {
                    "records": counts.records,
                    "deletes": counts.deletes,
                    "bytes": counts.size,
                    "converted": counts.converted,
                    "left_out": counts.skipped,
                    "left_out_uncommitted": counts.uncommitted,
                }
            rows.append(row)
    return rows


def _snapshots(adopted: Adopted, counts: _Snapshots) -> list[dict[str, Any]]:
    return [
        {"store": store, "task": task, "index": blob_id} | (asdict(counts[store][task]) if store in counts else {})
        for store, of in adopted.old.snapshots.items()
        for task, blob_id in enumerate(of)
    ]


def as_json_object(adopted: Adopted, counts: _Snapshots) -> dict[str, Any]:
    """What was found and done."""
    found = adopted.old
    return {
        "from": found.origin.name,
        "job": found.job,
        "tasks": found.tasks,
        "changelogs": _rows(adopted),
        "snapshots": _snapshots(adopted, counts),
        "input_offsets": {one.source: one.offset for one in found.inputs.values()},
        "input_records_after_the_offsets": found.behind,
        "doubled_at_most": found.doubled_at_most,
        "notes": list(found.notes),
        "published": {task: str(checkpoint.checkpoint_id) for task, checkpoint in adopted.checkpoints.items()},
    }


def print_report(adopted: Adopted, counts: _Snapshots) -> None:
    """The same for people."""
    found, published = adopted.old, adopted.checkpoints
    rows = _rows(adopted)
    shown = ("records", "deletes", "left_out")
    print_table(
        ("store", "old changelog", "partition", "end", "records", "deletes", "left out", "size"),
        [
            (r["store"], r["topic"], r["partition"], r["end"], *(r.get(n) for n in shown), size(r.get("bytes", 0)))
            for r in rows
        ],
        empty="no changelogs",
    )
    snapshots = _snapshots(adopted, counts)
    if snapshots:
        print_table(
            ("store", "task", "keys", "files", "size"),
            [
                (one["store"], one["task"], one.get("keys"), one.get("files"), size(one.get("stored", 0)))
                for one in snapshots
            ],
            empty="no snapshots",
        )
    print_table(
        ("input", "next offset", "records after it"),
        [(one.source, one.offset, one.behind) for one in found.inputs.values()],
        empty="the input topics have no records and no offsets",
    )
    for note in found.notes:
        say(f"note: {note}")
    uncommitted = sum(row.get("left_out_uncommitted", 0) for row in rows)
    if uncommitted:
        say(
            f"{uncommitted} changes were made from input that the old job had not committed: they are left out, and "
            "made again from that input"
        )
    doubled = found.doubled_at_most
    if doubled:
        say(
            f"at most {doubled} input records after the adopted offsets may have changed the old state already: an "
            "at-least-once job does not say. The new job processes them again"
        )
    else:
        say("no input record is processed twice")
    if published:
        first = next(iter(published.values()))
        say(f"adopted: checkpoint {first.checkpoint_id} of {counted(len(published), 'task')} is published")
    else:
        say("this was a dry run: nothing was written; --write adopts the job")
