"""Formats of other stream processors: names of topics, and records, as their sources describe them.

the other tests of this folder read what the real processors write.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import pytest

from statemgr.errors import CorruptBlob, CorruptRecord, InvalidError
from statemgr.model.expiry import expiry_bytes
from statemgr.operations.adopt.changelogs import tail_notes
from statemgr.operations.adopt.copying import Counts
from statemgr.operations.adopt.found import OldInput, OldJob, OldPartition, OldStore, Proof
from statemgr.operations.adopt.old_topics import Bounds
from statemgr.operations.adopt.origins import (
    ORIGINS,
    CheckpointingOrigin,
    Decoder,
    OldCheckpoints,
    OldRecord,
    Place,
    Skip,
    Unproved,
)
from statemgr.operations.adopt.origins.samza_snapshot import decode_snapshot
from statemgr.operations.adopt.snapshots import place_of
from statemgr.ports import TopicInfo

Headers = list[tuple[str, bytes]]
QUIX, STREAMS, RAW, SAMZA = (ORIGINS[name] for name in ("quix", "kafka-streams", "raw", "samza"))


def record(value: bytes | None, **headers: bytes | None) -> OldRecord:
    """Return a record with some of Quix Streams' headers."""
    names = {"family": "__column_family__", "processed": "__processed_tp_offsets__", "stamped": "__ttl_stamped__"}
    return OldRecord(b"key", value, [(names[name], given) for name, given in headers.items()], 7)


def quix(committed: Mapping[str, int]) -> Decoder:
    """Return the decoder of a plain store of Quix Streams."""
    decoder = QUIX.kinds["plain"].decoder
    assert decoder is not None
    return decoder(committed)


@pytest.mark.parametrize(
    ("topic", "store"),
    [
        ("changelog__group--orders--default", "orders"),
        ("changelog__group--orders--totals", "totals"),
        ("changelog__group--orders.eu--default", "orders.eu"),
        ("changelog__group--orders--", None),
        ("changelog__group-2--orders--default", None),
        ("repartition__group--orders--by-key", None),
    ],
)
def test_names_of_quix_streams(topic: str, store: str | None) -> None:
    """The consumer group must match completely. The default store has the name of its stream."""
    assert QUIX.store(topic, "group") == store
    assert QUIX.is_internal(topic, "group") == topic.startswith("repartition")


def test_values_of_quix_streams_lose_their_expiry() -> None:
    """Each record's header says whether its value starts with an expiry time. A delete has none."""
    decode = quix({})
    stamped = struct.pack(">Q", 2**64 - 1) + b"value"
    assert decode(record(stamped, family=b"default", stamped=b"\x01")) == (b"key", b"value")
    assert decode(record(stamped, family=b"default")) == (b"key", stamped)
    assert decode(record(None, family=b"default", stamped=b"\x01")) == (b"key", None)
    assert decode(record(b"\0\0\0\2", family=b"__ttl_system__")) is Skip.BOOKKEEPING
    with pytest.raises(InvalidError, match="too short"):
        decode(record(b"1234567", family=b"default", stamped=b"\x01"))


def test_uncommitted_changes_of_quix_streams() -> None:
    """A change counts if the offsets of all its input topics are committed. Older versions wrote no offsets."""
    decode = quix({"a": 10, "b": 5})
    for processed, counts in [
        ({"a": 9}, True),
        ({"a": 10}, False),
        ({"a": 9, "b": 4}, True),
        ({"a": 9, "b": 5}, False),
        ({"a": 10, "unknown": 0}, False),
        (None, True),
        ({}, True),
    ]:
        header = json.dumps(processed).encode()
        made = decode(record(b"v", family=b"default", processed=header))
        assert made == ((b"key", b"v") if counts else Skip.UNCOMMITTED)
        assert isinstance(made, Unproved) is (processed is None)
    assert isinstance(decode(record(b"v", family=b"default")), Unproved)
    with pytest.raises(InvalidError, match="made from unknown, and the old job has no offset") as raised:
        decode(record(b"v", family=b"default", processed=b'{"a": 9, "unknown": 0}'))
    assert "--offset unknown-PARTITION=" in str(raised.value.hint)
    for wrong in (b"no json", b"[1]", b'{"a": "x"}', b'{"a": null}'):
        with pytest.raises(InvalidError, match="not a JSON object of offsets"):
            decode(record(b"v", family=b"default", processed=wrong))


def test_records_of_quix_streams_that_do_not_say_their_input() -> None:
    """They are adopted and counted, and the input after the offsets may count twice."""
    counts = Counts()
    of = [record(b"v", family=b"default"), record(b"v", family=b"default", processed=b'{"a": 9}')]
    assert [change for _, change in counts.take(of, quix({"a": 10}))] == [(b"key", b"v")] * 2
    assert (counts.records, counts.unproved, counts.converted) == (2, 1, 0)
    partition = OldPartition(0, Bounds(0, 2, 2), 2)
    inputs = {"a-0": OldInput("a-0", 10, 14)}
    for counted, doubled in ((counts, 4), (Counts(), 0)):
        store = OldStore("counts", TopicInfo("log", "", 1), (partition,), (counted,))
        assert OldJob(QUIX, "job", 1, {"counts": store}, inputs, {}, {}).doubled_at_most == doubled


def test_other_records_than_those_of_quix_streams() -> None:
    """A record of windows or without a column family is refused."""
    decode = quix({})
    with pytest.raises(InvalidError, match="__latest-timestamps__"):
        decode(record(b"v", family=b"__latest-timestamps__"))
    with pytest.raises(InvalidError, match="not one of Quix Streams"):
        decode(record(b"v"))


@pytest.mark.parametrize(
    ("topic", "store"),
    [
        ("app-totals-changelog", "totals"),
        ("app-KSTREAM-AGGREGATE-STATE-STORE-0000000003-changelog", "KSTREAM-AGGREGATE-STATE-STORE-0000000003"),
        ("app-changelog", None),
        ("other-totals-changelog", None),
        ("app-by-key-repartition", None),
    ],
)
def test_names_of_kafka_streams(topic: str, store: str | None) -> None:
    """A changelog is called ``<application.id>-<store>-changelog``."""
    assert STREAMS.store(topic, "app") == store
    assert STREAMS.is_internal(topic, "app") == topic.endswith("-repartition")


@pytest.mark.parametrize(
    ("store", "settings", "own", "kinds", "certain"),
    [
        ("totals", {"min.compaction.lag.ms": "0"}, {"cleanup.policy": "compact"}, None, False),
        ("totals", {"min.compaction.lag.ms": "14400000"}, {}, None, False),
        ("totals", {"cleanup.policy": "compact,delete"}, {}, ["windows", "sessions"], True),
        ("totals", {"min.compaction.lag.ms": "86400000"}, {}, ["versioned"], False),
        ("totals", {}, {"min.compaction.lag.ms": "0"}, ["versioned"], False),
        ("totals", {}, {"retention.ms": "86460000"}, ["windows", "sessions"], False),
        ("KTABLE-SUPPRESS-STATE-STORE-0000000005", {}, {}, ["suppressed"], True),
        ("KSTREAM-OUTERSHARED-0000000004-store", {}, {}, ["unmatched"], True),
        ("KTABLE-FK-JOIN-SUBSCRIPTION-STATE-STORE-0000000010", {}, {}, ["subscriptions"], True),
        ("fk-subscription-store", {}, {}, ["subscriptions"], False),
        ("both-left-shared-join-store", {}, {}, ["unmatched"], False),
    ],
)
def test_names_and_settings_of_kafka_streams(
    store: str, settings: dict[str, str], own: dict[str, str], kinds: list[str] | None, certain: bool
) -> None:
    """A topic's settings and name show the kind of its store. Those that users choose are no proof."""
    hint = STREAMS.hint(f"app-{store}-changelog", {"cleanup.policy": "compact", **settings}, own)
    assert (hint and (list(hint.kinds), hint.certain)) == (None if kinds is None else (kinds, certain))
    assert kinds is None or set(kinds) <= STREAMS.kinds.keys()
    source = STREAMS.hint("names", {"cleanup.policy": "compact"}, own)
    assert source is None, "the source topic of a table"


NOW = (1_795_580_512_272).to_bytes(8, "big")
#: A buffered value as Kafka Streams 4.3.1 writes it: its context, its values and its time.
BUFFERED = NOW + bytes(7) + b"h" + b"\0\0\0\2sh" + bytes(8) + b"\xff" * 8 + b"\0\0\0\1x" + NOW


@pytest.mark.parametrize(
    ("key", "value", "headers", "kind"),
    [
        (b"k4" + NOW + bytes(4), b"5", [], "windows"),
        (b"k4" + NOW + b"\0\0\1\2", b"5", [], "windows"),
        (b"user" + NOW + NOW, b"5", [], "sessions"),
        (b"k30", BUFFERED, [("v", b"\3")], "suppressed"),
        (b"\0\0\0\3k33l23", b"\1\3" + b"h" * 16 + b"l23" + bytes(4), [], "subscriptions"),
        (NOW + b"\1k4", b"\1\0\0\0\1", [], "unmatched"),
        (b"key-4", b"5", [], None),
        (b"user-2026-11-25", b"5", [("v", b"\0"), ("c", b"position")], None),
        ((17).to_bytes(8, "big"), bytes(8), [], None),
        ((17).to_bytes(4, "big"), bytes(8), [], None),
        (bytes(4), bytes(8), [], None),
        (b"", b"", [], None),
    ],
)
def test_records_that_are_not_plain(key: bytes, value: bytes, headers: Headers, kind: str | None) -> None:
    """A record shows by its form which kinds of stores it can be of."""
    of = OldRecord(key, value, headers, 7)
    assert [one.name for one in STREAMS.kinds.values() if one.looks and one.looks(of)] == ([kind] if kind else [])
    suppressed = STREAMS.kinds["suppressed"].looks
    assert suppressed is not None
    assert not suppressed(OldRecord(key, None, (), 7))


def test_names_of_topics_that_another_job_may_have() -> None:
    """Names of jobs and of stores may have the same separators, so a topic's name does not always show its job."""
    assert STREAMS.other_jobs("kk-eu-west-totals-changelog", "kk") == ["kk-eu", "kk-eu-west"]
    assert STREAMS.other_jobs("kk-totals-changelog", "kk") == []
    assert QUIX.other_jobs("changelog__qq--eu--rows--default", "qq") == ["qq--eu"]
    assert QUIX.other_jobs("changelog__qq--rows--default", "qq") == []


def test_changelogs_must_keep_their_keys() -> None:
    """A topic whose keys Kafka deletes by age or size is only the changelog of a kind whose entries expire."""
    for origin in ORIGINS.values():
        for topic in ("topic", "changelog__group--rows--default", "app-totals-changelog"):
            hint = origin.hint(topic, {"cleanup.policy": "compact,delete"}, {})
            assert hint is not None
            assert hint.certain
            assert "compact,delete" in hint.why
            assert all(origin.kinds[kind].time_ms is not None for kind in hint.kinds), "they are not kept for ever"
            assert origin.hint(topic, {"cleanup.policy": "compact"}, {}) is None
    assert RAW.store("topic", "job") is None


def key_of(task: str, kind: str = "checkpoint-v2") -> bytes:
    """Return the key of a checkpoint of Samza."""
    return json.dumps({"systemstreampartition-grouper-factory": "G", "taskName": task, "type": kind}).encode()


def samza(*checkpoints: tuple[int, int, object]) -> OldCheckpoints:
    """Return the checkpoints of a topic with these records: version, task and content."""
    assert isinstance(SAMZA, CheckpointingOrigin)
    records = []
    for offset, (version, task, content) in enumerate(checkpoints):
        kind = {1: "checkpoint", 2: "checkpoint-v2"}.get(version, "changelog-partition-mapping")
        records.append(OldRecord(key_of(f"Partition {task}", kind), json.dumps(content).encode(), (), offset))
    return SAMZA.checkpoints(records)


def version_1(offset: int, changelog: str = "1700000000000-5:9") -> object:
    """Return a checkpoint of task 0 whose last processed record has this offset."""
    of = {"system": "kafka", "partition": "0"}
    return {"a": {**of, "stream": "rows", "offset": str(offset)}, "b": {**of, "stream": "log", "offset": changelog}}


def version_2(
    offset: int, newest: str | None = "9", backend: str = "KafkaChangelogStateBackendFactory", version: int = 1
) -> dict[str, object]:
    """Return the same checkpoint in version 2."""
    marker = {"version": version, "changelog-ssp": {"stream": "log", "partition": 0}, "changelog-offset": newest}
    return {
        "checkpoint-id": "1700000000000-5",
        "input-offsets": {"kafka.rows.eu.0": str(offset), "kafka.unread.0": None},
        "state-checkpoint-markers": {f"org.apache.samza.storage.{backend}": {"counts": json.dumps(marker)}},
    }


def test_checkpoints_of_samza() -> None:
    """Offsets and markers name the last record, so reading continues at the next one. Topic names may have dots."""
    found = samza((2, 0, version_2(1)), (3, 0, "?"), (2, 0, version_2(7)))
    assert (found.tasks, found.offsets, found.made_ms) == (1, {"rows.eu-0": 8}, (1_700_000_000_000,))
    assert found.places == {("counts", 0): Place("log", 0, 10)}
    assert samza((2, 0, version_2(1, None))).places == {("counts", 0): Place("log", 0, 0)}
    early = OldRecord(
        key_of("Partition 0", "checkpoint-v2"), json.dumps(version_2(7)).encode(), (), 0, 1_600_000_000_000
    )
    assert isinstance(SAMZA, CheckpointingOrigin)
    assert SAMZA.checkpoints([early]).made_ms == (1_600_000_000_000,), "the clock of the old job was ahead"
    one = samza((1, 0, version_1(7)))
    assert (one.offsets, one.places, one.topics) == ({"rows-0": 8}, {}, ["log"])
    assert one.by_topic == {("log", 0): Place("log", 0, 10)}
    assert samza((1, 0, version_1(7, "1-5:null"))).by_topic == {("log", 0): Place("log", 0, 0)}


def test_the_newer_version_of_checkpoints_of_samza_counts() -> None:
    """Version 2 of the same commit counts. If version 1 is later, it counts instead."""
    content = version_2(7)
    assert isinstance(content, dict)
    content["input-offsets"] = {"kafka.rows.0": "7"}
    assert samza((1, 0, version_1(7)), (2, 0, content)).changelogs == {"counts": "log"}
    assert samza((2, 0, content), (1, 0, version_1(7))).changelogs == {"counts": "log"}
    assert samza((2, 0, content), (1, 0, version_1(8))).offsets == {"rows-0": 9}
    assert samza((1, 0, version_1(6)), (2, 0, content)).offsets == {"rows-0": 8}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (version_2(1, backend="MyFactory"), "a backend of its own"),
        ({**version_2(1), "input-offsets": {"kafka.rows.3": "1"}}, "reads partition 3 of rows"),
        ({**version_2(1), "input-offsets": {"hdfs.rows.0": "a:1"}}, "not one of Kafka"),
        ({**version_2(1), "input-offsets": {"a.rows.0": "1", "b.rows.0": "2"}}, "two systems"),
    ],
)
def test_jobs_of_samza_that_are_refused(content: object, said: str) -> None:
    """A checkpoint that the new job could not continue is refused."""
    with pytest.raises(InvalidError, match=said):
        samza((2, 0, content))


def test_versions_of_samza_that_are_unknown() -> None:
    """A newer version of a checkpoint or of a marker in it is refused by name, and not left out."""
    newer = OldRecord(key_of("Partition 0", "checkpoint-v3"), b"{}", (), 0)
    assert isinstance(SAMZA, CheckpointingOrigin)
    with pytest.raises(InvalidError, match="an unknown version, 'checkpoint-v3'"):
        SAMZA.checkpoints([newer])
    with pytest.raises(InvalidError, match="marker of version 2"):
        samza((2, 0, version_2(1, version=2)))


def test_groupers_of_samza() -> None:
    """A task of each partition is a task of the partition's number, if there is one topic."""
    assert isinstance(SAMZA, CheckpointingOrigin)
    content = [json.dumps(version_2(1) | {"input-offsets": {f"kafka.rows.{n}": "4"}}).encode() for n in (0, 1)]
    records = [
        OldRecord(key_of(f"SystemStreamPartition [kafka, rows, {n}]"), of, (), n) for n, of in enumerate(content)
    ]
    assert SAMZA.checkpoints(records).offsets == {"rows-0": 5, "rows-1": 5}
    for name in ("SystemStreamPartition [kafka, others, 1]", "Partition 1"):
        with pytest.raises(InvalidError, match="several groupers, or of one that makes a task of each"):
            SAMZA.checkpoints([*records, OldRecord(key_of(name), content[1], (), 2)])


@pytest.mark.parametrize(("offset", "said"), [(9, False), (10, True)])
def test_changes_after_a_checkpoint_that_no_input_makes_again(offset: int, said: bool) -> None:
    """E2: Samza was seen to write a checkpoint with the newest input offset and an older end of a changelog. Changes
    that are left out, although no input can make them again, are said to be so."""
    store = OldStore("counts", TopicInfo("t", "id", 1, {}), (OldPartition(0, Bounds(0, 7, 7), 0, is_exact=True),))
    inputs = {"in-0": OldInput("in-0", offset, 10)}
    notes = "\n".join(tail_notes(OldJob(SAMZA, "job", 1, {"counts": store}, inputs, {"in": "id"}, {"in-0": offset})))
    assert "7 records after the old job's checkpoints were not committed" in notes
    assert ("Partition 0 has such records, but no input" in notes) is said


def test_no_input_is_less_than_nothing_behind() -> None:
    """The old job has read rows of a transaction that is still open. They take nothing from the others."""
    inputs = {"in-0": OldInput("in-0", 9, 5), "in-1": OldInput("in-1", 0, 3)}
    found = OldJob(SAMZA, "job", 2, {}, inputs, {}, {})
    assert (found.behind, found.behind_in(0), found.behind_in(1)) == (3, 0, 3)


def test_entries_of_samza_that_expire() -> None:
    """Their time is that of the record, and their time to live that of the new store. A delete stays one."""
    store = OldStore("counts", TopicInfo("log", "", 1), (), proof=Proof(SAMZA.kinds["ttl"], newest_ms=(None,)))
    found = OldJob(SAMZA, "job", 1, {"counts": store}, {}, {}, {}, ttls={"counts": 1000}, seen_ms=5000)
    decode = found.decoder(store, 0)
    assert decode is not None
    made = [decode(OldRecord(b"k", value, (), 0, ms)) for value, ms in ((b"v", 4001), (b"v", 4000), (None, 1))]
    assert made == [(b"k", expiry_bytes(5001) + b"v"), Skip.EXPIRED, (b"k", None)]


def test_broken_checkpoints_of_samza() -> None:
    """The error names the record."""
    with pytest.raises(CorruptRecord, match="not a checkpoint of Samza") as raised:
        samza((2, 0, version_2(1)), (2, 0, [1]))
    assert raised.value.where["offset"] == 1


def test_names_of_samza() -> None:
    """Underscores become hyphens in the checkpoint topic. An operator's internal streams are not input."""
    assert isinstance(SAMZA, CheckpointingOrigin)
    assert SAMZA.checkpoint_topic("my_job") == "__samza_checkpoint_ver_1_for_my-job_1"
    assert SAMZA.is_internal("my_job-1-partition_by-keyed", "my_job")
    assert not SAMZA.is_internal("my_job-rows", "my_job")
    hint = SAMZA.hint("log", {"cleanup.policy": "delete"}, {})
    assert hint is not None
    assert "rocksdb.ttl.ms" in hint.why
    assert (list(hint.kinds), hint.certain) == (["ttl"], True)


def index_of(**changes: object) -> bytes:
    """Return an index blob with one file of two blobs, and an OPTIONS file unless ``options`` gives another name."""
    options = {"file-name": changes.pop("options", "OPTIONS-000007"), "blobs": [], "file-metadata": {"size": 0}}
    file: dict[str, object] = {
        "file-name": "CURRENT",
        "blobs": [{"blob-id": "b", "offset": 4}, {"blob-id": "a", "offset": 0}],
        "file-metadata": {"size": 10},
        "checksum": 7,
    } | changes
    owner = {"task-name": "Partition 0", "store-name": "counts"}
    return json.dumps(
        {
            "snapshot-metadata": owner,
            "dir-index": {"files-present": [file, {**options, "checksum": 0}], "sub-dirs-present": []},
        }
    ).encode()


def test_an_index_of_samza() -> None:
    """The parts of a file are in order, and an empty file has none."""
    file, _ = decode_snapshot(index_of(), "index", task=0, store="counts").files
    assert (file.size, file.crc, file.parts()) == (10, 7, [("a", 0, 4), ("b", 4, 6)])
    empty = index_of(**{"blobs": [], "file-metadata": {"size": 0}})
    assert decode_snapshot(empty, "index", task=0, store="counts").files[0].parts() == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"file-name": "../x"}, "separator"),
        ({"file-name": "/etc/passwd"}, "separator"),
        ({"file-metadata": {"size": 1 << 50}}, "absurd"),
        ({"file-metadata": {"size": -1}}, "absurd"),
        ({"checksum": -1}, "absurd"),
        ({"blobs": []}, "do not make up"),
        ({"blobs": [{"blob-id": "a", "offset": 1}]}, "do not make up"),
        ({"blobs": [{"blob-id": "a", "offset": 0}, {"blob-id": "b", "offset": 0}]}, "do not make up"),
        ({"file-metadata": None}, "another format"),
        ({"blobs": [{"blob-id": "a", "offset": float("inf")}]}, "another format"),
        ({"checksum": float("inf")}, "another format"),
        ({"file-name": "000008.sst"}, "has no file CURRENT"),
        ({"options": "000007.log"}, "has no OPTIONS file"),
        ({"options": "current"}, "appears twice"),
        ({"file-name": "CURRENT\n"}, "not every file system"),
    ],
)
def test_a_hostile_index_of_samza_is_refused(changes: dict[str, object], said: str) -> None:
    """Names, sizes, blobs and the owner are checked before anything is fetched."""
    with pytest.raises(CorruptBlob, match=said):
        decode_snapshot(index_of(**changes), "index", task=0, store="counts")
    with pytest.raises(CorruptBlob, match="it is one of task"):
        decode_snapshot(index_of(), "index", task=1, store="counts")


def test_a_newer_index_of_samza_is_refused_by_name() -> None:
    """No version is in an index, so a field that Samza does not write yet shows it."""
    with pytest.raises(InvalidError, match="unknown version: a file has the field 'codec'"):
        decode_snapshot(index_of(codec="zstd"), "index", task=0, store="counts")
    newer = json.dumps(json.loads(index_of()) | {"schema-version": 2}).encode()
    with pytest.raises(InvalidError, match="the index has the field 'schema-version'"):
        decode_snapshot(newer, "index", task=0, store="counts")


def test_places_of_old_blobs() -> None:
    """The new job's blob store has the old job's blobs if the URIs are equal or the new one is a parent."""
    assert place_of("s3://bucket/samza/", "s3://bucket/samza") == ""
    assert place_of("s3://bucket/team/samza", "s3://bucket/team") == "samza/"
    assert place_of("s3://bucket/team", "s3://bucket/team/samza") is None
    assert place_of("s3://bucket2", "s3://bucket") is None
    assert place_of("s3://bucket", None) is None
