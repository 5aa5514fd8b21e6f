"""RocksDB as a local store: how it handles RocksDB's traps and a full disk."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest

from statemgr.errors import CorruptError, CorruptFile, DiskFull, InvalidError, RetryableError
from statemgr.local.rocksdb import options as rocksdb_options
from statemgr.local.rocksdb.brief import BriefStore
from statemgr.local.rocksdb.bulk import bulk_load
from statemgr.local.rocksdb.handle import translate
from statemgr.local.rocksdb.store import RocksDbStore
from statemgr.local.trees import is_state

NO_COMPRESSION = {"compression": "none"}


@pytest.fixture
def open_at() -> Iterator[Callable[..., RocksDbStore]]:
    """Opens stores, and closes them at the end."""
    opened: list[RocksDbStore] = []

    def open_one(directory: Path, **options: object) -> RocksDbStore:
        names = {name.replace("_", "."): value for name, value in options.items()}
        opened.append(RocksDbStore.open(directory, {**NO_COMPRESSION, **names}))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def filled(directory: Path, keys: int = 50_000) -> None:
    """Create a closed store of many blocks."""
    store = RocksDbStore.open(directory, NO_COMPRESSION)
    store.write((b"%08d" % i, os.urandom(20)) for i in range(keys))
    store.flush()
    store.close()


def table_files(directory: Path) -> list[Path]:
    """Return the store's table files."""
    return sorted(directory.glob("*.sst"))


def test_log_and_manifest_of_a_store_that_stays_open_are_bounded(
    open_at: Callable[..., RocksDbStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many flushes and checkpoints it makes."""
    monkeypatch.setattr(rocksdb_options, "_LOG", 16 * 1024)
    monkeypatch.setattr(rocksdb_options, "_MANIFEST", 8 * 1024)
    store = open_at(tmp_path / "live")
    for number in range(150):
        store.write([(b"%d" % number, b"value")])
        store.flush()
        store.checkpoint(tmp_path / f"checkpoint-{number}")
    for kind, most in {"LOG": 3 * 16 * 1024, "MANIFEST": 20 * 1024}.items():
        assert 0 < sum(file.stat().st_size for file in (tmp_path / "live").glob(f"{kind}*")) < most
    assert dict(store.scan(None, None)) == {b"%d" % number: b"value" for number in range(150)}


def test_corrupt_block_is_an_error_in_every_read(open_at: Callable[..., RocksDbStore], tmp_path: Path) -> None:
    """Invariant 8: a read of a damaged block raises an error, and a scan does not end early."""
    filled(tmp_path / "live")
    (table,) = table_files(tmp_path / "live")
    with open(table, "r+b") as file:
        file.seek(table.stat().st_size // 2)
        file.write(b"\xff" * 200)
    store = open_at(tmp_path / "live")
    with pytest.raises(CorruptError, match="checksum"):
        list(store.scan(None, None))
    with pytest.raises(CorruptError, match="checksum"):
        store.get_many([b"%08d" % i for i in range(50_000)])
    with pytest.raises(CorruptError, match="checksum"):
        [store.get(b"%08d" % i) for i in range(50_000)]


@pytest.mark.parametrize("damage", ["no CURRENT", "bad CURRENT", "no table file", "no MANIFEST"])
def test_damaged_directory_does_not_open(damage: str, open_at: Callable[..., RocksDbStore], tmp_path: Path) -> None:
    """A directory with a missing part raises CorruptError and is not an empty store."""
    live = tmp_path / "live"
    filled(live, 100)
    match damage:
        case "no CURRENT":
            (live / "CURRENT").unlink()
        case "bad CURRENT":
            (live / "CURRENT").write_text("garbage")
        case "no table file":
            table_files(live)[0].unlink()
        case _:
            next(live.glob("MANIFEST-*")).unlink()
    with pytest.raises(CorruptError):
        list(open_at(live).scan(None, None))


def test_what_the_disk_cannot_read_is_damaged(tmp_path: Path) -> None:
    """The task is then opened again, and restored. What cannot be written stays in memory, and a time-out may pass."""
    texts = {
        "While pread offset 4096 len 4096: /s/000010.sst: Input/output error": CorruptFile,
        "While open a file for random read: /s/000010.sst: Stale file handle": CorruptFile,
        "While pread offset 4096 len 4096: /s/000010.sst: Connection timed out": RetryableError,
        "While appending to file: /s/000011.sst: Input/output error": RetryableError,
        "While open file for random read/write: /s/000011.sst: Input/output error": RetryableError,
        "While appending to file: /s/000011.sst: No space left on device": DiskFull,
    }
    for text, kind in texts.items():
        assert type(translate(Exception(f"IO error: {text}"), "cannot read", tmp_path)) is kind


def test_second_open_is_refused_with_a_hint(open_at: Callable[..., RocksDbStore], tmp_path: Path) -> None:
    """Invariant 7: two store objects cannot use one directory, in one process or in two."""
    open_at(tmp_path / "live")
    with pytest.raises(InvalidError, match="clone the directory"):
        open_at(tmp_path / "live")
    script = (
        "import sys; from pathlib import Path; from statemgr.local.rocksdb.store import RocksDbStore\n"
        "from statemgr.errors import InvalidError\n"
        "try: RocksDbStore.open(Path(sys.argv[1]), {})\n"
        "except InvalidError as error: print(error.hint)"
    )
    other = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "live")], capture_output=True, text=True, timeout=600, check=True
    )
    assert "clone the directory" in other.stdout


def test_reopening_keeps_the_options(tmp_path: Path) -> None:
    """After a bulk load and a reopen, the configured options apply and not those of the bulk load."""
    with bulk_load(tmp_path / "store", {}) as writer:
        writer.write([(b"a", b"1")])
    store = RocksDbStore.open(tmp_path / "store", {"level0.compaction.trigger": 7, "compression": "zstd"})
    store.close()
    newest = max(tmp_path.glob("store/OPTIONS-*"), key=lambda path: int(path.name.partition("-")[2]))
    options = newest.read_text()
    for line in (
        "num_levels=7",
        "disable_auto_compactions=false",
        "level0_file_num_compaction_trigger=7",
        "compression=kZSTD",
        "memtable_factory=SkipListFactory",
    ):
        assert line in options.replace("{id=", "").replace("}", ""), line
    assert "bloomfilter" in options


@pytest.mark.parametrize("buffer", [1 << 16, 1 << 26])
def test_a_bulk_load_of_many_files_is_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_at: Callable[..., RocksDbStore], buffer: int
) -> None:
    """A bulk load is compacted if it leaves so many files that writes would slow down. A few files stay as they are."""
    monkeypatch.setattr(rocksdb_options, "_BULK_BUFFER", buffer)
    with bulk_load(tmp_path / "store", {}) as writer:
        for start in range(0, 40_000, 1000):
            writer.write([(b"%08d" % key, os.urandom(100)) for key in range(start, start + 1000)])
        writer.write([(b"%08d" % key, None) for key in range(10)])
    files = {1 << 16: 0, 1 << 26: 1}[buffer]
    store = open_at(tmp_path / "store")
    assert store.statistics()["rocksdb.num-files-at-level0"] == files
    assert [key for key, _ in store.scan(None, None)] == [b"%08d" % key for key in range(10, 40_000)]


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("compaction.style", "universal", "compaction_style=kCompactionStyleUniversal"),
        ("write.buffer.size.bytes", 1 << 20, "write_buffer_size=1048576"),
        ("num.write.buffers", 5, "max_write_buffer_number=5"),
        ("block.size.bytes", 16384, "block_size=16384"),
        ("block.cache.size.bytes", 0, "no_block_cache=true"),
        ("bloom.filter.bits", 0, "filter_policy=nullptr"),
        ("target.file.size.bytes", 1 << 20, "target_file_size_base=1048576"),
        ("max.open.files", 77, "max_open_files=77"),
        ("max.background.jobs", 3, "max_background_jobs=3"),
        ("block.cache.size.bytes", -1, "cache_index_and_filter_blocks=true"),
        ("optimize.filters.for.hits", True, "optimize_filters_for_hits=true"),
        ("compression", "snappy", "compression=kSnappyCompression"),
    ],
)
def test_option_reaches_rocksdb(name: str, value: object, line: str, tmp_path: Path) -> None:
    """Each configurable option appears in the options file that RocksDB writes."""
    RocksDbStore.open(tmp_path / "store", {name: value}).close()
    (options,) = tmp_path.glob("store/OPTIONS-*")
    assert line in options.read_text()


def test_stores_share_one_memory(open_at: Callable[..., RocksDbStore], tmp_path: Path) -> None:
    """Invariant 13: the stores of a process share one block cache and one memtable limit. A larger budget also applies
    to open stores, and a smaller one changes nothing."""
    one, two = open_at(tmp_path / "one"), open_at(tmp_path / "two")
    own = open_at(tmp_path / "own", block_cache_size_bytes=1 << 20)
    shared = rocksdb_options.shared_memory()
    capacity = one.statistics()["rocksdb.block-cache-capacity"]
    assert two.statistics()["rocksdb.block-cache-capacity"] == capacity == 2 * shared.memtables.get_buffer_size()
    assert own.statistics()["rocksdb.block-cache-capacity"] == 1 << 20
    rocksdb_options.use_memory(int(capacity) * 2)
    assert one.statistics()["rocksdb.block-cache-capacity"] == capacity * 2
    rocksdb_options.use_memory(1 << 23)
    assert two.statistics()["rocksdb.block-cache-capacity"] == capacity * 2
    assert shared.memtables.get_buffer_size() == capacity


USAGE = """
import os, sys
from pathlib import Path
from statemgr.local.rocksdb.store import RocksDbStore
one, two = (RocksDbStore.open(Path(sys.argv[1]) / name, {}) for name in ("one", "two"))
before = two.statistics()["rocksdb.block-cache-usage"]
one.write([(b"%06d" % i, os.urandom(100)) for i in range(40_000)])
print(int(two.statistics()["rocksdb.block-cache-usage"] - before))
"""


def test_what_one_store_uses_counts_for_all(tmp_path: Path) -> None:
    """Stores share their memory use. The test runs in its own process, because other stores free memory."""
    run = subprocess.run([sys.executable, "-c", USAGE, tmp_path], capture_output=True, text=True, check=True)
    assert int(run.stdout) > 4_000_000


MEMTABLES = """
import os, sys, time
from pathlib import Path
from statemgr.local import use_memory
from statemgr.local.rocksdb.store import RocksDbStore
use_memory(8 << 20)
stores = [RocksDbStore.open(Path(sys.argv[1]) / str(n), {"compression": "none"}) for n in range(4)]
highest = 0
for round in range(60):
    for store in stores:
        store.write([(b"%04d%06d" % (round, i), os.urandom(100)) for i in range(500)])
    while any(s.statistics()["rocksdb.num-immutable-mem-table"] for s in stores):
        time.sleep(0.001)  # on its way to the disk, however busy the machine is
    highest = max(highest, sum(s.statistics()["rocksdb.cur-size-all-mem-tables"] for s in stores))
print(int(highest), sum(1 for s in stores for _ in s.scan(None, None)))
"""


def test_memtables_of_all_stores_stay_within_the_budget(tmp_path: Path) -> None:
    """Invariant 13: four stores that write 15 MB together stay within 8 MiB of memtables."""
    run = subprocess.run(
        [sys.executable, "-c", MEMTABLES, str(tmp_path)], capture_output=True, text=True, timeout=600, check=True
    )
    highest, keys = map(int, run.stdout.split())
    assert keys == 60 * 4 * 500
    assert highest < 8 << 20


def test_many_stores_with_few_changes_do_not_flush(
    open_at: Callable[..., RocksDbStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 MB in a hundred stores fit into the memtables of the default budget, so nearly no write flushes its store."""
    monkeypatch.setattr(rocksdb_options, "_shared", None)
    monkeypatch.setattr(rocksdb_options, "_budget", 0)
    stores = [open_at(tmp_path / str(number), level0_compaction_trigger=1000) for number in range(100)]
    for turn in range(20):
        for store in stores:
            store.write([(b"%02d%03d" % (turn, number), os.urandom(100)) for number in range(50)])
        while any(store.statistics()["rocksdb.num-immutable-mem-table"] for store in stores):
            time.sleep(0.001)  # on its way to the disk
    files = [store.statistics()["rocksdb.num-files-at-level0"] for store in stores]
    assert sum(files) < len(stores), files


def test_statistics_of_rocksdb_itself(open_at: Callable[..., RocksDbStore], tmp_path: Path) -> None:
    """Properties are always available. Tickers and histograms count only if the store is opened with statistics."""
    plain, counting = open_at(tmp_path / "plain"), open_at(tmp_path / "counting", statistics=True)
    for store in (plain, counting):
        store.write([(b"%03d" % i, b"1") for i in range(100)])
        store.flush()
        store.get(b"001")
    assert "rocksdb.number.keys.written" not in plain.statistics()
    numbers = counting.statistics()
    assert numbers["rocksdb.number.keys.written"] == 100
    assert numbers["rocksdb.db.get.micros.count"] == 1
    assert numbers["rocksdb.db.get.micros.p99"] > 0
    assert plain.statistics()["rocksdb.num-files-at-level0"] == numbers["rocksdb.num-files-at-level0"] == 1


@pytest.mark.parametrize("opened", [RocksDbStore, BriefStore])
def test_a_store_that_is_opened_knows_about_how_many_keys_it_has(opened: type[RocksDbStore], tmp_path: Path) -> None:
    """The estimate covers the keys from before, and not only what is written from then on."""
    filled(tmp_path / "s", keys=1000)
    with closing(opened.open(tmp_path / "s", NO_COMPRESSION)) as store:
        assert store.statistics()["rocksdb.estimate-num-keys"] == 1000
        store.write([(b"another", b"1")])
        store.flush()
        assert store.statistics()["rocksdb.estimate-num-keys"] == 1001


def test_checkpoint_has_state_files_only(open_at: Callable[..., RocksDbStore], tmp_path: Path) -> None:
    """A checkpoint has no log and no lock, and its table files are hard links, so it copies no data."""
    store = open_at(tmp_path / "live")
    store.write([(b"a", b"1")])
    store.flush()
    store.checkpoint(tmp_path / "checkpoint")
    names = {path.name.split("-")[0] for path in (tmp_path / "checkpoint").iterdir()}
    assert names == {"CURRENT", "IDENTITY", "MANIFEST", "OPTIONS", "rocksdict", "000008.sst"}
    assert (tmp_path / "checkpoint" / "IDENTITY").read_bytes() == (tmp_path / "live" / "IDENTITY").read_bytes()
    assert (tmp_path / "checkpoint" / "000008.sst").stat().st_nlink == 2


def test_compaction_catches_up_across_micro_batches(tmp_path: Path) -> None:
    """A store that is opened for each batch keeps few level 0 files, and the wait for compaction changes no content."""
    live, expected = tmp_path / "live", {}
    for batch in range(12):
        store = RocksDbStore.open(live, {"level0.compaction.trigger": 2})
        changes = [(b"%05d" % ((i * 7919 + batch) % 20_000), b"%d" % batch) for i in range(3_000)]
        store.write(changes)
        expected.update(changes)
        store.flush()
        store.compact_if_needed(3)
        assert store._number("rocksdb.num-files-at-level0") < 3
        store.close()
    store = RocksDbStore.open(live, {})
    assert dict(store.scan(None, None)) == expected
    assert not store.compact_if_needed(3)
    store.close()


@pytest.mark.parametrize(
    ("begins", "trigger", "then"),
    [("opening", 2, ("24", "32")), ("catching up", 2, ("24", "32")), ("opening", 30, ("38", "46"))],
)
def test_no_write_waits_for_the_compaction_of_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: str, trigger: int, then: tuple[str, str]
) -> None:
    """A write that waits keeps all threads of Python from running. The limits apply again when level 0 is small. They
    are above the number of files at which it is compacted."""
    monkeypatch.setattr(rocksdb_options, "MUCH_BEHIND", 20)
    monkeypatch.setattr(rocksdb_options, "_LEVEL0_SLOWDOWN", 24)
    monkeypatch.setattr(rocksdb_options, "_LEVEL0_STOP", 32)
    live, options = tmp_path / "live", {"level0.compaction.trigger": trigger, **NO_COMPRESSION}
    store = RocksDbStore.open(live, {**options, rocksdb_options.BRIEF: True})
    for number in range(40):
        store.write([(b"key", b"%d" % number), (b"%d" % number, os.urandom(1_000))])
        store.flush()
    if begins == "opening":
        store.close()
        store = RocksDbStore.open(live, options)
    else:
        assert store.compact_if_needed(20)
    assert limits_in(live) == rocksdb_options.NO_LIMITS
    deadline = time.monotonic() + 30
    while store._number("rocksdb.num-files-at-level0") >= 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    store.write([(b"key", b"last")])
    assert limits_in(live) == rocksdb_options.limits(options)
    assert tuple(limits_in(live)[f"level0_{step}_writes_trigger"] for step in ("slowdown", "stop")) == then
    assert store.get(b"key") == b"last"
    store.close()


def limits_in(directory: Path) -> dict[str, str]:
    """The limits of writes in a store's newest file of options."""
    newest = max(directory.glob("OPTIONS-*[0-9]"), key=lambda path: int(path.name.partition("-")[2]))
    lines = (line.strip().partition("=") for line in newest.read_text().splitlines())
    return {name: value for name, _, value in lines if name in rocksdb_options.NO_LIMITS}


def test_a_store_opened_for_reading_first(tmp_path: Path) -> None:
    """The directory stays unchanged until the first write. Iterators from before that write continue after it."""
    filled(tmp_path / "live")

    def state(directory: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in directory.iterdir() if is_state(path.name)}

    before = state(tmp_path / "live")
    store = RocksDbStore.open(tmp_path / "live", NO_COMPRESSION, read_first=True)
    number = store.sequence_number
    going, ended = store.scan(b"00000010", b"00000020"), store.scan(b"00000010", b"00000011")
    assert [next(going)[0], *(key for key, _ in ended)] == [b"00000010", b"00000010"]
    store.flush()
    store.checkpoint(tmp_path / "checkpoint")
    store.concurrent_checkpoint(tmp_path / "beside")
    assert state(tmp_path / "live") == before
    assert all(path.stat().st_nlink == 3 for path in table_files(tmp_path / "live"))
    assert state(tmp_path / "checkpoint").keys() == state(tmp_path / "beside").keys() == before.keys()

    assert store.sequence_number == number
    store.write([(b"00000011a", b"new"), (b"00000012", None)])
    assert store.sequence_number == number + 2
    assert state(tmp_path / "live") != before
    assert [key for key, _ in going] == [b"%08d" % n for n in range(11, 20)]
    assert list(ended) == []
    assert [store.get(key) for key in (b"00000011a", b"00000012")] == [b"new", None]
    with pytest.raises(InvalidError, match="open"):
        RocksDbStore.open(tmp_path / "live", NO_COMPRESSION)
    store.close()
    for directory in ("checkpoint", "beside"):
        copy = RocksDbStore.open(tmp_path / directory, NO_COMPRESSION)
        assert (copy.get(b"00000011a"), len(list(copy.scan(None, None)))) == (None, 50_000)
        copy.close()


def fill_up(ballast: Path) -> None:
    """Write a file until the disk is full."""
    with open(ballast, "wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def check_recovery(store: RocksDbStore, fill: Callable[[], None], free: Callable[[], None], target: Path) -> None:
    """Write, make every writing call fail on a full disk, free the disk, and find everything that was written."""
    store.write([(b"before", b"1"), (b"deleted", b"1")])
    store.flush()
    base = [(b"%06d" % i, os.urandom(100)) for i in range(20_000)]
    store.write([*base, (b"deleted", None), (b"before", b"2")])
    number = store.sequence_number
    fill()
    for _ in range(2):
        with pytest.raises(DiskFull, match="free space"):
            store.flush()
        with pytest.raises(DiskFull):
            store.checkpoint(target / "checkpoint")
        with pytest.raises(DiskFull):
            store.write([(b"never", b"1")])
        assert store.get(b"000007") == base[7][1]
    free()
    store.write([(b"later", b"1")])
    assert store.sequence_number > number
    store.flush()
    expected = dict([*base, (b"before", b"2"), (b"later", b"1")])
    assert dict(store.scan(None, None)) == expected
    shutil.rmtree(target / "checkpoint", ignore_errors=True)
    store.checkpoint(target / "checkpoint")
    copy = RocksDbStore.open(target / "checkpoint", {})
    assert dict(copy.scan(None, None)) == expected
    copy.close()


def test_full_disk_loses_nothing(small_disk: Path, open_at: Callable[..., RocksDbStore]) -> None:
    """Fault 24: without free space the store raises DiskFull. With space again, it continues and has lost nothing."""
    ballast = small_disk / "ballast"

    check_recovery(open_at(small_disk / "live"), lambda: fill_up(ballast), ballast.unlink, small_disk)


def use_up_inodes(directory: Path, left: int) -> None:
    """Make files until this many inodes are left."""
    for number in range(os.statvfs(directory).f_ffree - left):
        (directory / str(number)).touch()


def load(directory: Path) -> None:
    """Load a new store, as a restore from a changelog does, and copy it."""
    with bulk_load(directory, {}) as writer:
        writer.write([(b"%d" % number, b"x") for number in range(100)])
    store = RocksDbStore.open(directory, {})
    try:
        store.write([(b"later", b"1")])
        store.flush()
        store.checkpoint(directory.with_name("copy"))
    finally:
        store.close()


def test_inodes_run_out(small_disk: Path) -> None:
    """Fault 24: whichever step of a restore takes the last inode, the error is DiskFull and names the place."""
    ballast, target = small_disk / "ballast", small_disk / "store"
    ballast.mkdir()
    errors: list[DiskFull] = []
    succeeded = False
    while not succeeded:
        use_up_inodes(ballast, len(errors))
        try:
            load(target)
            succeeded = True
        except DiskFull as full:
            errors.append(full)
        for place in (ballast, target, small_disk / "copy"):
            shutil.rmtree(place, ignore_errors=True)
        ballast.mkdir()
    assert len(errors) > 5
    assert all(str(small_disk) in str(error.where["path"]) for error in errors)


def test_the_first_write_of_a_store_opened_for_reading_meets_a_full_disk(small_disk: Path) -> None:
    """Fault 24: the first write of a store opened for reading can be repeated, and reads work in the meantime."""
    filled(small_disk / "live", keys=100)
    store = RocksDbStore.open(small_disk / "live", NO_COMPRESSION, read_first=True)
    ballast = small_disk / "ballast"
    fill_up(ballast)
    for _ in range(2):
        with pytest.raises(DiskFull, match="free space"):
            store.write([(b"later", b"1")])
        assert store.get(b"00000007") is not None
    ballast.unlink()
    store.write([(b"later", b"1")])
    assert len(list(store.scan(None, None))) == 101
    store.close()


def test_a_brief_store_is_opened_for_writing_late(small_disk: Path) -> None:
    """Changes stay in memory until they are many or have to be in files, also when that fails. Reads find them."""
    filled(small_disk / "live", keys=100)
    opened = partial(BriefStore.open, small_disk / "live", NO_COMPRESSION, read_first=True)
    before = sorted(path.name for path in (small_disk / "live").iterdir() if is_state(path.name))
    store = opened()
    number = store.sequence_number
    for value in (b"1", b"2"):
        store.write([(b"later", value), (b"00000007", None)])
    assert store.get_many([b"later", b"00000007"]) == [store.get(b"later"), store.get(b"00000007")] == [b"2", None]
    assert store.sequence_number == number + 4
    assert sorted(path.name for path in (small_disk / "live").iterdir() if is_state(path.name)) == before
    with pytest.raises(RetryableError, match="not in its files"):
        store.concurrent_checkpoint(small_disk / "beside")

    fill_up(small_disk / "ballast")
    with pytest.raises(DiskFull):
        store.flush()
    assert store.get(b"later") == b"2"
    (small_disk / "ballast").unlink()
    store.flush()
    assert (len(list(store.scan(None, None))), store.sequence_number) == (100, number + 4)
    store.close()

    store = opened()
    store.write([(b"large", bytes(5_000_000))])  # opens it for writing
    store.write([(b"later", None)])
    assert store.get_many([b"later", b"large"]) == [None, bytes(5_000_000)]
    store.close()


LIMITED = """
import resource, sys
from pathlib import Path
from tests.core.unit import test_local_rocksdb as t
from statemgr.local.rocksdb.store import RocksDbStore
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
limit = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
store = RocksDbStore.open(Path(sys.argv[1]) / "live", t.NO_COMPRESSION)
t.check_recovery(store, lambda: limit(300_000), lambda: limit(soft), Path(sys.argv[1]))
store.close()
print("recovered")
"""


def test_file_size_limit_loses_nothing(tmp_path: Path) -> None:
    """Fault 24 where no small disk can be mounted: a file size limit stops RocksDB's writes in the same way."""
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert run.stdout == "recovered\n", run.stderr


_ENDS_MEANWHILE = """
import os, sys, threading, time
from pathlib import Path
from statemgr.local.rocksdb.store import RocksDbStore

def work(directory):
    store = RocksDbStore.open(directory, {})
    for number in range(1_000_000):
        store.write((b"%d %d" % (number, i), os.urandom(400)) for i in range(2_000))
        store.flush()
        store.concurrent_checkpoint(directory.parent / f"{directory.name}-{number}")

for number in range(4):
    threading.Thread(target=work, args=(Path(sys.argv[1]) / str(number),), daemon=True).start()
time.sleep(0.5)
sys.exit(3)
"""


def test_a_process_ends_while_threads_are_inside_of_rocksdb(tmp_path: Path) -> None:
    """With its own exit code: no thread comes back from RocksDB to an interpreter that has ended."""
    for attempt in range(4):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        run = subprocess.run([sys.executable, "-c", _ENDS_MEANWHILE, directory], capture_output=True, text=True)
        assert (run.returncode, run.stdout, run.stderr) == (3, "", "")


_ENDS_IN_ORDER = """
import atexit, statemgr, sys, threading
from pathlib import Path
stop = threading.Event()

def work(directory):
    store = RocksDbStore.open(directory, {})
    store.write([(b"key", b"value")])
    opened.set()
    stop.wait()
    store.flush()
    store.close()
    print("closed")

@atexit.register
def end():
    stop.set()
    thread.join()

from statemgr.local.rocksdb.store import RocksDbStore
opened = threading.Event()
thread = threading.Thread(target=work, args=(Path(sys.argv[1]),), daemon=True)
thread.start()
opened.wait()
"""


def test_what_a_program_registers_at_its_exit_may_still_use_stores(tmp_path: Path) -> None:
    """For example to close a manager whose loop is on a daemon thread, after the package is imported."""
    run = subprocess.run([sys.executable, "-c", _ENDS_IN_ORDER, tmp_path / "s"], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "closed\n", "")
