"""``statemgr config`` and ``statemgr init``: show, check and write a configuration file. They contact nothing."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from statemgr.config import JobConfig
from statemgr.config.keys import KEYS
from statemgr.config.loading import masked
from statemgr.errors import InvalidError
from statemgr.os_errors import MISTYPED, translated
from statemgr.terminal.files import write_file
from statemgr.terminal.options import DEFAULT_FILE, Call, job_options, json_option
from statemgr.terminal.output import print_json, say

#: What ``init --example`` writes; the files are next to this module.
EXAMPLE_FILES = ("service.py", "send.py", DEFAULT_FILE, "docker-compose.yml", "test_service.py")
_EXAMPLE = Path(__file__).with_name("example")
TEMPLATE = """\
# Configuration of a statemgr job. `statemgr config show --all` lists every key; `statemgr explain KEY` explains one.
# Write keys in tables, as here, or with dots: "task.commit.ms" = 60000.

[job]
name = "{name}"
# id = "1"                        # distinguishes several runs of one job
tasks = 4                         # partitions of the state; for a job with checkpoints, use statemgr rescale

[task]
inputs = ["{name}"]               # input topics of a consumer loop
backup.factories = ["kafka-changelog", "blob-store"]     # both: dual commit
restore.factories = ["blob-store", "kafka-changelog"]    # most preferred first
commit.ms = 60000
# commit.max.delay.ms = 60000           # pause input when a commit takes longer than this
# commit.snapshot.interval = ["50 commits", "256 MiB", "10 min"]     # of blob-store; "1 commit" records no changes
# commit.timeout.ms = 300000
# checkpoint.topic = "{checkpoint_topic}"
# checkpoint.replication.factor = 3     # of topics that statemgr creates; -1: the broker's default
# topics.min.insync.replicas = 2        # further settings of these topics, under Kafka's names
# checkpoint.retained = 2               # checkpoints to keep per task: the newest
# checkpoint.hourly = 24                # and the last one of each hour, of so many hours
# checkpoint.daily = 7                  # and the last one of each day
# checkpoint.read.versions = [1, 2]
# checkpoint.write.versions = [2]       # [1, 2] while older software may take the job over

# One table for each store.
[stores.totals]
type = "rocksdb"                  # or "memory"
# key.serde = "string"                  # bytes (the default), string, integer, json or msgpack
# value.serde = "json"                  # any of these, or avro with its schemas
# write.batch.size = 5000               # changes per batch; reads see them immediately
# backup.factories = ["blob-store"]     # for this store alone
# restore.factories = ["blob-store"]
# changelog.topic = "{changelog_topic}"
# changelog.min.compaction.lag.ms = 14400000
# rocksdb.compression = "lz4"
# rocksdb.write.buffer.size.bytes = 16777216

[blob.store]
uri = "{blob_uri}"
# uri = "s3://bucket/prefix"
# ttl.days = 30
# part.size = 67108864
# parallelism = 8
# retry.policy.max.retries = 10
# s3.endpoint = "https://s3.example.com"
# s3.region = "eu-central-1"
# s3.path.style = true
# s3.access.key = "${{env:S3_ACCESS_KEY}}"          # without keys, the SDK finds credentials in its usual places
# s3.secret.key = "${{file:/run/secrets/s3}}"       # keep secrets out of this file

[kafka]
bootstrap.servers = "localhost:9092"
# All other keys are passed to librdkafka under its own names. [kafka.producer], [kafka.consumer] and [kafka.admin]
# are for one kind of client.
# security.protocol = "SASL_SSL"
# sasl.mechanism = "SCRAM-SHA-512"
# sasl.username = "${{env:KAFKA_USER}}"
# sasl.password = "${{env:KAFKA_PASSWORD}}"

[state]
dir = "./.statemgr/state"         # a cache: what is lost is restored

# [log]
# format = "json"                 # one JSON object on each line, if the application does not configure logging itself
# level = "info"

# [metrics]
# port = 9100                     # HTTP: /metrics for Prometheus, /healthz and /readyz for probes
"""


@click.group("config")
def command() -> None:
    """Show or check the configuration."""


@command.command("show")
@job_options()
@click.option("--all", "everything", is_flag=True, help="Include keys that are not set, with their defaults.")
def show_command(call: Call, everything: bool) -> None:
    """Show the configuration, with secrets masked."""
    given = call.config.masked()
    shown = dict(sorted({**(_defaults(call.config) if everything else {}), **given}.items()))
    rows = [(key, _text(value), "" if key in given else "default") for key, value in shown.items()]
    call.show(shown, ("key", "value", ""), rows, empty="nothing is set")


@command.command("check", short_help="Check the configuration.")
@job_options()
def check_command(call: Call) -> None:
    """Check the configuration and resolve its references; exit status 2 if something is wrong."""
    from statemgr.flows.committing.limits import check_config
    from statemgr.serdes import input_value_serde, value_serde

    config = call.config
    _check_clients(config)
    check_config(config)
    for store in config.stores.values():
        value_serde(store)
    input_value_serde(config)
    # these resolve references
    assert config.blob_uri is None or (config.blob_s3, config.blob_gcs, config.blob_azure) is not None
    assert (config.state_dir, config.schema_registry()) is not None
    notes = _notes(config)
    if call.as_json:
        print_json({"job": config.job_name, "tasks": config.tasks, "stores": list(config.stores), "notes": notes})
        return
    stores = ", ".join(f"{s.name} → {' + '.join(s.backup_factories) or 'nowhere'}" for s in config.stores.values())
    click.echo(f"ok: job {config.job_name}-{config.job_id}, {config.tasks} tasks, stores: {stores or 'none'}")
    for note in notes:
        click.echo(f"note: {note}")


@click.command("init", short_help="Write a commented configuration file, or an example that runs.")
@json_option
@click.argument("path", type=click.Path(path_type=Path), required=False)
@click.option("--name", default="orders", show_default=True, help="Name of the job, and of its input topic.")
@click.option("--example", "example", is_flag=True, help="Write a service that runs into the directory PATH.")
@click.option("--force", is_flag=True, help="Overwrite existing files.")
def init_command(as_json: bool, path: Path | None, name: str, example: bool, force: bool) -> None:
    """Write a commented configuration file (job.toml, if no PATH is given).

    With --example, write a small service into the directory PATH (the current one, if no PATH is given): its code, its
    configuration, a test, and a docker-compose.yml. It needs a Kafka broker and no Spark.
    """
    if example:
        _init_example(path or Path(), name, force=force, as_json=as_json)
        return
    path = path or Path(DEFAULT_FILE)
    if path.is_dir():
        raise InvalidError(f"{path} is a directory", hint="name a file, or use --example")
    write_file(path, filled_template(name), force=force)
    if as_json:
        print_json({"path": str(path)})
    else:
        say(f"wrote {path}; next: statemgr config check, statemgr topics create, statemgr doctor")


def _init_example(directory: Path, name: str, *, force: bool, as_json: bool) -> None:
    """Write the example, or nothing if one of its files is there. Raises: InvalidError, ConfigError."""
    JobConfig.from_mapping({"job.name": name})
    texts = {file: (_EXAMPLE / file).read_text(encoding="utf-8") for file in EXAMPLE_FILES}
    blobs = (directory.resolve() / ".statemgr" / "blobs").as_uri()
    texts[DEFAULT_FILE] = texts[DEFAULT_FILE].format(name=name, blob_uri=blobs)
    existing = [file for file in EXAMPLE_FILES if (directory / file).exists()]
    if existing and not force:
        raise InvalidError(
            f"{directory} already has {', '.join(existing)}", hint="name another directory, or use --force to overwrite"
        )
    hints = dict.fromkeys(MISTYPED, "name another directory")
    with translated("the directory cannot be made", directory, kinds=MISTYPED, hints=hints):
        directory.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        write_file(directory / file, text, force=force, mode=0o600 if file == DEFAULT_FILE else 0o644)
    if as_json:
        print_json({"directory": str(directory), "files": list(texts)})
        return
    say(f"wrote {', '.join(texts)}\n\nnext:\n")
    for line in _next_commands(directory):
        # the commands are the result, and can be copied as they are
        click.echo(line)


def _next_commands(directory: Path) -> list[str]:
    enter = [] if directory.resolve() == Path.cwd() else [f"cd {shlex.quote(str(directory))}"]
    return [
        *enter,
        "statemgr dev up --no-s3    # or, with Docker: docker compose up --wait",
        "statemgr topics create",
        "python send.py 1000",
        "python service.py          # stop it with Ctrl-C, or kill it and start it again",
        "statemgr store scan totals",
    ]


def filled_template(name: str) -> str:
    """The configuration file for a job of this name. Raises: ConfigError if it is not a name."""
    config = JobConfig.from_mapping({"job.name": name, "stores.totals.type": "memory"})
    return TEMPLATE.format(
        name=name,
        blob_uri=(Path.cwd() / ".statemgr" / "blobs").as_uri(),
        checkpoint_topic=config.checkpoint_topic,
        changelog_topic=config.stores["totals"].changelog_topic,
    )


def _check_clients(config: JobConfig) -> None:
    """Make Kafka's clients without addresses to connect to. Raises: ConfigError if they refuse a setting."""
    from statemgr.kafka import clients
    from statemgr.kafka.errors import ClientErrors

    instead = {"bootstrap.servers": "", "sasl.oauthbearer.method": "default"}  # the method `oidc` asks a server
    changes = {key: value for name, value in instead.items() for key in config.values if key.endswith(name)}
    alone, errors = JobConfig.from_mapping(config.to_mapping(), changes), ClientErrors()
    timeout_ms = config.commit_timeout_ms
    clients.producer(alone, errors, transactional_id=config.job_key, transaction_timeout_ms=timeout_ms)
    clients.consumer(alone, errors).close()
    clients.admin(alone, errors)


def _notes(config: JobConfig) -> list[str]:
    """What is allowed, but perhaps not intended."""
    notes = [] if config.stores else ["the job has no store; declare one with a line such as [stores.totals]"]
    for store in config.stores.values():
        if not store.durable:
            notes.append(
                f"store {store.name} is not backed up: it is empty each time its task opens, and refused on Spark"
            )
        if store.durable and not store.restorable:
            notes.append(
                f"store {store.name} is backed up to {' + '.join(store.backup_factories)}, but only restored from "
                f"{' + '.join(store.restore_factories)}: after its next commit, nothing can restore it"
            )
            continue
        notes += [
            f"store {store.name} may be restored from {factory}, but is not backed up there: "
            "keep this only during a migration"
            for factory in store.restore_factories
            if factory not in store.backup_factories
        ]
    return notes


def _defaults(config: JobConfig) -> dict[str, object]:
    """Every key except patterns such as ``kafka.*``, with the value that applies."""
    shown: dict[str, object] = {}
    for entry in KEYS:
        if entry.pattern.endswith("*"):
            continue
        for name in config.stores if "<name>" in entry.pattern else [""]:
            key = entry.pattern.replace("<name>", name)
            value = config.get(key)
            shown[key] = None if value is None else masked(key, value)
    return shown


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
