"""``statemgr adopt``: takes over the state of a job that other software ran."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from statemgr.cli.config import write_file
from statemgr.cli.options import DEFAULT_FILE, json_option, overrides
from statemgr.cli.output import print_json, print_table, progress_bars, say, size
from statemgr.config import JobConfig
from statemgr.model.origins import ORIGINS, CheckpointingOrigin

if TYPE_CHECKING:
    from statemgr.flows.adopt_copy import Copied, Counts
    from statemgr.flows.adopt_found import OldJob, Request
    from statemgr.model.checkpoint import Checkpoint

#: A store that a configuration must have, until the old job's stores are known.
_ANY_STORE = "stores.any.type"
_SETTLE_S = 5.0
#: A running job of Samza is no member of a group, but writes checkpoints every ``task.commit.ms``: 60 s by default.
_SETTLE_CHECKPOINTS_S = 65.0


def _pairs(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, str]:
    """A callback: ``NAME=VALUE`` texts as a mapping."""
    found: dict[str, str] = {}
    for text in value:
        name, equals, rest = text.partition("=")
        if not (name and equals and rest):
            raise click.BadParameter(f"{text!r} is not {param.metavar}", ctx, param)
        if name in found:
            raise click.BadParameter(f"{name} is given twice", ctx, param)
        found[name] = rest
    return found


def _offsets(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, int]:
    """A callback: ``orders-0=123`` texts as a mapping."""
    found = _pairs(ctx, param, value)
    for source, offset in found.items():
        if not re.fullmatch(r"\d{1,18}", offset):
            raise click.BadParameter(f"the offset of {source} is not a number", ctx, param)
    return {source: int(offset) for source, offset in found.items()}


@click.command("adopt")
@click.option("--from", "origin", required=True, type=click.Choice(sorted(ORIGINS)), help="What the old job runs on.")
@click.option("--job", metavar="NAME", help="The old job: its consumer group.")
@click.option(
    "--changelog",
    "changelogs",
    multiple=True,
    callback=_pairs,
    metavar="STORE=TOPIC",
    help="A store and its old changelog. Repeatable. Default: those that have the old job's name.",
)
@click.option(
    "--offset",
    "offsets",
    multiple=True,
    callback=_offsets,
    metavar="TOPIC-PARTITION=OFFSET",
    help="The next input offset of a partition. Repeatable. Default: what the old job has committed.",
)
@click.option(
    "--checkpoint-topic",
    metavar="TOPIC",
    help="The old job's checkpoint topic (Samza).  [default: that of the job with job.id 1]",
)
@click.option("--write", is_flag=True, help="Adopt the job. Without this option nothing is written.")
@click.option("--in-place", is_flag=True, help="Use the old changelogs themselves instead of copies.")
@click.option("--init", is_flag=True, help="Write the configuration of the new job to the file of --config.")
@click.option("--name", metavar="NAME", help="With --init: the name of the new job.  [default: the old job's name]")
@click.option("--force", is_flag=True, help="With --init: overwrite an existing file.")
@click.option("--no-count", is_flag=True, help="Do not read the changelogs to count their records.")
@click.option(
    "--settle",
    "settle_s",
    type=click.FloatRange(0, 3600),
    metavar="SECONDS",
    help="How long to check that the old job's offsets and changelogs do not change.  [default: 5; with Samza 65]",
)
@click.option(
    "--config", "-c", "config_file", default=DEFAULT_FILE, show_default=True, type=click.Path(), help="The new job."
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a key for this run. Repeatable.")
@json_option
def command(
    origin: str,
    job: str | None,
    changelogs: dict[str, str],
    offsets: dict[str, int],
    checkpoint_topic: str | None,
    write: bool,
    in_place: bool,
    init: bool,
    name: str | None,
    force: bool,
    no_count: bool,
    settle_s: float | None,
    config_file: str,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Take over the state and the input offsets of a stopped job that other software ran.

    Without --write it only looks: what the old job has, and whether it can be adopted. With --write it copies the old
    changelogs to those of the new job, and publishes the first checkpoint. It never writes to the old job's topics,
    unless --in-place makes them the new job's.

    Start with --init, which writes job.toml for what it finds; give the connection with --set
    kafka.bootstrap.servers=HOST:PORT.
    """
    from statemgr.flows.adopt import check_target
    from statemgr.flows.adopt_found import Request
    from statemgr.flows.adopt_look import look
    from statemgr.kafka.old_job import OldTopics
    from statemgr.wiring import open_services

    if init and write:
        raise click.UsageError("--init and --write cannot be used together: look at the file first")
    if (name or force) and not init:
        raise click.UsageError("--name and --force belong to --init")
    chosen = ORIGINS[origin]
    if checkpoint_topic and not isinstance(chosen, CheckpointingOrigin):
        raise click.UsageError(f"--checkpoint-topic does not go with --from {origin}: its offsets are those of a group")
    if settle_s is None:
        settle_s = _SETTLE_CHECKPOINTS_S if isinstance(chosen, CheckpointingOrigin) else _SETTLE_S
    if init:
        config = JobConfig.from_mapping({"job.name": "adopt", _ANY_STORE: "memory"}, overrides(settings))
        request = Request(chosen, job, changelogs, offsets, settle_s=settle_s, checkpoint_topic=checkpoint_topic)
    else:
        config = JobConfig.from_file(config_file, overrides(settings))
        request = Request(chosen, job, changelogs, offsets, config.inputs, config.tasks, settle_s, checkpoint_topic)
    services = open_services(config)
    try:
        with OldTopics(config, services.clock) as old, progress_bars(quiet=as_json) as progress:
            if write:
                found, copied, published = _adopt(services, old, request, in_place, progress)
            else:
                found = look(old, services.clock, request, with_counts=not (no_count or init), progress=progress)
                copied, published = {}, {}
                if not init:
                    check_target(services, found, in_place=in_place)
    finally:
        services.close()
    if init:
        _init(found, Path(config_file), name, settings, in_place=in_place, force=force, as_json=as_json)
    elif as_json:
        print_json(_as_json(found, copied, published))
    else:
        _print(found, copied, published)


def _adopt(
    services: Any, old: Any, request: Request, in_place: bool, progress: Any
) -> tuple[OldJob, Mapping[str, Sequence[Copied]], Mapping[str, Checkpoint]]:
    from statemgr.flows.adopt import adopt
    from statemgr.kafka.checkpoint_topic import CheckpointTopic

    log = CheckpointTopic(services.config, services.clock, owned=True)
    try:
        adopted = adopt(services, log, old, request, in_place=in_place, progress=progress)
        return adopted.old, adopted.copied, adopted.checkpoints
    finally:
        log.close()


# --- the configuration ------------------------------------------------------------------------------------


def _init(
    found: OldJob,
    path: Path,
    name: str | None,
    settings: tuple[str, ...],
    *,
    in_place: bool,
    force: bool,
    as_json: bool,
) -> None:
    text = _toml(found, name or found.job or "", overrides(settings), in_place=in_place)
    write_file(path, text, force=force)
    if as_json:
        print_json({"path": str(path), "configuration": text})
    else:
        say(f"wrote {path}; next: look at it, and run the same command without --init")


def _toml(found: OldJob, name: str, given: Mapping[str, object], *, in_place: bool) -> str:
    """The configuration of the new job. Raises: ConfigError if the names do not suit."""
    values: dict[str, object] = {
        "job.name": name,
        "job.tasks": found.tasks,
        "task.inputs": found.input_topics,
        "task.backup.factories": ["kafka-changelog"],
        "task.restore.factories": ["kafka-changelog"],
    }
    for store in found.stores.values():
        values[f"stores.{store.name}.type"] = "rocksdb"
        if in_place:
            values[f"stores.{store.name}.changelog.topic"] = store.topic.name
    values |= given
    JobConfig.from_mapping(values)
    lines = [
        f"# The job that `statemgr adopt` found ({found.origin.title}). `statemgr config show --all` lists every key.",
        "# Serdes are `bytes` until you choose others: set stores.<name>.key.serde and .value.serde before --write.",
        *(f"# store {store.name}: its old changelog is {store.topic.name}" for store in found.stores.values()),
        *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()),
    ]
    return "\n".join(lines) + "\n"


# --- what was found ---------------------------------------------------------------------------------------


def _counts(found: OldJob, copied: Mapping[str, Sequence[Copied]], store: str, task: int) -> Counts | None:
    if store in copied:
        return copied[store][task].counts
    counts = found.stores[store].counts
    return counts[task] if counts else None


def _rows(found: OldJob, copied: Mapping[str, Sequence[Copied]]) -> list[dict[str, Any]]:
    rows = []
    for name, store in found.stores.items():
        for task, old in enumerate(store.partitions):
            counts = _counts(found, copied, name, task)
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


def _as_json(
    found: OldJob, copied: Mapping[str, Sequence[Copied]], published: Mapping[str, Checkpoint]
) -> dict[str, Any]:
    return {
        "from": found.origin.name,
        "job": found.job,
        "tasks": found.tasks,
        "changelogs": _rows(found, copied),
        "input_offsets": {one.source: one.offset for one in found.inputs.values()},
        "input_records_after_the_offsets": found.behind,
        "doubled_at_most": found.doubled_at_most,
        "notes": list(found.notes),
        "published": {task: str(checkpoint.checkpoint_id) for task, checkpoint in published.items()},
    }


def _print(found: OldJob, copied: Mapping[str, Sequence[Copied]], published: Mapping[str, Checkpoint]) -> None:
    rows = _rows(found, copied)
    shown = ("records", "deletes", "left_out")
    print_table(
        ("store", "old changelog", "partition", "end", "records", "deletes", "left out", "size"),
        [
            (r["store"], r["topic"], r["partition"], r["end"], *(r.get(n) for n in shown), size(r.get("bytes", 0)))
            for r in rows
        ],
        empty="no changelogs",
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
        say(f"adopted: checkpoint {first.checkpoint_id} of {len(published)} tasks is published")
    else:
        say("this was a dry run: nothing was written; --write adopts the job")
