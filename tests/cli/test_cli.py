"""The command line without servers: commands, exit statuses and output."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import click
import pytest
from click.testing import CliRunner, Result
from confluent_kafka import KafkaError, KafkaException

from statemgr import __version__, errors
from statemgr.cli import main
from statemgr.cli.config import EXAMPLE_FILES, filled_template
from statemgr.cli.main import cli
from statemgr.config import JobConfig
from statemgr.config.keys import KEYS
from statemgr.errors import DiskFull
from statemgr.kafka import metadata
from statemgr.terminal import output
from statemgr_tools.commands import dev

JOB = """
job.name = "orders"
kafka.bootstrap.servers = "localhost:1"
[stores.totals]
[stores.scratch]
backup.factories = []
"""
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line in an empty directory with a `job.toml` in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("job.toml").write_text(JOB)

    def run_(*arguments: str) -> Result:
        return CliRunner().invoke(cli, list(arguments), catch_exceptions=False)

    return run_


# --- the frame --------------------------------------------------------------------------------------------


def test_help_lists_every_command_without_loading_them(run: Run) -> None:
    """`--help` has a line for each command."""
    result = run("--help")
    assert result.exit_code == 0
    for name in ("checkpoints", "config", "demo", "dev", "doctor", "init", "restore", "snapshots", "store", "topics"):
        assert re.search(rf"^  {name} +\S", result.output, re.MULTILINE)


def test_every_command_has_help(run: Run) -> None:
    """Each command of statemgr loads, has a help text and offers `--json`."""
    for name in ("checkpoints", "config", "doctor", "init", "restore", "snapshots", "store", "topics"):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        leaves = list(command.commands.values()) if isinstance(command, click.Group) else [command]
        for leaf in leaves:
            assert leaf.help, leaf.name
            assert "--json" in [option for p in leaf.params for option in p.opts], leaf.name


def test_version(run: Run) -> None:
    """`--version` prints the version of the package."""
    assert __version__ in run("--version").output


def test_an_unknown_command_names_the_nearest(run: Run) -> None:
    """Wrong use has exit status 2."""
    result = run("chekpoints", "list")
    assert result.exit_code == 2
    assert "'checkpoints'" in result.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_completion_script(shell: str) -> None:
    """`_STATEMGR_COMPLETE` prints a completion script for the shell."""
    script = _completion(f"{shell}_source")
    assert f"_STATEMGR_COMPLETE={shell}_complete" in script


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("statemgr check", ["checkpoints"]),
        ("statemgr snapshots ver", ["verify"]),
        ("statemgr store get --ta", ["--task"]),
    ],
)
def test_commands_and_options_are_completed(words: str, offered: list[str]) -> None:
    """Completion also works within a group of commands, and through `python -m statemgr`."""
    found = _completion("bash_complete", COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))
    assert found.split() == [f"plain,{one}" for one in offered]


def _completion(instruction: str, **words: str) -> str:
    environment = os.environ | {"_STATEMGR_COMPLETE": instruction} | words
    return subprocess.run(
        [sys.executable, "-m", "statemgr"], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_without_metadata_the_built_in_commands_are_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in commands work in a source tree that is not installed."""
    monkeypatch.setattr(main, "_others", dict)
    assert run("config", "check").exit_code == 0


def test_a_command_whose_extra_is_missing_says_how_to_install_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command prints how to install the extra, with exit status 2, whatever its options are."""
    monkeypatch.setitem(main._built_in(), "demo", ("no_such_package.commands:demo", "demo"))
    monkeypatch.setattr(main, "_others", dict)
    result = run("demo", "--input", "x.csv", "file")
    assert result.exit_code == 2
    assert "no_such_package" in result.output
    assert "pip install 'statemgr[demo]'" in result.output


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.TopicMisconfigured("m"), 1),
        (errors.FencedError("m"), 1),
        (errors.ConfigError("m"), 2),
        (errors.PermissionNeeded("m"), 2),
        (errors.UnavailableError("m"), 3),
        (errors.AccessDenied("m"), 3),
        (errors.MissingState("m"), 4),
        (errors.CorruptBlob("m"), 4),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_one_line_a_hint_and_its_exit_status(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: errors.StatemgrError, status: int
) -> None:
    """The error goes to stderr without a traceback. Its kind decides the exit status and the link to the docs."""

    def fail(**_: object) -> None:
        error.hint = "do this"
        raise error

    monkeypatch.setattr(cli, "get_command", lambda _context, _name: click.Command("topics", callback=fail))
    result = run("topics")
    assert result.exit_code == status
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert lines[0] == "error: m"
    assert lines[1:] == ["hint: do this", f"see: statemgr explain {type(error).__name__}"]


@pytest.mark.parametrize(
    ("number", "status", "hint"),
    [
        (errno.EDQUOT, 3, "free space there"),
        (errno.EROFS, 3, "rights there"),
        (errno.EMFILE, 3, "ulimit -n"),
        (errno.ENOTDIR, 2, "name another path"),
        (errno.EIO, 3, "`--debug`"),
    ],
)
def test_an_error_of_the_system_has_a_hint(
    run: Run, monkeypatch: pytest.MonkeyPatch, number: int, status: int, hint: str
) -> None:
    """One that no command expects. Exit status 1 would say that a check has found something."""
    monkeypatch.setattr(JobConfig, "from_file", Mock(side_effect=OSError(number, "m", "file")))
    found = run("config", "show")
    assert (found.exit_code, found.stdout) == (status, "")
    assert found.stderr.startswith("error: the command cannot go on: m [path=file]\nhint: ")
    assert hint in found.stderr


def test_debug_shows_the_traceback(run: Run) -> None:
    """`--debug` adds the traceback, for fault reports."""
    assert "Traceback" in run("--debug", "config", "check", "--set", "job.tasks=0").stderr
    assert "Traceback" not in run("config", "check", "--set", "job.tasks=0").stderr


@pytest.mark.parametrize("in_kafka_client", [False, True])
def test_ctrl_c_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch, in_kafka_client: bool) -> None:
    """The exit status is 130, as shells expect. C code that ignores an interrupt turns it into a SystemError."""

    def interrupt(**_: object) -> None:
        if in_kafka_client:
            raise SystemError("returned a result with an exception set") from KeyboardInterrupt()
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "get_command", lambda _context, _name: click.Command("topics", callback=interrupt))
    result = run("topics")
    assert result.exit_code == 130
    assert "Traceback" not in result.output


# --- init -------------------------------------------------------------------------------------------------


def test_init_writes_a_file_that_is_valid_as_it_is(run: Run) -> None:
    """The file that `init` writes loads, and only its owner may read it."""
    result = run("init", "new.toml", "--name", "clicks")
    assert result.exit_code == 0
    config = JobConfig.from_file("new.toml")
    assert config.job_name == "clicks"
    assert config.stores["totals"].backup_factories == ("kafka-changelog", "blob-store")
    assert config.stores["totals"].value_serde == "bytes", "as the README's example wants it"
    assert Path("new.toml").stat().st_mode & 0o077 == 0
    assert json.loads(run("init", "second.toml", "--json").stdout) == {"path": "second.toml"}
    assert run("init", "no/such/directory.toml").exit_code == 2


def test_init_never_overwrites_unless_forced(run: Run) -> None:
    """An existing file stays as it is without `--force`."""
    assert run("init").exit_code == 2
    assert Path("job.toml").read_text() == JOB
    assert run("init", "--force").exit_code == 0
    assert Path("job.toml").read_text() != JOB


def test_init_overwrites_a_file_that_is_elsewhere(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link stays a link, also before its target exists. Where no file can be replaced, it is overwritten."""
    Path("link.toml").symlink_to(tmp_path / "there.toml")
    for _ in range(2):
        assert run("init", "link.toml", "--force").exit_code == 0
        assert Path("link.toml").is_symlink()
        assert len((tmp_path / "there.toml").read_text()) > len(JOB)

    def refused(*_: object) -> None:
        raise OSError(errno.EBUSY, "it is a mount")

    Path("job.toml").write_text(100 * JOB)
    monkeypatch.setattr(os, "rename", refused)
    assert run("init", "--force").exit_code == 0
    assert Path("job.toml").read_text() == (tmp_path / "there.toml").read_text()
    assert not list(Path().glob("*.tmp"))


def test_init_on_a_disk_without_room(run: Run) -> None:
    """It leaves no part of a file, which a second run would refuse to overwrite, and the old file with `--force`."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        assert run("init", "new.toml").exit_code == 3
        assert run("init", "--force").exit_code == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Path("job.toml").read_text() == JOB
    assert [path.name for path in Path().iterdir() if path.suffix in (".toml", ".tmp")] == ["job.toml"]
    assert run("init", "new.toml").exit_code == 0


def test_init_writes_an_example_whose_addresses_are_those_of_dev_up(run: Run) -> None:
    """`init --example` writes files that load, prints the commands to run next, and uses the ports of `dev up`."""
    result = run("init", "my service", "--example", "--name", "clicks")
    assert result.exit_code == 0
    directory = Path("my service")
    assert sorted(path.name for path in directory.iterdir()) == sorted(EXAMPLE_FILES)
    assert result.stdout.splitlines()[0] == "cd 'my service'"
    typed = {line.split("#")[0].strip() for line in result.stdout.splitlines()[1:]}
    assert typed <= {
        "statemgr dev up --no-s3", "statemgr topics create", "python send.py 1000", "python service.py",
        "statemgr store scan totals",
    }  # fmt: skip
    config = JobConfig.from_file(directory / "job.toml")
    assert (config.job_name, list(config.inputs)) == ("clicks", ["clicks"])
    assert config.kafka_client("consumer")["bootstrap.servers"] == f"127.0.0.1:{dev.KAFKA_PORT}"
    assert str(directory.resolve()) in str(config.blob_uri).replace("%20", " ")
    assert (directory / "job.toml").stat().st_mode & 0o077 == 0
    compose = (directory / "docker-compose.yml").read_text()
    assert f"127.0.0.1:${{KAFKA_PORT:-{dev.KAFKA_PORT}}}" in compose
    ours = (Path(__file__).parents[2] / "docker-compose.yml").read_text().splitlines()
    assert [line for line in compose.splitlines() if not line.startswith("#") and line not in ours] == []
    assert f'endpoint = "http://127.0.0.1:{dev.S3_PORT}"' in (directory / "job.toml").read_text()


def test_the_example_sends_more_orders_than_a_producer_holds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the broker then. Without a broker, it says so in one line."""

    class SlowProducer:
        """Delivers when somebody waits for it."""

        def __init__(self, _: object) -> None:
            self.held = 0

        def produce(self, *_: object, **__: object) -> None:
            if self.held == 100_000:
                raise BufferError("Local: Queue full")
            self.held += 1

        def poll(self, timeout: float) -> None:
            self.held = 0 if timeout else self.held

        def flush(self, _: float) -> int:
            return 0

        def __len__(self) -> int:
            return self.held

    assert run("init", "example", "--example", "--name", "clicks").exit_code == 0
    monkeypatch.chdir("example")
    monkeypatch.setattr(sys, "argv", ["send.py", "100001"])
    monkeypatch.setattr("confluent_kafka.Producer", SlowProducer)
    topics = Mock(return_value=Mock(topics=["clicks"]))
    monkeypatch.setattr("confluent_kafka.admin.AdminClient", lambda _: Mock(list_topics=topics))
    main = runpy.run_path("send.py")["main"]
    main()
    topics.side_effect = KafkaException(KafkaError(KafkaError._TRANSPORT))
    with pytest.raises(SystemExit, match=r"no broker answers.*`statemgr dev status`"):
        main()


def test_init_never_overwrites_a_file_of_a_directory_unless_forced(run: Run) -> None:
    """If one of the files exists, `init --example` writes nothing and names that file."""
    result = run("init", "--example")
    assert result.exit_code == 2
    assert "job.toml" in result.stderr
    assert "service.py" not in result.stderr
    assert [path.name for path in Path().iterdir()] == ["job.toml"]
    assert Path("job.toml").read_text() == JOB
    forced = run("init", "--example", "--force", "--json")
    assert json.loads(forced.stdout) == {"directory": ".", "files": list(EXAMPLE_FILES)}
    assert Path("job.toml").read_text() != JOB
    assert run("init", "job.toml/x", "--example").exit_code == 2
    assert run("init", ".").exit_code == 2


@pytest.mark.parametrize(
    ("place", "status", "hints"),
    [
        ("/dev/null/x", 2, ("name a file in a directory", "name another directory")),
        ("/sys/x", 3, ("give the user of this process read and write rights there",) * 2),
    ],
)
def test_init_where_nothing_can_be(run: Run, place: str, status: int, hints: tuple[str, str]) -> None:
    """The hint says what to do about the path."""
    for arguments, hint in zip(((), ("--example",)), hints, strict=True):
        found = run("init", place, *arguments)
        assert (found.exit_code, hint in found.stderr) == (status, True), found.stderr


def test_init_names_a_path_that_is_not_utf_8(run: Run) -> None:
    """Its bytes are escaped."""
    assert json.loads(run("init", "a\udcff", "--json").stdout) == {"path": "a\udcff"}
    assert run("init", "--example", "b\udcff").stdout.startswith("cd 'b\\udcff'")


def test_init_refuses_a_name_that_cannot_be_one(run: Run) -> None:
    """`init` checks the name before it writes anything."""
    assert run("init", "new.toml", "--name", "a/b").exit_code == 2
    assert not Path("new.toml").exists()


def test_what_the_template_has_in_comments_is_valid_too(run: Run) -> None:
    """Each commented key in the template is a known key with a valid value."""
    text = filled_template("orders")
    table, checked = "", 0
    for line in text.splitlines():
        if header := re.match(r"(# )?\[([a-z.]+)\]", line):
            table = header[2]
        elif setting := re.match(r"# ([a-z0-9.]+) = (\S.*)", line):
            JobConfig.from_file(_written('job.name = "x"\nblob.store.uri = "file:///b"\n', table, setting))
            checked += 1
    assert checked > 20


def _written(head: str, table: str, setting: re.Match[str]) -> Path:
    path = Path("commented.toml")
    key = f"{table}.{setting[1]}"
    head = "\n".join(line for line in head.splitlines() if not line.startswith(f"{key} "))
    path.write_text(f"{head}\n{key} = {setting[2]}\n")
    return path


@pytest.mark.parametrize("words", ["--help", "gc --help", "explain", "config show"])
def test_a_pipe_whose_reader_has_ended_is_no_error(run: Run, words: str) -> None:
    """As with `| head -1`: click and rich, which print, would both make the exit status 1."""
    read, write = os.pipe()
    os.close(read)
    found = subprocess.run([sys.executable, "-m", "statemgr", *words.split()], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (found.returncode, found.stderr) == (0, b"")


@pytest.mark.parametrize("words", ["config show --all", "explain"])
def test_a_full_disk_has_its_exit_status(run: Run, words: str) -> None:
    """As where the output goes to a file. Exit status 1 would say that a check has found something."""
    with open("/dev/full", "wb") as full:
        found = subprocess.run([sys.executable, "-m", "statemgr", *words.split()], stdout=full, stderr=subprocess.PIPE)
    assert found.returncode == DiskFull.exit_status
    assert b"hint: free space there" in found.stderr


@pytest.mark.parametrize("words", ["--help", "explain docs/security.md", "config show", "init --example new"])
def test_a_closed_standard_output_is_no_error(run: Run, words: str) -> None:
    """As a service manager may leave it, or `>&-` in a shell."""
    command = f"exec {sys.executable} -m statemgr {words} >&-"
    found = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE)
    assert (found.returncode, b"Traceback" in found.stderr) == (0, False), found.stderr


def test_another_broken_pipe_is_an_error_where_no_stream_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output may be a text in memory, or None."""
    monkeypatch.setattr(JobConfig, "from_file", Mock(side_effect=BrokenPipeError("of a program")))
    found = CliRunner().invoke(cli, ["config", "show"])
    assert (found.exit_code, "of a program" in found.stderr) == (3, True)


# --- config -----------------------------------------------------------------------------------------------


def test_config_check_says_what_is_backed_up_where(run: Run) -> None:
    """`config check` prints the backends of each store, and notes settings that may be mistakes."""
    result = run("config", "check")
    assert result.exit_code == 0
    assert "totals → kafka-changelog" in result.output
    assert "note: store scratch is not backed up" in result.output
    result = run(
        "config", "check", "--set", "task.restore.factories=blob-store", "--set", "blob.store.uri=file:///blobs"
    )
    assert result.exit_code == 0, "a step of a migration may need it"
    assert (
        "note: store totals is backed up to kafka-changelog, but only restored from blob-store: after its next commit, "
        "nothing can restore it"
    ) in result.output


def test_config_check_resolves_references(run: Run) -> None:
    """`config check` finds a variable that is not set before the job starts."""
    result = run("config", "check", "--set", "kafka.sasl.password=${env:STATEMGR_TEST_UNSET}")
    assert result.exit_code == 2
    assert "STATEMGR_TEST_UNSET" in result.stderr


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("schema.registry.basic.auth.user.info=${env:STATEMGR_TEST_UNSET}", "STATEMGR_TEST_UNSET"),
        ("stores.totals.value.avro.schemas=${file:/nope}", "/nope"),
        ("task.input.value.avro.schemas=${file:/nope}", "/nope"),
        ("kafka.message.max.bytes=1000", "kafka.message.max.bytes"),
        ("kafka.linger=5", "kafka.*"),
        ("kafka.message.timeout.ms=900000", "message.timeout.ms"),
    ],
)
def test_config_check_finds_what_a_start_would_refuse(run: Run, setting: str, named: str) -> None:
    """A wrong value is found without a server."""
    avro = [part for key in ("stores.totals", "task.input") for part in ("--set", f"{key}.value.serde=avro")]
    schemas = [part.replace("serde=avro", 'avro.schemas=["long"]') for part in avro]
    found = run("config", "check", *avro, *schemas, "--set", setting)
    assert (found.exit_code, "ConfigError" in found.stderr) == (2, True)
    assert named in found.stderr
    assert run("config", "check", *avro, *schemas).exit_code == 0


def test_config_check_as_json(run: Run) -> None:
    """The JSON is one object."""
    found = json.loads(run("config", "check", "--json").stdout)
    assert (found["job"], found["stores"]) == ("orders", ["scratch", "totals"])


def test_config_show_all_has_every_key(run: Run) -> None:
    """`config show --all` includes keys that are not set, such as the names of topics, and the keys of every store."""
    shown = json.loads(run("config", "show", "--all", "--json").stdout)
    for entry in KEYS:
        if not entry.pattern.endswith("*"):
            assert entry.pattern.replace("<name>", "totals") in shown
    assert shown["stores.scratch.backup.factories"] == []
    assert shown["task.checkpoint.topic"] == "__statemgr_checkpoints_orders-1"
    assert "stores.totals.changelog.topic" not in json.loads(run("config", "show", "--json").stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        ("config", "check", "-c", "other.toml"),
        ("-c", "other.toml", "config", "check"),
        ("-cother.toml", "config", "check"),
        ("--debug", "--config", "other.toml", "config", "check"),
        ("--config=other.toml", "config", "check", "--set", "job.tasks=3"),
        ("-c", "job.toml", "config", "check", "--config=other.toml"),
    ],
)
def test_the_configuration_is_named_before_or_after_the_command(run: Run, arguments: tuple[str, ...]) -> None:
    """J2.11: `-c` is accepted in both places; the one after the command counts."""
    Path("job.toml").rename("other.toml")
    result = run(*arguments)
    assert (result.exit_code, "orders" in result.output) == (0, True), result.output
    assert run("-c", "other.toml").exit_code == 2
    assert "requires an argument" in run("-c").output


@pytest.mark.parametrize(
    "arguments", [("explain", "FencedError"), ("dev", "status", "--directory", "x"), ("init", "--help")]
)
def test_a_configuration_before_a_command_without_one_does_no_harm(run: Run, arguments: tuple[str, ...]) -> None:
    """As in an alias for `statemgr -c job.toml`."""
    assert run("-c", "job.toml", *arguments).output == run(*arguments).output


def test_a_missing_file_says_how_to_make_one(run: Run) -> None:
    """The error has exit status 2 and names the command that writes the file."""
    result = run("config", "check", "--config", "none.toml")
    assert result.exit_code == 2
    assert "statemgr init" in result.stderr


# --- options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("checkpoints", "list", "--task", "Partition x"),
        ("checkpoints", "list", "--task", "-1"),
        ("checkpoints", "show", "--checkpoint", "latest"),
        ("restore",),
        ("store", "scan", "totals", "--limit", "-1"),
        ("config", "show", "--set", "job.tasks"),
    ],
)
def test_wrong_use_is_exit_status_2(run: Run, arguments: tuple[str, ...]) -> None:
    """Wrong use is found before the command contacts any server."""
    assert run(*arguments).exit_code == 2


# --- output -----------------------------------------------------------------------------------------------


def test_tables_show_texts_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets in a key are not markup, and output that does not go to a terminal is not truncated."""
    long = "x" * 150
    output.print_table(("key", "value"), [("[red]a[/red]", long), ("b", 1)], empty="none")
    printed = capsys.readouterr().out
    assert "[red]a[/red]" in printed
    assert long in printed


def test_times_are_utc_to_the_millisecond() -> None:
    """Epoch milliseconds become a UTC time with the zone's letter."""
    assert output.moment(1_700_000_000_123) == "2023-11-14 22:13:20.123Z"


@pytest.mark.parametrize("total", [0, 30])
def test_progress_is_shown_also_where_its_end_is_unknown(
    total: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bar without a total shows only what is done. A bar with a total shows both."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with output.progress_bars(quiet=False) as report:
        report("list", 10, total)
        report("list", 20, total)
    shown = capsys.readouterr().err
    assert "list" in shown
    assert ("20 of 30" in shown) == bool(total)
    assert "20" in shown


def test_a_collection_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    """Nothing changes without --write, so --fix needs it. A duration needs a unit."""
    (tmp_path / "job.toml").write_text('"job.name" = "orders"')
    for arguments, word in ((["--fix"], "add --write"), (["--grace", "36"], "36h")):
        result = CliRunner().invoke(cli, ["gc", "--config", str(tmp_path / "job.toml"), *arguments])
        assert result.exit_code == 2
        assert word in result.stderr


def test_dangerous_commands_are_dry_without_write() -> None:
    """What deletes, moves or replaces something needs --write. Only `materialize`, which can do no harm, has the
    opposite option."""
    found: dict[str, set[str]] = {"--write": set(), "--dry-run": set()}

    def look(command: click.Command, name: str) -> None:
        if isinstance(command, click.Group):
            for inner in command.list_commands(click.Context(command)):
                known = command.get_command(click.Context(command), inner)
                assert known is not None
                look(known, f"{name} {inner}".strip())
        for option in {one for parameter in command.params for one in parameter.opts} & found.keys():
            found[option].add(name)

    look(cli, "")
    assert found == {
        "--write": {
            "adopt", "checkpoints rollback", "copy", "dev up", "gc", "migrate advance", "migrate rollback", "rescale",
            "topics repair",
        },
        "--dry-run": {"materialize"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("command", "option", "unit"),
    [
        (("gc",), "--grace", None), (("standby",), "--interval", "s"), (("top",), "--interval", "s"),
        (("migrate", "advance"), "--timeout", "s"), (("adopt",), "--settle", "s"),
        (("plan-capacity",), "--commit", "s"), (("plan-capacity",), "--get-latency", "ms"),
    ],
)  # fmt: skip
def test_options_take_durations_with_units(command: tuple[str, ...], option: str, unit: str | None) -> None:
    """Every option that is a duration takes a number with a unit, and refuses another text with the names of the units.
    A plain number has the option's unit, if that has one."""
    found = cli
    for name in command:
        assert isinstance(found, click.Group)
        found = found.get_command(click.Context(cli), name)  # type: ignore[assignment]
    (parameter,) = (one for one in found.params if option in one.opts)
    context = click.Context(found)
    assert parameter.process_value(context, "1.5min") == 90
    if unit is not None:
        assert parameter.process_value(context, "90") == (90 if unit == "s" else 0.09)
    for wrong in ("soon", "-1 s", *([] if unit else ["90"])):
        with pytest.raises(click.BadParameter, match="ms, s, min, h, days"):
            parameter.process_value(context, wrong)


def test_messages_show_numbers_and_hide_other_values(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped option may hold a password, so messages hide it. They show a number that is refused."""
    for arguments in (
        ["plan-capacity", "--changes", "1k", "--commit", "0"],
        ["plan-capacity", "--changes", "20k", "--state", "lots"],
        ["migrate", "advanse"],
        ["topics", "another-secret"],
        ["top", "--every", "a-secret"],
        ["adopt", "--from", "kafka-stream"],
        ["adopt", "--from", "raw", "--job", "orders"],
        ["adopt", "--from", "quix"],
    ):
        monkeypatch.setattr(sys, "argv", ["statemgr", *arguments])
        with pytest.raises(SystemExit, match="2"):
            cli.main()
    shown = capsys.readouterr().err
    assert "0 s is less than 0.001 s" in shown
    assert "not a number such as 20k, 500GB" in shown
    assert "No such command 'advanse'. Did you mean 'advance'?" in shown
    assert "'kafka-stream' is not one of 'kafka-streams'," in shown
    assert "--from raw needs --changelog STORE=TOPIC" in shown
    assert "name the old job with --job, or its changelogs" in shown
    assert "a-secret" not in shown
    assert "another-secret" not in shown


def test_a_configuration_file_without_its_option(run: Run) -> None:
    """The message shows the name of the file, and names the option."""
    for command in (("config", "check"), ("topics", "create"), ("migrate", "plan")):
        refused = run(*command, "other.toml")
        assert refused.exit_code == 2
        assert "(other.toml). Name the configuration file with --config other.toml" in refused.stderr
    assert "--config" not in run("dev", "up", "other.toml").stderr, "which has no such option"


@pytest.mark.parametrize("command", [["topics", "check"], ["checkpoints", "list"], ["top", "--once"]])
def test_a_command_says_what_it_waits_for_and_ends_at_its_deadline(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """Nothing listens on the port: a line says so before the deadline, and the error names the cause."""
    monkeypatch.setattr(metadata, "DEADLINE_S", 1.0)
    monkeypatch.setattr(metadata, "_PATIENCE_S", 0.4)
    result = run(*command, "--set", "task.inputs=orders")
    assert result.exit_code == 3
    first, *_, error, hint, see = result.stderr.strip().splitlines()
    assert first.startswith("note: waiting for Kafka, for at most 1 s more: describing topics")
    assert error.startswith("error: describing topics")
    assert "Connection refused" in error
    assert hint == "hint: check kafka.bootstrap.servers, and that the brokers are running"
    assert see == "see: statemgr explain UnavailableError"
