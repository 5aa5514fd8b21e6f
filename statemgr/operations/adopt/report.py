"""What ``statemgr adopt`` prints."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from statemgr import __version__
from statemgr.config import JobConfig
from statemgr.local import durable
from statemgr.logs import counted
from statemgr.model.content import Content
from statemgr.operations.adopt.adopt import Adopted
from statemgr.operations.adopt.found import OldJob, OldStore, Request
from statemgr.operations.adopt.snapshots import SnapshotCounts
from statemgr.os_errors import translated
from statemgr.terminal.items import render
from statemgr.terminal.items import text as readable
from statemgr.terminal.output import print_table, say, size

#: Letters of a key or a value.
_SHOWN = 60


@dataclass(frozen=True)
class Filed:
    """What a report in a file says besides.

    Attributes:
        made: when it was made, in ISO form.
        contents: store → the content of each task; None if nothing was counted.
    """

    config: JobConfig
    request: Request
    in_place: bool
    made: str
    contents: Mapping[str, Sequence[Content]] | None

    def facts(self, adopted: Adopted) -> dict[str, Any]:
        """Name of a fact → the fact."""
        return {
            "made": self.made,
            "statemgr": __version__,
            "from": self.request.origin.name,
            "job": self.request.job,
            "kafka": str(self.config.get("kafka.bootstrap.servers")),
            "new_job": {"name": self.config.job_name, "id": self.config.job_id},
            "dry_run": not adopted.checkpoints,
            "in_place": self.in_place,
            "confirmed": dict(self.request.confirmed),
            "given_offsets": dict(self.request.offsets),
        }

    def rows(self, adopted: Adopted) -> list[dict[str, Any]] | None:
        """Store, task, keys and hash; None if nothing was counted."""
        if self.contents is None:
            return None
        changelogs = [(name, n, one.keys, one.hash) for name, of in self.contents.items() for n, one in enumerate(of)]
        snapshots = [
            (name, n, one.keys, one.hash) for name, of in adopted.snapshots.items() for n, one in enumerate(of)
        ]
        names = ("store", "task", "keys", "hash")
        return [dict(zip(names, row, strict=True)) for row in sorted(changelogs + snapshots)]


def file_report(path: Path, adopted: Adopted, filed: Filed, *, as_json: bool) -> None:
    """Write a report, whole or not at all. It replaces an older one. Raises: DiskFull, AccessDenied, RetryableError."""
    if as_json:
        text = json.dumps(as_json_object(adopted, filed), ensure_ascii=False, indent=2, default=str) + "\n"
    else:
        into = io.StringIO()
        with redirect_stdout(into), redirect_stderr(into):
            print_report(adopted, filed)
        text = into.getvalue()
    with translated("cannot write the report", path):
        durable.write_file(path, text.encode(errors="backslashreplace"))
        durable.sync(path.parent)


def _rows(found: OldJob) -> list[dict[str, Any]]:
    rows = []
    for name, store in found.stores.items():
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
                    "left_out_expired": counts.expired,
                    "without_input_offsets": counts.unproved,
                }
            rows.append(row)
    return rows


def _snapshots(found: OldJob, counts: Mapping[str, Sequence[SnapshotCounts]]) -> list[dict[str, Any]]:
    return [
        {"store": store, "task": task, "index": blob_id} | (asdict(counts[store][task]) if store in counts else {})
        for store, of in found.snapshots.items()
        for task, blob_id in enumerate(of)
    ]


def _shown(data: bytes | None) -> str:
    """The beginning of a key or a value, as text if it is printable, else in hexadecimal."""
    text = (data or b"").decode(errors="replace")
    return (text if text.isprintable() and "\ufffd" not in text else "0x" + (data or b"").hex())[:_SHOWN]


def _shown_key(store: OldStore, key: bytes) -> str:
    serde = store.proof.kind.key_serde
    return _shown(key) if serde == "bytes" else readable(render(key, serde))[:_SHOWN]


def as_json_object(adopted: Adopted, filed: Filed | None = None) -> dict[str, Any]:
    """What was found and done."""
    about = {**filed.facts(adopted), "contents": filed.rows(adopted)} if filed is not None else {}
    return about | _found_and_done(adopted)


def _found_and_done(adopted: Adopted) -> dict[str, Any]:
    found = adopted.old
    published = {task: str(checkpoint.checkpoint_id) for task, checkpoint in adopted.checkpoints.items()}
    if found is None:
        offsets = {
            source: offset for one in adopted.checkpoints.values() for source, offset in one.input_offsets.items()
        }
        return {"already_adopted": True, "input_offsets": offsets, "published": published}
    return {
        "already_adopted": False,
        "from": found.origin.name,
        "job": found.job,
        "tasks": found.tasks,
        "changelogs": _rows(found),
        "old_names": dict(found.old_names),
        "snapshots": _snapshots(found, adopted.snapshots),
        "samples": {
            name: [[_shown_key(store, key), _shown(value)] for key, value in store.proof.samples]
            for name, store in found.stores.items()
        },
        "kinds": {name: store.proof.kind.name for name, store in found.stores.items()},
        "reasons": {name: _reason(found, store) for name, store in found.stores.items()},
        "input_offsets": {one.source: one.offset for one in found.inputs.values()},
        "input_records_after_the_offsets": found.behind,
        "doubled_at_most": found.doubled_at_most,
        "notes": list(found.notes),
        "published": published,
    }


def print_report(adopted: Adopted, filed: Filed | None = None) -> None:
    """The same for people."""
    if filed is not None:
        for name, fact in filed.facts(adopted).items():
            say(f"{name.replace('_', ' ')}: {_fact(fact)}")
    _print_found_and_done(adopted)
    if filed is not None:
        _print_filed(adopted, filed)


def _print_filed(adopted: Adopted, filed: Filed) -> None:
    found = adopted.old
    if found is not None:
        for name, store in found.stores.items():
            say(f"store {name} was taken for {store.proof.kind.title}: {_reason(found, store)}")
            say(f"store {name}: the old changelog {store.topic.name} has the topic ID {store.topic.topic_id}")
        for name in found.snapshots:
            say(f"store {name} was taken from the snapshots that the old job's checkpoints name")
    rows = filed.rows(adopted)
    if rows is None:
        say("keys and content hashes are unknown: the changelogs were not read, or the new job has gone on")
        return
    print_table(("store", "task", "keys", "hash"), [tuple(row.values()) for row in rows], empty="no stores")


def _fact(fact: object) -> str:
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    if isinstance(fact, Mapping):
        return ", ".join(f"{name}={value}" if value is not None else name for name, value in fact.items()) or "none"
    return str(fact)


def _reason(found: OldJob, store: OldStore) -> str:
    """Why it was taken for what it is said to be."""
    if store.proof.why:
        return store.proof.why
    return (
        "neither its settings nor its records show another kind"
        if len(found.origin.kinds) > 1
        else "there is no other kind"
    )


def _print_found_and_done(adopted: Adopted) -> None:
    found, published = adopted.old, adopted.checkpoints
    if found is None:
        newest = max(checkpoint.checkpoint_id for checkpoint in published.values())
        say(f"already adopted: checkpoint {newest} of {counted(len(published), 'task')} is current")
        return
    rows = _rows(found)
    shown = ("records", "deletes", "left_out")
    print_table(
        ("store", "old changelog", "partition", "end", "records", "deletes", "left out", "size"),
        [
            (r["store"], r["topic"], r["partition"], r["end"], *(r.get(n) for n in shown), size(r.get("bytes", 0)))
            for r in rows
        ],
        empty="no changelogs",
    )
    for name, old in found.old_names.items():
        say(f"store {name} is the one that the old job calls {old!r}")
    for name, store in found.stores.items():
        for key, value in store.proof.samples:
            say(f"store {name} has, for example: {_shown_key(store, key)} = {_shown(value)}")
    snapshots = _snapshots(found, adopted.snapshots)
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
    expired = sum(row.get("left_out_expired", 0) for row in rows)
    if expired:
        say(f"{expired} changes are of entries that have expired: they are left out")
    unproved = sum(row.get("without_input_offsets", 0) for row in rows)
    if unproved:
        say(
            f"{unproved} changes do not say from which input they were made, as older versions of {found.origin.title} "
            "wrote them: they are adopted, although the old job may not have committed that input"
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
        if found.job is not None and not found.has_checkpoints:
            say(
                f"give the new job another consumer group than {found.job}: in that one it would move the offsets that "
                "the old job goes on from if you go back"
            )
    else:
        say("this was a dry run: nothing was written; --write adopts the job")
