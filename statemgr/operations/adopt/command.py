"""``statemgr adopt``: takes over the state of a job that other software ran."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from statemgr.config import JobConfig
from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG
from statemgr.config.loading import masked
from statemgr.operations.adopt.origins import ORIGINS, CheckpointingOrigin, Raw
from statemgr.terminal.files import check_replaceable, write_file
from statemgr.terminal.options import DEFAULT_FILE, duration, json_option, overrides
from statemgr.terminal.output import moment, print_json, progress_bars, say

if TYPE_CHECKING:
    from statemgr.operations.adopt.adopt import Adopted
    from statemgr.operations.adopt.found import OldJob, Request
    from statemgr.operations.adopt.old_topics import OldTopics
    from statemgr.operations.adopt.report import Filed
    from statemgr.operations.adopt.snapshots import OldSnapshots
    from statemgr.ports import Progress
    from statemgr.services import Services

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


def _confirmed(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, str | None]:
    """A callback: names with or without a kind."""
    named = _pairs(ctx, param, tuple(text for text in value if "=" in text))
    return {**named, **{text: None for text in value if "=" not in text}}


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
@click.option(
    "--blobs",
    metavar="URI",
    help="Adopt the snapshots that the old job has in this blob store (Samza), and not the changelogs of their stores.",
)
@click.option(
    "--confirm",
    "confirmed",
    multiple=True,
    callback=_confirmed,
    metavar="NAME[=KIND]",
    help="A store to adopt, or an input topic without one, although adopt cannot prove that it is right; and the kind "
    "of the store, if it is not plain. Repeatable.",
)
@click.option("--write", is_flag=True, help="Adopt the job. Without this option nothing is written.")
@click.option("--in-place", is_flag=True, help="Use the old changelogs themselves instead of copies.")
@click.option(
    "--no-local-copy",
    is_flag=True,
    help="With --write: do not leave the stores below state.dir for the first opening on this machine.",
)
@click.option("--init", is_flag=True, help="Write the configuration of the new job to the file of --config.")
@click.option("--name", metavar="NAME", help="With --init: the name of the new job.  [default: the old job's name]")
@click.option("--force", is_flag=True, help="With --init: overwrite an existing file.")
@click.option("--no-count", is_flag=True, help="Do not read the changelogs to count their records.")
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write to this file what the command found and did, and the hashes of the stores' content: as text, or "
    "with --json as JSON.",
)
@click.option(
    "--settle",
    "settle_s",
    callback=duration(most=3600),
    metavar="TIME",
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
    blobs: str | None,
    confirmed: dict[str, str | None],
    write: bool,
    in_place: bool,
    no_local_copy: bool,
    init: bool,
    name: str | None,
    force: bool,
    no_count: bool,
    report: Path | None,
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
    from statemgr.kafka.checkpoint_topic import CheckpointTopic
    from statemgr.operations.adopt.adopt import adopt, dry_run
    from statemgr.operations.adopt.found import Request
    from statemgr.operations.adopt.look import look
    from statemgr.operations.adopt.old_topics import OldTopics
    from statemgr.operations.adopt.report import as_json_object, file_report, print_report
    from statemgr.wiring import open_services

    if init and write:
        raise click.UsageError("--init and --write cannot be used together: look at the file first")
    if (name or force) and not init:
        raise click.UsageError("--name and --force belong to --init")
    if no_local_copy and not write:
        raise click.UsageError("--no-local-copy belongs to --write: without it nothing is written")
    if init and report:
        raise click.UsageError("--report does not go with --init: nothing is counted")
    if report and not os.access(report.absolute().parent, os.W_OK):
        raise click.UsageError(f"--report: {report} cannot be written, because its directory is missing or read-only")
    if report:
        check_replaceable(report, "a report of adopt", b"made: ", b'{\n  "made": ')
    chosen = ORIGINS[origin]
    if checkpoint_topic and not isinstance(chosen, CheckpointingOrigin):
        raise click.UsageError(f"--checkpoint-topic does not go with --from {origin}: its offsets are those of a group")
    if blobs and not isinstance(chosen, CheckpointingOrigin):
        raise click.UsageError(f"--blobs does not go with --from {origin}: it has no snapshots")
    if not changelogs and isinstance(chosen, Raw):
        raise click.UsageError(f"--from {origin} needs --changelog STORE=TOPIC: such changelogs have any name")
    if not changelogs and not job and not checkpoint_topic:
        raise click.UsageError("name the old job with --job, or its changelogs with --changelog STORE=TOPIC")
    if settle_s is None:
        settle_s = _SETTLE_CHECKPOINTS_S if isinstance(chosen, CheckpointingOrigin) else _SETTLE_S
    if init:
        config = JobConfig.from_mapping({"job.name": "adopt", _ANY_STORE: "memory"}, overrides(settings))
        if blobs and not in_place and config.blob_uri is None:
            raise click.UsageError(
                "--blobs without --in-place uploads the snapshots as the new job's own: say where to with --set "
                "blob.store.uri=URI"
            )
    else:
        config = JobConfig.from_file(config_file, overrides(settings))
    request = Request(
        chosen,
        job,
        changelogs,
        offsets,
        config.inputs,
        tasks=None if init else config.tasks,
        settle_s=settle_s,
        checkpoint_topic=checkpoint_topic,
        snapshots=blobs is not None,
        confirmed=confirmed,
        ttls={n: store.ttl_ms for n, store in config.stores.items() if store.ttl_ms is not None and not init},
    )
    services = open_services(config)
    try:
        with (
            ExitStack() as closing,
            OldTopics(config, services.clock) as old,
            progress_bars(quiet=as_json) as progress,
        ):
            if init:
                found = look(old, services.clock, request, progress=progress)
            else:
                snapshots = _open_snapshots(services, closing, blobs, progress) if blobs else None
                run = (
                    partial(adopt, local_copies=not no_local_copy) if write else partial(dry_run, counting=not no_count)
                )
                log = CheckpointTopic(config, services.clock, owned=True)
                closing.callback(log.close)
                adopted = run(services, log, old, request, snapshots, in_place=in_place, progress=progress)
                if report:
                    about = _filed(services, old, adopted, request, progress, in_place=in_place, counted=not no_count)
                    file_report(report, adopted, about, as_json=as_json)
    finally:
        services.close()
    if init:
        path = Path(config_file)
        _init(found, path, name, settings, blobs, in_place=in_place, force=force, as_json=as_json)
    elif as_json:
        print_json(as_json_object(adopted))
    else:
        print_report(adopted)


def _filed(
    services: Services,
    old: OldTopics,
    adopted: Adopted,
    request: Request,
    progress: Progress,
    *,
    in_place: bool,
    counted: bool,
) -> Filed:
    """What a report in a file says besides. ``counted``: whether the changelogs may be read."""
    from statemgr.operations.adopt.content import contents
    from statemgr.operations.adopt.report import Filed

    hashed = contents(services, old, adopted, progress) if counted else None
    return Filed(services.config, request, in_place, moment(services.clock.time_ns() // 1_000_000), hashed)


def _open_snapshots(services: Services, closing: ExitStack, uri: str, progress: Progress) -> OldSnapshots:
    """The reader of the old job's blob store, whose settings are those of the new job's but for its URI."""
    from statemgr.blobs import open_blob_store
    from statemgr.operations.adopt.snapshots import OldSnapshots, place_of

    config = services.config
    there = JobConfig.from_mapping(config.to_mapping(), {"blob.store.uri": uri})
    store = open_blob_store(there, services.clock)
    closing.callback(store.close)
    return OldSnapshots(services, store, place_of(uri, config.blob_uri), progress)


# --- the configuration ------------------------------------------------------------------------------------


def _init(
    found: OldJob,
    path: Path,
    name: str | None,
    settings: tuple[str, ...],
    blobs: str | None,
    *,
    in_place: bool,
    force: bool,
    as_json: bool,
) -> None:
    given = overrides(settings)
    if blobs and in_place:
        given.setdefault("blob.store.uri", blobs)
    text = _toml(found, name or found.job or "", given, in_place=in_place)
    write_file(path, text, force=force)
    if as_json:
        shown = {key: masked(key, value) for key, value in given.items()}
        text = _toml(found, name or found.job or "", shown, in_place=in_place)
        print_json({"path": str(path), "configuration": text})
    else:
        say(f"wrote {path}; next: look at it, and run the same command without --init")


def _toml(found: OldJob, job: str, given: Mapping[str, object], *, in_place: bool) -> str:
    """The configuration of the new job. Raises: ConfigError if the names do not suit."""
    values: dict[str, object] = {
        "job.name": job,
        "job.tasks": found.tasks,
        "task.inputs": found.input_topics,
    }
    usual = KAFKA_CHANGELOG if found.stores else BLOB_STORE
    values |= {f"task.{key}.factories": [usual] for key in ("backup", "restore")}
    for store in found.snapshots:
        values[f"stores.{store}.type"] = "rocksdb"
        if usual != BLOB_STORE:
            values |= {f"stores.{store}.{key}.factories": [BLOB_STORE] for key in ("backup", "restore")}
    for name, old in found.stores.items():
        values[f"stores.{name}.type"] = "rocksdb"
        if old.proof.kind.key_serde != "bytes":
            values[f"stores.{name}.key.serde"] = old.proof.kind.key_serde
        if old.proof.retention_ms is not None:
            values[f"stores.{name}.ttl.ms"] = old.proof.retention_ms
        if in_place:
            values[f"stores.{name}.changelog.topic"] = old.topic.name
    values |= given
    JobConfig.from_mapping(values)
    lines = [
        f"# The job that `statemgr adopt` found ({found.origin.title}). `statemgr config show --all` lists every key.",
        "# Serdes are `bytes` until you choose others: set stores.<name>.key.serde and .value.serde before --write.",
        *(f"# store {store}: its state is in the old job's blob store" for store in found.snapshots),
        *(f"# store {store.name}: its old changelog is {store.topic.name}" for store in found.stores.values()),
        *(f"# store {name}: the old job called it {old!r}" for name, old in found.old_names.items()),
        *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()),
    ]
    return "\n".join(lines) + "\n"
