"""Secrets: references are resolved only where they are used, and values are never shown."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from click.testing import CliRunner

from statemgr.cli.main import cli
from statemgr.config import JobConfig
from statemgr.config.loading import MASK, is_secret, masked, resolve
from statemgr.errors import ConfigError
from statemgr.kafka import clients as kafka_clients
from statemgr.kafka.registry.schema_registry import SchemaRegistry

SECRET = "hunter2-do-not-show"
SECRET_KEYS = [
    "kafka.sasl.password",
    "kafka.sasl.username",
    "kafka.producer.sasl.password",
    "kafka.ssl.key.password",
    "kafka.ssl.keystore.password",
    "kafka.ssl.key.pem",
    "kafka.sasl.oauthbearer.config",
    "kafka.sasl.oauthbearer.client.secret",
    "blob.store.s3.access.key",
    "blob.store.s3.secret.key",
    "blob.store.s3.session.token",
]


def literal() -> JobConfig:
    """Return a configuration with a literal secret under every secret key."""
    given = {"job.name": "orders", "kafka.bootstrap.servers": "localhost:1", **dict.fromkeys(SECRET_KEYS, SECRET)}
    return JobConfig.from_mapping(given)


def test_no_repr_shows_a_secret() -> None:
    """Neither `repr`, nor `str`, nor the masked values that `config show` prints contain a secret."""
    config = literal()
    for text in (repr(config), str(config), f"{config}", repr(config.masked()), repr(dict(config.stores))):
        assert SECRET not in text
    assert set(config.masked().values()) >= {MASK}


def test_references_stay_unresolved_in_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors receive the reference and not the secret. A client resolves it when it is created."""
    monkeypatch.setenv("STATEMGR_TEST_PASSWORD", SECRET)
    config = JobConfig.from_mapping(
        {
            "job.name": "orders",
            "kafka.bootstrap.servers": "localhost:1",
            "kafka.sasl.password": "${env:STATEMGR_TEST_PASSWORD}",
        }
    )
    assert SECRET not in repr(config.to_mapping())
    assert config.get("kafka.sasl.password") == "${env:STATEMGR_TEST_PASSWORD}"
    assert config.masked()["kafka.sasl.password"] == "${env:STATEMGR_TEST_PASSWORD}"
    assert config.kafka_client("consumer")["sasl.password"] == SECRET


def test_a_file_reference_gives_its_content_without_the_last_line_end(tmp_path: Path) -> None:
    """One trailing line end is removed. White space that belongs to the secret stays."""
    path = tmp_path / "secret"
    path.write_bytes(b" a b \r\n")
    assert resolve("k", f"x-${{file:{path}}}") == "x- a b "


def test_a_reference_to_nothing_names_key_and_reference(tmp_path: Path) -> None:
    """The error for an unset variable or a missing file names the key and the reference."""
    config = JobConfig.from_mapping(
        {
            "job.name": "orders",
            "blob.store.s3.secret.key": "${env:STATEMGR_TEST_UNSET}",
            "state.dir": f"${{file:{tmp_path}/none}}",
        }
    )
    with pytest.raises(ConfigError, match=r"blob\.store\.s3\.secret\.key.*STATEMGR_TEST_UNSET"):
        assert config.blob_s3
    with pytest.raises(ConfigError, match=r"state\.dir.*none"):
        assert config.state_dir


def test_what_stands_behind_a_reference_is_checked_when_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value from a reference is checked like any other."""
    monkeypatch.setenv("STATEMGR_TEST_URI", "ftp://x")
    config = JobConfig.from_mapping({"job.name": "orders", "blob.store.uri": "${env:STATEMGR_TEST_URI}"})
    with pytest.raises(ConfigError, match=r"blob\.store\.uri must be"):
        assert config.blob_uri


@pytest.mark.parametrize("value", ["${vault:x}", "${ENV:X}", "a${env:}"])
def test_a_reference_of_an_unknown_kind_is_refused_at_load(value: str) -> None:
    """A mistyped reference is never sent as a password."""
    with pytest.raises(ConfigError, match="unknown kind"):
        JobConfig.from_mapping({"job.name": "orders", "kafka.sasl.password": value})
    with pytest.raises(ConfigError, match="unknown kind"):
        JobConfig.from_mapping({"job.name": "orders", "kafka.bootstrap.servers": ["localhost:9092", value]})


def test_a_reference_where_none_is_allowed_is_refused() -> None:
    """Names are part of the published state, so they cannot differ between machines."""
    with pytest.raises(ConfigError, match=r"job\.id may not hold a reference"):
        JobConfig.from_mapping({"job.name": "orders", "job.id": "${env:X}"})
    with pytest.raises(ConfigError, match=r"task\.topics\.retention\.ms may not hold a reference"):
        JobConfig.from_mapping({"job.name": "orders", "task.topics.retention.ms": ["${env:X}"]})


def test_a_reference_in_a_list_is_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is a part of one item."""
    monkeypatch.setenv("STATEMGR_TEST_HOST", "one")
    config = JobConfig.from_mapping(
        {"job.name": "o", "kafka.bootstrap.servers": ["${env:STATEMGR_TEST_HOST}:1", "b:2"]}
    )
    assert config.kafka_client("producer")["bootstrap.servers"] == "one:1,b:2"


@pytest.mark.parametrize("key", SECRET_KEYS)
def test_secret_keys_are_known_by_their_names(key: str) -> None:
    """Secret keys are recognised by name. A value with more than a reference in it is also masked."""
    assert is_secret(key)
    assert masked(key, SECRET) == MASK
    assert masked(key, f"{SECRET}${{env:X}}") == MASK
    assert masked(key, "${env:X}") == "${env:X}"


@pytest.mark.parametrize("key", ["kafka.sasl.mechanism", "kafka.sasl.mechanisms", "kafka.ssl.ca.location", "job.name"])
def test_other_keys_are_shown(key: str) -> None:
    """Masking other values would only hide mistakes."""
    assert not is_secret(key)


@pytest.mark.parametrize("how", ["literal", "reference"])
def test_the_password_in_a_url_is_masked(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """It is masked in every value, and in texts of other software. What is before the @ of `abfss` is a container."""
    monkeypatch.setenv("STATEMGR_TEST_PROXY", f"ann:a/{SECRET}@proxy")
    proxy = f"ann:a/{SECRET}@proxy" if how == "literal" else "${env:STATEMGR_TEST_PROXY}"
    given = {"schema.registry.url": "http://r", "schema.registry.proxy": proxy}
    config = JobConfig.from_mapping({"job.name": "orders", "blob.store.uri": "abfss://box@acc.dfs.a.net", **given})
    assert SECRET not in repr(config)
    assert config.hider()(f"no answer of a/{SECRET}") == f"no answer of {MASK}"
    assert config.masked()["blob.store.uri"] == "abfss://box@acc.dfs.a.net"
    with pytest.raises(ConfigError, match="refuses its settings") as caught:
        SchemaRegistry(config)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("blob.store.uri", "file:///home/ann@corp.local/blobs"),
        ("blob.store.uri", "s3://bucket/team:v1@x/blobs"),
        ("kafka.group.id", "orders:v1@prod"),
    ],
)
def test_what_is_no_password_stays(key: str, value: str) -> None:
    """An @ in a path or in a name has no password before it. A mask would hide `/home/ann` in every line of the log."""
    config = JobConfig.from_mapping({"job.name": "orders", key: value})
    assert config.masked()[key] == value
    assert config.hider()(value) == value


def test_no_error_shows_a_secret() -> None:
    """Neither the message nor the traceback of an error contains a value, whatever is wrong."""
    bad: list[dict[str, object]] = [
        {"blob.store.s3.secret.key": ["", SECRET]},
        {"kafka.sasl.password": [SECRET, {}]},
        {"kafka.sasl.passwort": {SECRET: {}}, "job.nme": SECRET},
    ]
    for mapping in bad:
        with pytest.raises(ConfigError) as caught:
            JobConfig.from_mapping({"job.name": "orders", **mapping})
        assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "show"],
        ["config", "show", "--json"],
        ["config", "show", "--all"],
        ["config", "check"],
        ["config", "check", "--json"],
        ["--debug", "config", "check", "--set", f"kafka.sasl.passwort.x={SECRET}", "--set", "job.tasks=0"],
        ["config", "check", "--set", f"blob.store.s3.secret.kye={SECRET}"],
        ["config", "check", "--set", SECRET],
        ["--debug", "config", "check", "--set", f"blob.store.uri=s3://key:{SECRET}@bucket/x"],
        ["--debug", "config", "check", "--set", f"blob.store.uri=s3://key:a/{SECRET}@bucket/x"],
        ["--debug", "config", "check", "--set", f"blob.store.uri=key:{SECRET}@bucket/x"],
        ["config", "show", "--set", f"schema.registry.proxy=http://ann:{SECRET}@proxy:3128"],
        ["config", "check", "--set", "kafka.sasl.password", SECRET],
        ["config", "check", SECRET],
        ["config", SECRET],
        [SECRET],
        [f"kafka.sasl.password={SECRET}"],
        ["config", "check", f"--kafka.sasl.password={SECRET}"],
        ["config", "check", f"kafka.sasl.password={SECRET}"],
        ["config", "check", f"--sett=kafka.sasl.password={SECRET}"],
        ["config", "check", f"--json={SECRET}"],
        ["store", "scan", "totals", "--limit", SECRET],
        ["store", "scan", "totals", "--key-serde", SECRET],
        ["store", "scan", "totals", f"--task={SECRET}"],
        ["checkpoints", "show", "--checkpoint", SECRET],
        ["gc", "--grace", f"{SECRET}h"],
    ],
)
def test_the_command_line_shows_no_secret(tmp_path: Path, arguments: list[str]) -> None:
    """No output of a command contains a secret, not even a traceback."""
    path = tmp_path / "job.toml"
    lines = [f'"{key}" = "{SECRET}"' for key in SECRET_KEYS]
    path.write_text("\n".join(['"job.name" = "orders"', '"kafka.bootstrap.servers" = "localhost:1"', *lines]))
    result = CliRunner().invoke(cli, [*arguments, "--config", str(path)])
    assert result.output
    assert SECRET not in result.output


def use_all(config: JobConfig) -> None:
    """Resolve every reference where it is used."""
    _ = config.blob_uri, config.blob_s3, config.state_dir, config.stores["a"].avro_schemas
    kafka_clients.admin(config, kafka_clients.ClientErrors())


def test_no_error_shows_what_a_reference_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message contains a value from the environment, even if the value is valid and its key is not secret."""
    bad = {
        "blob.store.uri": f"ftp://{SECRET}",
        "blob.store.s3.endpoint": SECRET,
        "blob.store.s3.region": "",
        "state.dir": "\ud800",
        "stores.a.value.avro.schemas": f'["{SECRET}"]',
        "kafka.linger.ms": f"{SECRET}\ud800",
        "kafka.bogus": SECRET,
        "kafka.linger": SECRET,
        "kafka.debug": SECRET,
        "kafka.compression.codec": SECRET,
    }
    for key, value in bad.items():
        monkeypatch.setattr("statemgr.config.loading.os.environ", {"STATEMGR_TEST_VALUE": value})
        given = {
            "job.name": "orders",
            "kafka.bootstrap.servers": "localhost:1",
            "stores.a.value.serde": "avro",
            "stores.a.value.avro.schemas": '["null"]',
            key: "${env:STATEMGR_TEST_VALUE}",
        }
        config = JobConfig.from_mapping(given)
        with pytest.raises(ConfigError) as caught:
            use_all(config)
        assert SECRET not in "".join(traceback.format_exception(caught.value)) + caught.value.to_json()
