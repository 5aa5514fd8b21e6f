"""Keys and values on the command line: from text to bytes and back."""

from __future__ import annotations

import datetime
import json
import os
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from statemgr.cli.main import cli
from statemgr.cli.store import parse, render, text
from statemgr.errors import InvalidError
from statemgr.kafka import reader
from statemgr.kafka.reader import _Reading
from statemgr.serdes import Serde, avro_serde
from statemgr.serdes import serde as serde_of
from statemgr.stores.store import after_prefix
from statemgr.testing.memory_producer import MemoryProducer
from statemgr.testing.memory_servers import MemoryServers
from statemgr.wiring import open_services
from tests.cli.test_running_job import write_toml
from tests.commits import TASK
from tests.jobs import with_changes

CONFIG: dict[str, object] = {"job.name": "orders", "stores.totals.value.serde": "bytes"}

#: A key of the serde kafka-streams-window.
WINDOW = b"ann\x00\x01" + b"\x80" + b"\x00" * 6 + b"\x07" + bytes(4)
_DATES = avro_serde(['{"type": "int", "logicalType": "date"}'])


@pytest.mark.parametrize(
    ("given", "serde", "data"),
    [
        ("85123A", "bytes", b"85123A"),
        ("0x00ff", "bytes", b"\x00\xff"),
        ("00ff", "hex", b"\x00\xff"),
        ("é", "string", "é".encode()),
        ('"a"', "json", b'"a"'),
        ('{"b": 1, "a": 2}', "msgpack", b"\x82\xa1a\x02\xa1b\x01"),
        ("-1", "integer", b"\x7f" + b"\xff" * 7),
        ('["ann", 7]', "kafka-streams-window", WINDOW),
        ('["ann", 7, 0]', "kafka-streams-window(string)", WINDOW),
        ('["0x616e6e", 7]', "kafka-streams-window", WINDOW),
        ('["ann"]', "kafka-streams-window", b"ann\x00\x01"),
        ('["ann", 7, 9]', "quix-window(json)", serde_of("quix-window").serialize((b'"ann"', 7, 9))),
    ],
)
def test_a_key_is_parsed_by_its_serde(given: str, serde: str, data: bytes) -> None:
    """A key on the command line becomes the bytes that the store holds."""
    assert parse(given, serde) == data


@pytest.mark.parametrize(
    ("given", "serde"),
    [
        ("x", "integer"),
        ("{", "json"),
        ("0xz", "hex"),
        ("0x1", "bytes"),
        ("7", "kafka-streams-window"),
        ('["a", "x"]', "kafka-streams-session"),
    ],
)
def test_a_key_that_is_none_is_refused(given: str, serde: str) -> None:
    """The error names the option that selects another serde."""
    with pytest.raises(InvalidError, match="--key-serde"):
        parse(given, serde)


@pytest.mark.parametrize(
    ("data", "serde", "value"),
    [
        (b"abc", "bytes", "abc"),
        (b"\xff\x00", "bytes", "0xff00"),
        (b"0x41", "bytes", "0x30783431"),
        (b"a\nb", "bytes", "0x610a62"),
        (b"\xff", "hex", "ff"),
        (b'{"a":1}', "json", {"a": 1}),
        (b"\x80" + b"\x00" * 6 + b"\x07", "integer", 7),
        (WINDOW, "kafka-streams-window", ["ann", 7, 0]),
        (WINDOW, "kafka-streams-window(string)", ["ann", 7, 0]),
        (b"\x82\x01\xc4\x01\xff\xa1a\x92\xc0\xc3", "msgpack", {"1": "0xff", "a": [None, True]}),
        (b"\xcb\x7f\xf8" + b"\x00" * 6, "msgpack", "nan"),
        (_DATES.serialize(datetime.date(1970, 1, 2)), _DATES, "1970-01-02"),
    ],
)
def test_bytes_are_rendered_by_their_serde(data: bytes, serde: str | Serde, value: object) -> None:
    """Values become something that JSON can hold. Bytes that are not text become hexadecimal."""
    assert render(data, serde) == value


@pytest.mark.parametrize("key", [b"A", b"0x41", b"0x", b"0xz", b"0X41", b"\xff", b"", b"a\nb"])
def test_a_key_that_is_shown_can_be_given_back(key: bytes) -> None:
    """Text that begins with 0x is shown as hexadecimal: given as it is, it would be read as another key."""
    assert parse(render(key, "bytes"), "bytes") == key


def test_another_user_of_the_machine_reads_the_topic(
    servers: MemoryServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what needs local directories of the job says that they belong to another user, and names the way out."""
    file = job_with(servers, tmp_path, (b"key", b"1"))
    state = tmp_path / "state"
    (state / "orders").mkdir(parents=True)
    if os.geteuid() == 0:
        os.chown(state / "orders", 12345, 12345)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(cli, [*arguments, "--config", str(file), "--set", f"state.dir={state}"])

    assert run("checkpoints", "list").exit_code == 0
    assert run("store", "get", "totals", "key").stdout == "1\n"
    config = with_changes(servers.config, state__dir=str(state))
    with closing(open_services(config)) as services, pytest.raises(InvalidError, match="another user") as refused:
        services.task_directory(TASK)
    assert "--set state.dir=DIRECTORY" in str(refused.value.hint)


@pytest.mark.parametrize("serde", ["string", "bytes"])
@pytest.mark.parametrize(
    "key",
    ["a\x1fb", "a\nb", "a\x9b31m", "a\u202eb", "\u2028", '"q"', '"a\\nb"', '"\\"a\\\\nb\\""', "é b", "\U000e0001"],
)
def test_text_that_is_shown_is_printable_and_can_be_given_back(key: str, serde: str) -> None:
    """Control characters are not sent to the terminal. What is shown in quotes because of them finds its key."""
    shown = text(render(key.encode(), serde))
    assert shown.isprintable()
    assert parse(shown, serde) == key.encode()
    window = serde_of("kafka-streams-window").serialize((key.encode(), 1, 2))
    assert parse(text(render(window, named := f"kafka-streams-window({serde})")), named) == window
    assert json.loads(text([key])) == [key]
    assert text([key]).isprintable()


def test_a_key_that_begins_with_0x_is_found(servers: MemoryServers, tmp_path: Path) -> None:
    """As text with --key-serde, which the hint of a failed look-up names; or as it is shown."""
    file = job_with(servers, tmp_path, (b"0x41", b"1"))

    def get(*given: str) -> Result:
        return CliRunner().invoke(cli, ["store", "get", "totals", "--config", str(file), *given])

    found = get("0x41")
    assert (found.exit_code, "--key-serde string" in found.stderr) == (1, True)
    assert [get("--key-serde", "string", "0x41").stdout, get("0x30783431").stdout] == ["1\n", "1\n"]


@pytest.mark.parametrize(("data", "serde"), [(b"\xff", "string"), (b"{", "json"), (b"abc", "integer"), (b"", _DATES)])
def test_bytes_of_another_serde_are_refused(data: bytes, serde: str | Serde) -> None:
    """Bytes of another serde are an error and never a wrong value."""
    with pytest.raises(InvalidError, match="serde"):
        render(data, serde)


def test_values_are_shown_on_one_line() -> None:
    """Control characters are escaped before they reach the terminal."""
    assert text("a") == "a"
    assert text("a\x1b[31m") == '"a\\u001b[31m"'
    assert text({"a": [1]}) == '{"a": [1]}'


def job_with(servers: MemoryServers, directory: Path, *items: tuple[bytes, bytes]) -> Path:
    """Commit these items. Returns: the job's configuration file in the directory."""
    config, file = servers.on_disk(servers.config, "one"), directory / "job.toml"
    with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        task.store("totals").put_many(items)
        task.commit({"orders-0": 1})
    write_toml(config, file)
    return file


def test_a_scan_that_fails_has_printed_json(servers: MemoryServers, tmp_path: Path) -> None:
    """The list is closed before the value that the serde cannot read, and the error is on the other stream."""
    file = job_with(servers, tmp_path, (b"a", b"1"), (b"b", b"\xff"))
    given = ["store", "scan", "totals", "--json", "--value-serde", "json", "--config", str(file)]
    found = CliRunner().invoke(cli, given)
    assert (found.exit_code, "--value-serde" in found.stderr) == (2, True)
    assert [entry["value"] for entry in json.loads(found.stdout)] == [1]
    found = CliRunner().invoke(cli, [*given, "--prefix", "b"])
    assert (found.exit_code, json.loads(found.stdout)) == (2, [])


def test_a_scan_that_fails_leaves_no_files(
    servers: MemoryServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has restored is removed at once, and not when Python collects the error."""
    file = job_with(servers, tmp_path, (b"a", b"\xff"))
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    given = ["store", "scan", "totals", "--value-serde", "json", "--config", str(file)]
    found = CliRunner().invoke(cli, given)
    assert found.exc_info is not None, "which holds the frames of the command"
    assert (found.exit_code, list(temporary.iterdir())) == (2, [])


@pytest.mark.parametrize("command", ["get", "scan"])
def test_half_a_surrogate_pair_is_escaped(servers: MemoryServers, tmp_path: Path, command: str) -> None:
    """JSON may have one, such as from JavaScript, but UTF-8 cannot. What follows is shown, too."""
    file = job_with(servers, tmp_path, (b"a", b'{"\\ud800": "\xc3\xa9"}'), (b"b", b"2"))
    given = ["store", command, "totals", *(["a"] if command == "get" else []), "--value-serde", "json"]
    found = CliRunner().invoke(cli, [*given, "--config", str(file)])
    assert (found.exit_code, '{"\\ud800": "é"}' in found.stdout) == (0, True), found.output
    shown = json.loads(CliRunner().invoke(cli, [*given, "--json", "--config", str(file)]).stdout)
    values = [shown["value"]] if command == "get" else [entry["value"] for entry in shown]
    assert values == [{"\ud800": "é"}, 2][: len(values)]
    assert len(values) == (1 if command == "get" else 2)


def test_json_is_shown_without_control_characters(servers: MemoryServers, tmp_path: Path) -> None:
    """Those that JSON does not escape by itself would control the terminal, too."""
    value = "a\x9b31m\u202e\u2028"
    file = job_with(servers, tmp_path, (b"a", value.encode()))
    given = ["store", "get", "totals", "a", "--json", "--value-serde", "string", "--config", str(file)]
    found = CliRunner().invoke(cli, given).stdout
    assert (json.loads(found)["value"], found.replace("\n", "").isprintable()) == (value, True)


@pytest.mark.parametrize(
    ("into", "why"),
    [
        ("/proc/x", "No such file or directory"),
        ("job.toml/x", "Not a directory"),
        ("a\udcff", "is not UTF-8"),
    ],
)
def test_a_wrong_directory_is_no_damaged_state(
    servers: MemoryServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, into: str, why: str
) -> None:
    """The exit status of a restore is that of wrong use, and the hint is about the directory."""
    job_with(servers, tmp_path, (b"a", b"1"))
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(cli, ["restore", "--into", into])
    assert (found.exit_code, why in found.stderr) == (2, True), found.output
    assert "hint: choose another directory" in found.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("a")] == []


def test_the_end_of_a_prefix() -> None:
    """The end is the smallest key after all keys with the prefix, even if the prefix ends in bytes of 255."""
    assert after_prefix(b"ab") == b"ac"
    assert after_prefix(b"a\xff\xff") == b"b"
    assert after_prefix(b"\xff") is None
    assert after_prefix(b"") is None


def test_a_command_that_waits_for_an_open_transaction_says_so(
    servers: MemoryServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction of a dead owner hides the newest checkpoint. A line says what the command waits for."""
    file = job_with(servers, tmp_path, (b"a", b"1"))
    dead = MemoryProducer(servers.broker, {"transactional.id": "dead"})
    dead.init_transactions()
    dead.begin_transaction()
    dead.produce(servers.config.checkpoint_topic, b"key", b"value", partition=0)
    tell = _Reading.tell_waiting

    def told(self: _Reading, left_s: float) -> None:
        tell(self, left_s)
        dead.abort_transaction()

    monkeypatch.setattr(reader, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(_Reading, "tell_waiting", told)
    found = CliRunner().invoke(cli, ["store", "get", "totals", "a", "--config", str(file)])
    assert (found.exit_code, found.stdout) == (0, "1\n")
    assert "an open transaction of another owner stops it" in found.stderr
