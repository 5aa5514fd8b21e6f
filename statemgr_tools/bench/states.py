"""States of a given size, generated once per run as RocksDB directories. Writes in the run's directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rocksdict import IngestExternalFileOptions, Rdict, SstFileWriter

from statemgr.local import bulk_writer
from statemgr.local.directories import StoreDirectories
from statemgr.local.durable import hash_file
from statemgr.local.machine import SystemClock, system_ids
from statemgr.local.rocksdb import options as rocksdb_options
from statemgr.local.rocksdb.store import RocksDbStore
from statemgr.model.checkpoint import Checkpoint
from statemgr_tools.bench import records
from statemgr_tools.bench.seed import Files, seeded, write_hashes
from statemgr_tools.bench.session import GIBIBYTE, MEBIBYTE, Session

_RECORDS_A_FILE = 16


@dataclass(frozen=True, kw_only=True)
class State:
    """A finished RocksDB directory with ``records`` keys, and its files' sizes and hashes."""

    directory: Path
    records: int
    value_size: int
    files: Files

    @property
    def bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(size for size, _ in self.files.values())

    @property
    def checkpoint(self) -> Checkpoint:
        """Return a checkpoint with this state as its store."""
        return seeded(self.directory)

    def __str__(self) -> str:
        """Return the size as text for people."""
        size = self.bytes
        return f"{size / GIBIBYTE:.2g} GiB" if size > GIBIBYTE / 2 else f"{size / MEBIBYTE:.3g} MiB"

    def paths(self) -> list[Path]:
        """Return every file."""
        return [self.directory / name for name in self.files]


def state_of(session: Session, size: int, value_size: int = records.VALUE_SIZE) -> State:
    """Return a state of about ``size`` bytes with 16-byte keys and values of ``value_size``, made once per run."""
    return session.shared(f"state of {size} in {value_size}", lambda: _generate(session, size, value_size))


def _generate(session: Session, size: int, value_size: int) -> State:
    count = max(size // (records.KEY_SIZE + value_size), 1)
    session.report(f"generating a state of {size / 2**20:,.0f} MiB")
    directory = session.fresh("states") / f"{size}-{value_size}"
    # large values in smaller lists, with the same number of bytes
    batch = max(records.BATCH_BYTES // value_size, 1)
    with bulk_writer("rocksdb", directory, {}) as writer:
        for pairs in records.batches(count, value_size=value_size, size=batch):
            writer.write(pairs)
    # settled, so that no compaction runs during a measurement
    store = RocksDbStore.open(directory, {})
    store.compact()
    store.flush()
    store.close()
    return register(directory, count, value_size)


def many_files(session: Session, count: int) -> State:
    """Return a state of ``count`` small files, made once per run."""
    return session.shared(f"state of {count} files", lambda: _generate_files(session, count))


def _generate_files(session: Session, count: int) -> State:
    """Generate files in the order of their keys and ingest them at once, so that RocksDB leaves them unchanged."""
    session.report(f"generating a state of {count:,} files")
    root = session.fresh("states")
    options = rocksdb_options.normal({}, create=True)
    pairs = sorted(pair for batch in records.batches(count * _RECORDS_A_FILE) for pair in batch)
    paths = []
    for number in range(count):
        paths.append(str(root / f"{number}.sst"))
        writer = SstFileWriter(options)
        writer.open(paths[-1])
        for key, value in pairs[number * _RECORDS_A_FILE : (number + 1) * _RECORDS_A_FILE]:
            writer[key] = value
        writer.finish()
    ingest = IngestExternalFileOptions()
    ingest.set_move_files(True)
    directory = root / f"{count}-files"
    database = Rdict(str(directory), options)
    database.ingest_external_file(paths, ingest)
    database.close()
    return register(directory, len(pairs), records.VALUE_SIZE)


def register(directory: Path, count: int, value_size: int) -> State:
    """Register a finished directory as a state: hash its files, so that tasks can start from it."""
    directories = StoreDirectories(directory.with_name("unused"), SystemClock(), system_ids())
    files = {path: hash_file(directory / path) for path in directories.finished(directory).files}
    write_hashes(directory, files)
    return State(directory=directory, records=count, value_size=value_size, files=files)
