"""Loading a job's configuration: keys, values, defaults and contradictions."""

from __future__ import annotations

import json
import pickle
import re
import runpy
from pathlib import Path

import pytest

from statemgr.config import JobConfig
from statemgr.config.keys import KEYS, ROCKSDB_DEFAULTS
from statemgr.config.loading import SAMZA_CLASSES, SAMZA_KEYS
from statemgr.errors import ConfigError

BLOBS = {"blob.store.uri": "file:///blobs"}
PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def load(**given: object) -> JobConfig:
    """Return the configuration of a job called `orders`; `__` stands for a dot."""
    return JobConfig.from_mapping({"job.name": "orders", **{k.replace("__", "."): v for k, v in given.items()}})


def refusal(mapping: dict[str, object]) -> ConfigError:
    """Return the error that these keys cause in a job called `orders`."""
    with pytest.raises(ConfigError) as caught:
        JobConfig.from_mapping({"job.name": "orders", **mapping})
    return caught.value


# --- forms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '[job]\nname = "orders"\ntasks = 4\n[task]\nbackup.factories = ["kafka-changelog", "blob-store"]\n'
        '[stores.totals]\ntype = "memory"\n[blob.store]\nuri = "file:///blobs"\n',
        '"job.name" = "orders"\n"job.tasks" = "4"\n"task.backup.factories" = "kafka-changelog, blob-store"\n'
        '"stores.totals.type" = "memory"\n"blob.store.uri" = "file:///blobs"\n',
        'job.name = "orders"\njob.tasks = 4\n[task.backup]\nfactories = ["kafka-changelog", "blob-store"]\n'
        '[stores]\n"totals.type" = "memory"\n[blob]\n"store.uri" = "file:///blobs"\n',
    ],
    ids=["tables", "quoted", "mixed"],
)
def test_tables_and_dotted_keys_say_the_same(tmp_path: Path, text: str) -> None:
    """Nested tables, quoted dotted keys and a mixture of both give equal configurations."""
    path = tmp_path / "job.toml"
    path.write_text(text)
    config = JobConfig.from_file(path)
    assert config == load(
        job__tasks=4,
        task__backup__factories=["kafka-changelog", "blob-store"],
        stores__totals__type="memory",
        blob__store__uri="file:///blobs",
    )
    assert (config.tasks, config.stores["totals"].type) == (4, "memory")


def test_every_type_is_also_accepted_as_text() -> None:
    """A text becomes a value of the key's own type."""
    config = load(
        job__tasks="3",
        task__inputs="a, b",
        task__checkpoint__write__versions="2,1",
        blob__store__s3__path__style="true",
        blob__store__retry__policy__jitter__factor="0.25",
    )
    assert config.tasks == 3
    assert config.inputs == ["a", "b"]
    assert config.write_versions == (1, 2)
    assert config.blob_s3["path.style"] is True
    assert config.retry.jitter == 0.25


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    """A setting from the command line overrides the file, even if the file uses another name for the key."""
    path = tmp_path / "job.toml"
    path.write_text('[job]\nname = "orders"\ntasks = 4\n[stores.totals]\nchangelog = "kafka.old"\n')
    config = JobConfig.from_file(path, {"job.tasks": "8", "stores.totals.changelog.topic": "new"})
    assert config.tasks == 8
    assert config.stores["totals"].changelog_topic == "new"


def test_a_round_trip_through_json_and_pickle_gives_an_equal_object() -> None:
    """Executors receive the same configuration through JSON or pickle."""
    config = load(stores__totals__rocksdb__compression="zstd", kafka__producer__linger__ms=5, **BLOBS)
    assert JobConfig.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 - what Spark does with closures


# --- defaults ---------------------------------------------------------------------------------------------


def test_defaults() -> None:
    """The defaults are those that the documentation names."""
    config = load(stores__totals__type="rocksdb")
    store = config.stores["totals"]
    assert (config.job_id, config.tasks, config.retained, config.commit_ms) == ("1", 1, 2, 60_000)
    assert config.checkpoint_topic == "__statemgr_checkpoints_orders-1"
    assert (config.read_versions, config.write_versions) == ((1, 2), (2,))
    assert (config.blob_uri, config.metrics_port) == (None, None)
    assert config.state_dir == Path(".statemgr/state")
    assert store.changelog_topic == "orders-1-totals-changelog"
    assert (store.backup_factories, store.restore_factories) == (("kafka-changelog",), ("kafka-changelog",))
    assert store.rocksdb == ROCKSDB_DEFAULTS
    assert store.durable


def test_restore_defaults_to_the_backup_order_and_a_store_overrides_both() -> None:
    """A store's own lists override the task's."""
    config = JobConfig.from_mapping(
        {
            "job.name": "orders",
            "task.backup.factories": "blob-store,kafka-changelog",
            "stores.a.type": "rocksdb",
            "stores.b.backup.factories": "kafka-changelog",
            "stores.c.restore.factories": "kafka-changelog",
            **BLOBS,
        }
    )
    assert config.stores["a"].restore_factories == ("blob-store", "kafka-changelog")
    assert config.stores["b"].restore_factories == ("kafka-changelog",)
    assert config.stores["c"].backup_factories == ("blob-store", "kafka-changelog")
    assert config.stores["c"].restore_factories == ("kafka-changelog",)


def test_a_store_without_backup_is_not_restored() -> None:
    """A store with an empty backup list is not durable and never restored, even if the task has a restore list."""
    config = load(task__restore__factories="kafka-changelog", stores__scratch__backup__factories=[])
    assert not config.stores["scratch"].durable
    assert config.stores["scratch"].restore_factories == ()


def test_an_empty_table_declares_a_store(tmp_path: Path) -> None:
    """`[stores.totals]` alone declares a store with defaults."""
    path = tmp_path / "job.toml"
    path.write_text('job.name = "orders"\n[stores.totals]\n')
    assert list(JobConfig.from_file(path).stores) == ["totals"]


def test_get_is_typed_and_applies_defaults() -> None:
    """`get` accepts every key, including keys of stores and keys whose default depends on others."""
    config = load(stores__totals__key__serde="string")
    assert config.get("job.tasks") == 1
    assert config.get("task.restore.factories") == ["kafka-changelog"]
    assert config.get("stores.totals.changelog.topic") == "orders-1-totals-changelog"
    assert config.get("stores.totals.rocksdb.bloom.filter.bits") == 10
    assert config.get("kafka.linger.ms") is None
    with pytest.raises(ConfigError, match=r"job\.task"):
        config.get("job.task")


# --- Samza's names ---------------------------------------------------------------------------------------


CHANGELOG_CLASS, BLOB_CLASS = list(SAMZA_CLASSES)[:2]


@pytest.mark.parametrize(
    ("written", "ours", "names"),
    [
        ({"task.restore.manager": "blob-store"}, {"task.restore.factories": ["blob-store"]}, ["task.restore.manager"]),
        ({"task.commit.manager": ["blob-store"]}, {"task.backup.factories": ["blob-store"]}, ["task.commit.manager"]),
        ({"stores.backup.factories": BLOB_CLASS}, {"task.backup.factories": ["blob-store"]},
         ["stores.backup.factories", BLOB_CLASS]),
        ({"stores": {"restore": {"factories": [BLOB_CLASS]}}}, {"task.restore.factories": ["blob-store"]},
         ["stores.restore.factories", BLOB_CLASS]),
        ({"stores.a.backup.factories": f"{BLOB_CLASS}, {CHANGELOG_CLASS}"},
         {"stores.a.backup.factories": ["blob-store", "kafka-changelog"]}, [BLOB_CLASS, CHANGELOG_CLASS]),
        ({"stores.a.changelog": "kafka.totals"}, {"stores.a.changelog.topic": "totals"}, ["stores.a.changelog"]),
        ({"stores.a.factory": list(SAMZA_CLASSES)[3]}, {"stores.a.type": "memory"},
         ["stores.a.factory", list(SAMZA_CLASSES)[3]]),
        ({"task.restore.factories": "blob-store"}, {"task.restore.factories": ["blob-store"]}, []),
    ],
)  # fmt: skip
def test_names_of_samza_are_replaced_with_one_line_each(
    written: dict[str, object], ours: dict[str, object], names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A configuration with Samza's names equals one with statemgr's names, and the log gives the names to use."""
    config = JobConfig.from_mapping({"job.name": "orders", **written, **BLOBS})
    assert config.values == {"job.name": "orders", **ours, **BLOBS}
    assert [message.partition(" ")[0] for message in caplog.messages] == names
    assert all("is Samza's name for" in message for message in caplog.messages)
    for key in written:
        if isinstance(written[key], str):
            assert config.get(key) is not None
    caplog.clear()
    assert JobConfig.from_mapping(config.to_mapping()) == config
    assert caplog.messages == []


def test_every_name_of_samza_is_documented() -> None:
    """The page lists every replaced key and class with its new name."""
    page = PAGE.read_text(encoding="utf-8")
    for theirs, ours in {**SAMZA_KEYS, **SAMZA_CLASSES}.items():
        assert f"| `{theirs}` | `{ours}` |" in page


def test_defaults_of_samzas_stores_do_not_declare_a_store() -> None:
    """In Samza, `stores.default.…` sets defaults. It must not declare a store with that name."""
    assert refusal({"stores.default.changelog.min.compaction.lag.ms": 1}).where["key"] == "stores.default"


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("task.backup.factorys", "task.backup.factories"),
        ("job.nmae", "job.name"),
        ("stores.totals.tpe", "stores.totals.type"),
        ("stores.totals.rocksdb.compresion", "stores.totals.rocksdb.compression"),
        ("blob.store.url", "blob.store.uri"),
        ("task.restore.factory", "task.restore.factories"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(key: str, nearest: str) -> None:
    """The error names the key and the most likely correction."""
    error = refusal({key: "x"})
    assert key in error.message
    assert error.hint == f"did you mean {nearest}?"
    assert error.where["key"] == key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("job.name", "../etc"),
        ("job.name", ""),
        ("job.tasks", 0),
        ("job.tasks", "four"),
        ("job.tasks", True),
        ("job.tasks", 2.5),
        ("task.checkpoint.topic", "a b"),
        ("task.checkpoint.read.versions", [3]),
        ("task.checkpoint.read.versions", []),
        ("task.checkpoint.retained", 0),
        ("task.commit.timeout.ms", 900_001),
        ("stores.totals.type", "redis"),
        ("stores.totals.key.serde", "pickle"),
        ("stores.totals.key.serde", "avro"),
        ("stores.totals.value.avro.schemas", []),
        ("stores.totals.value.avro.schemas", ["no JSON"]),
        ("stores.totals.value.avro.schemas", ['{"type": "recrod"}']),
        ("stores.totals.write.batch.size", 0),
        ("state.memory.bytes", 1024),
        ("stores.totals.rocksdb.compaction.style", "fifo"),
        ("stores.totals.rocksdb.num.write.buffers", -1),
        ("blob.store.uri", "ftp://host/x"),
        ("blob.store.uri", "file://relative/x"),
        ("blob.store.uri", "s3://key:secret@bucket/x"),
        ("blob.store.uri", "az://container/a/../b"),
        ("blob.store.uri", "abfss://container@account.dfs.core.windows.net/a/%2e/b"),
        ("blob.store.s3.endpoint", "localhost:9000"),
        ("blob.store.s3.path.style", "maybe"),
        ("blob.store.retry.policy.jitter.factor", 2),
        ("blob.store.retry.policy.jitter.factor", "nan"),
        ("task.inputs", "a,a"),
        ("task.shutdown.ms", "1 ms"),
        ("metrics.port", 70_000),
    ],
)
def test_a_bad_value_names_the_key_and_what_is_expected(key: str, value: object) -> None:
    """The error appears when the configuration is loaded, and starts with the key."""
    error = refusal({key: value})
    assert error.message.startswith(f"{key} must be ")
    assert error.where["key"] == key


@pytest.mark.parametrize(
    ("mapping", "key"),
    [
        ({"task.backup.factories": "blob-stor"}, "task.backup.factories"),
        ({"stores.a.restore.factories": "kafka"}, "stores.a.restore.factories"),
        ({"stores.a.backup.factories": "blob-store"}, "blob.store.uri"),
        ({"stores.a.restore.factories": "kafka-changelog,blob-store"}, "blob.store.uri"),
        ({"stores.a.backup.factories": [], "stores.a.restore.factories": "kafka-changelog"},
         "stores.a.restore.factories"),
        ({"stores.a.restore.factories": []}, "stores.a.restore.factories"),
        ({"task.checkpoint.write.versions": [1, 2], "stores.a.backup.factories": "blob-store", **BLOBS},
         "task.checkpoint.write.versions"),
        ({"task.checkpoint.write.versions": [1]}, "task.checkpoint.write.versions"),
        ({"task.checkpoint.write.versions": [1, 2], "task.checkpoint.read.versions": [2]},
         "task.checkpoint.read.versions"),
        ({"stores.a.changelog.topic": "t", "stores.b.changelog.topic": "t"}, "stores.b.changelog.topic"),
        ({"stores.a.changelog.topic": "__statemgr_checkpoints_orders-1"}, "stores.a.changelog.topic"),
        ({"task.inputs": "t", "stores.a.changelog.topic": "t"}, "task.inputs"),
        ({"stores.a.changelog": "t", "stores.a.changelog.topic": "u"}, "stores.a.changelog.topic"),
        ({"stores.a.value.serde": "avro"}, "stores.a.value.avro.schemas"),
        ({"stores.totals.type": "memory", "stores.Totals.type": "memory"}, "stores.totals"),
        ({"stores.published.type": "memory"}, "stores.published"),
        ({"stores.a.value.avro.schemas": ['"long"']}, "stores.a.value.avro.schemas"),
        ({"state.memory.bytes": 16 << 20, "stores.a.rocksdb.write.buffer.size.bytes": (8 << 20) + 1},
         "stores.a.rocksdb.write.buffer.size.bytes"),
        ({"task.shutdown.ms": "6 min"}, "task.shutdown.ms"),
        ({"task.shutdown.ms": 7000, "kafka.consumer.max.poll.interval.ms": "6000"}, "task.shutdown.ms"),
        ({"job": {"tasks": 2}, "job.tasks": 2}, "job.tasks"),
        ({"kafka.transactional.id": "x"}, "kafka.transactional.id"),
        ({"kafka.delivery.report.only.error": True}, "kafka.delivery.report.only.error"),
        ({"kafka.producer.acks": 1}, "kafka.producer.acks"),
        ({"kafka.consumer.isolation.level": "read_uncommitted"}, "kafka.consumer.isolation.level"),
        ({"kafka.consumer.auto.offset.reset": "earliest"}, "kafka.consumer.auto.offset.reset"),
        ({"kafka.auto.offset.reset": "latest"}, "kafka.auto.offset.reset"),
    ],
)  # fmt: skip
def test_a_contradiction_names_the_key_to_change(mapping: dict[str, object], key: str) -> None:
    """A42: contradictions, including those between version settings, are found before a job starts."""
    assert refusal(mapping).where["key"] == key


def test_schemas_of_values(tmp_path: Path) -> None:
    """Schemas may be texts, tables, one JSON array, or a file with an array, which is read when it is needed."""
    first, second = '"int"', '{"type":"array","items":"long"}'
    path = tmp_path / "total.avsc.json"
    for given in (
        [first, second],
        [first, {"type": "array", "items": "long"}],
        f"[{first}, {second}]",
        f"${{file:{path}}}",
    ):
        config = load(stores__a__value__serde="avro", stores__a__value__avro__schemas=given)
        again = JobConfig.from_mapping(json.loads(json.dumps(config.to_mapping())))
        assert again == config
        path.write_text(f"[{first}, {second}]\n")
        assert again.stores["a"].avro_schemas == [first, second]
        path.write_text("{")
    with pytest.raises(ConfigError, match=r"stores\.a\.value\.avro\.schemas must be a list of Avro schemas"):
        _ = config.stores["a"].avro_schemas


@pytest.mark.parametrize("form", ["text", "table"])
def test_the_text_in_a_schema_is_no_reference(form: str) -> None:
    """A schema in a list may have any ``doc``, also when the configuration is loaded again, as by Spark."""
    schema = {"type": "enum", "name": "E", "doc": "costs ${secret:AMOUNT} or ${env:X}", "symbols": ["A"]}
    given = json.dumps(schema) if form == "text" else schema
    config = load(stores__a__value__serde="avro", stores__a__value__avro__schemas=[given])
    again = JobConfig.from_mapping(json.loads(json.dumps(config.to_mapping())))
    assert [json.loads(text) for text in again.stores["a"].avro_schemas] == [schema]


_DURATIONS = [entry.pattern.replace("<name>", "a") for entry in KEYS if re.search(r"(ms|millis|days)\Z", entry.pattern)]


@pytest.mark.parametrize("key", _DURATIONS)
def test_every_duration_takes_the_same_forms(key: str) -> None:
    """A number in the unit of the key and a text with any unit mean the same. The error of any other text names the
    units."""
    if key == "task.commit.timeout.ms":
        forms: list[object] = [900_000, "900_000", "900s", "15 min", "0.25 h", "15 Minutes", "900000 ms"]
    elif key.endswith(".days"):
        forms = [1, "1", "1 day", "1d", "24 h", "1440 min", "86400 s"]
    else:
        forms = [86_400_000, "86400000", "1 day", "1.0 days", "24h", "1440 minutes", "86400 sec"]
    assert {load(**{"kafka.max.poll.interval.ms": 86_400_000, key: form}).get(key) for form in forms} == {forms[0]}
    for wrong in ("1 dya", "1.5 ms", "day", "-1 s", "1 day 2 h", "", True, 1.5, "99999999999999999999 days"):
        assert "with a unit (ms, s, min, h, days) or as a number of" in refusal({key: wrong}).message


def test_memory_of_a_memory_store_is_not_rocksdbs() -> None:
    """A memory store has no memtables, so a small budget is no contradiction."""
    config = load(stores__a__type="memory", state__memory__bytes="8388608")
    assert config.memory_bytes == 8 << 20


def test_a_backend_from_outside_is_named_by_a_dotted_path() -> None:
    """A dotted path is accepted wherever a factory's name is."""
    config = load(stores__a__backup__factories="my.module:Backend")
    assert config.stores["a"].backup_factories == ("my.module:Backend",)


def test_a_job_needs_a_name() -> None:
    """`job.name` is the only required key."""
    with pytest.raises(ConfigError, match=r"job\.name is not set"):
        JobConfig.from_mapping({"job.id": "1"})


@pytest.mark.parametrize("content", [b"job.name = orders", b"\xff\xfe", None])
def test_a_file_that_is_no_configuration_is_one_clear_error(tmp_path: Path, content: bytes | None) -> None:
    """A file that is not TOML, not UTF-8 or missing gives an error that names it."""
    path = tmp_path / "job.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"job\.toml"):
        JobConfig.from_file(path)


def test_a_store_name_has_no_dots() -> None:
    """A mistyped key is never taken for another store."""
    assert "unknown configuration key" in refusal({"stores.totals.rocksdb.bogus.type": "memory"}).message


# --- Kafka's clients --------------------------------------------------------------------------------------


def test_each_client_gets_the_shared_settings_and_its_own() -> None:
    """A client's own settings override the shared ones and do not reach other clients."""
    config = load(
        kafka__bootstrap__servers=["a:1", "b:2"],
        kafka__client__id="shared",
        kafka__producer__client__id="mine",
        kafka__producer__linger__ms=5,
    )
    assert config.kafka_client("producer") == {
        "bootstrap.servers": "a:1,b:2",
        "client.id": "mine",
        "linger.ms": 5,
    }
    assert config.kafka_client("admin") == {"bootstrap.servers": "a:1,b:2", "client.id": "shared"}


@pytest.mark.parametrize("value", [2e6, "abc", "", True])
@pytest.mark.parametrize("key", ["kafka.message.max.bytes", "kafka.producer.message.max.bytes"])
def test_the_size_of_records_is_a_whole_number(key: str, value: object) -> None:
    """Another value raises an error that names the key."""
    config = JobConfig.from_mapping({"job.name": "orders", key: value})
    with pytest.raises(ConfigError, match=f"{key} must be a whole number of bytes") as caught:
        _ = config.most_record_bytes
    assert caught.value.where["key"] == key


def test_a_client_without_brokers_is_a_clear_error() -> None:
    """Only clients need `kafka.bootstrap.servers`, so its absence is an error when one is configured."""
    with pytest.raises(ConfigError, match=r"kafka\.bootstrap\.servers"):
        load().kafka_client("admin")


# --- the table --------------------------------------------------------------------------------------------


def test_the_documented_table_is_the_table_of_keys() -> None:
    """The page equals the output of `python scripts/config_table.py docs/configuration.md`."""
    page = PAGE.read_text(encoding="utf-8")
    assert runpy.run_path(str(PAGE.parents[1] / "scripts" / "config_table.py"))["with_table"](page) == page


def test_every_default_is_a_value_that_the_key_accepts() -> None:
    """The table never names a default that loading would refuse."""
    for entry in KEYS:
        if entry.default is not None:
            assert entry.kind.parse(entry.default) == entry.default, entry.pattern


def test_no_key_is_a_prefix_of_another() -> None:
    """Every key except one of Samza's can be written in nested tables."""
    patterns = [entry.pattern for entry in KEYS if not entry.pattern.endswith("*")] + list(SAMZA_KEYS)
    clashes = [a for a in patterns for b in patterns if b.startswith(a + ".")]
    assert set(clashes) == {"stores.<name>.changelog"}


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"blob.store.s3.sse.algorithm": "AES128"}, "AES256"),
        ({"blob.store.s3.sse.kms.key.id": "k"}, "would not be used"),
        ({"blob.store.s3.sse.algorithm": "AES256", "blob.store.s3.sse.kms.key.id": "k"}, "would not be used"),
        ({"blob.store.s3.sse.algorithm": "aws:kms", "blob.store.uri": "file:///blobs"}, "nothing would be encrypted"),
    ],
)
def test_encryption_that_would_not_happen_is_refused(settings: dict[str, object], word: str) -> None:
    """Settings that would not encrypt anything are refused at load time."""
    with pytest.raises(ConfigError, match=word) as caught:
        JobConfig.from_mapping({"job.name": "orders", "blob.store.uri": "s3://bucket/prefix"} | settings)
    assert "sse" in str(caught.value.where["key"])


@pytest.mark.parametrize("uri", ["s3://bucket/prefix", "${env:BLOBS}"])
def test_encryption_settings_that_fit(uri: str) -> None:
    """A KMS key is accepted with a KMS algorithm, in S3 or if a reference may lead there."""
    settings = {"blob.store.s3.sse.algorithm": "aws:kms", "blob.store.s3.sse.kms.key.id": "k", "blob.store.uri": uri}
    assert JobConfig.from_mapping({"job.name": "orders"} | settings).get("blob.store.s3.sse.algorithm") == "aws:kms"


HUGE = "9" * 5000


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("state.dir", "/a\0b"), ("state.dir", "\ud800"), ("blob.store.uri", "s3://b/\0"), ("kafka.client.id", "\0"),
        ("kafka.client.id", "\udfff"), ("kafka.linger.ms", 1 << 64), ("kafka.linger.ms", float("nan")),
        ("job.tasks", HUGE), ("job.tasks", 10**5000), ("job.tasks", "1e5"), ("blob.store.ttl.days", float("inf")),
        ("blob.store.retry.policy.jitter.factor", 10**400), ("blob.store.retry.policy.jitter.factor", HUGE),
        ("blob.store.s3.endpoint", "http://host:99999"), ("blob.store.s3.endpoint", "http://[::1"),
        ("stores.a.value.avro.schemas", "[" * 100_000), ("task.commit.snapshot.interval", f"{HUGE} commits"),
        ("task.inputs", ["a\0"]), ("stores.a.backup.factories", ["\0"]),
    ],
    ids=lambda _: "odd",
)  # fmt: skip
def test_odd_values_are_configuration_errors(key: str, value: object) -> None:
    """NUL, unpaired surrogates, overflow and deep nesting raise a short ConfigError that names the key."""
    with pytest.raises(ConfigError) as caught:
        JobConfig.from_mapping({"job.name": "orders", key: value})
    assert caught.value.where["key"] == key
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "text",
    ["a = " + "[" * 100_000, "a = " + "9" * 5000, "a.b" * 5000 + " = 1", "a = 1e999999", "\0", 'a = "\\ud800"',
     ".".join("a" * 5000) + " = 1", "[" + ".".join("a" * 5000) + "]", "a = {" + "a = {" * 5000, "d = 0000-00-00"],
    ids=lambda _: "odd",
)  # fmt: skip
def test_odd_toml_is_a_configuration_error(text: str, tmp_path: Path) -> None:
    """TOML that exceeds the parser's limits raises ConfigError and not the parser's own exception."""
    (tmp_path / "job.toml").write_text('"job.name" = "orders"\n' + text)
    with pytest.raises(ConfigError):
        JobConfig.from_file(tmp_path / "job.toml")


@pytest.mark.parametrize("path", ["a\0b", "\ud800"], ids=["NUL", "surrogate"])
def test_odd_names_of_files_are_configuration_errors(path: str, tmp_path: Path) -> None:
    """An impossible file name raises ConfigError, both for the configuration itself and in a reference."""
    with pytest.raises(ConfigError):
        JobConfig.from_file(path)
    config = JobConfig.from_mapping({"job.name": "orders", "state.dir": "${file:" + str(tmp_path / "x") + "\x01}"})
    with pytest.raises(ConfigError):
        assert config.state_dir
