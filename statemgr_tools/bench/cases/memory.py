"""``peak-memory``: the peak memory of a process that moves state, including Python."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from statemgr_tools.bench.backups import backup_of, upload
from statemgr_tools.bench.cases.restore import restored
from statemgr_tools.bench.fresh import in_fresh_process
from statemgr_tools.bench.jobs import SNAPSHOTS, to_blobs
from statemgr_tools.bench.registry import case
from statemgr_tools.bench.result import Line, Target, alone
from statemgr_tools.bench.session import GIBIBYTE, Session
from statemgr_tools.bench.states import State, many_files, state_of

_LIMIT = Target("at most", 256, of="value")
_UPDATES = 10_000
_FILES = 10_000


@case("peak-memory")
def peak_memory(session: Session) -> Iterator[Line]:
    """Backups, restores and commits of 1 GiB, of 10,000 small files and of one file of 8 GiB."""
    state = state_of(session, session.bytes(GIBIBYTE))
    files = many_files(session, session.count(_FILES, least=500))
    for what, measured in ((str(state), state), (f"{len(files.files):,} files", files)):
        session.report(f"peak-memory, {what}")
        yield _line(f"backup of {what} to S3", upload(session, measured, s3=True).peak)
        yield _line(f"restore of {what} from S3", restored(session, backup_of(session, measured, s3=True))["peak"])
    yield _line(f"restore of {state} from a directory", restored(session, backup_of(session, state, s3=False))["peak"])
    yield _line(f"restore of {state} and commit of {_UPDATES:,} updates", _commit(session, state))
    size = session.bytes(8 * GIBIBYTE)
    what = f"one file of {size / GIBIBYTE:.2g} GiB"
    session.report(f"peak-memory, {what}")
    backup, restore = _one_file(session, size)
    yield _line(f"backup of {what} to S3", backup)
    yield _line(f"restore of {what} from S3", restore)


def _line(what: str, peak: float) -> Line:
    return alone("peak-memory", peak / 1e6, "MB at most resident", what, _LIMIT)


def _commit(session: Session, state: State) -> float:
    backup = backup_of(session, state, s3=True)
    place, count = session.fresh("committed"), session.count(_UPDATES)
    found = in_fresh_process(
        "statemgr_tools.bench.operations:commit", **backup.arguments(place), of=state.records, count=count
    )
    shutil.rmtree(place)
    return float(found["peak_bytes"])


def _one_file(session: Session, size: int) -> tuple[float, float]:
    """A sparse file takes no space here, but its backup and its restore do."""
    directory = session.fresh("one-file")
    file = directory / "000001.sst"
    file.touch()
    with open(file, "r+b") as opened:
        opened.truncate(size)
    config = session.job("one-file", kafka=False, s3=True, overrides=to_blobs(SNAPSHOTS)).to_mapping()
    backup = in_fresh_process("statemgr_tools.bench.operations:backup_file", config=config, path=str(file))
    target = directory / "restored"
    restore = in_fresh_process(
        "statemgr_tools.bench.operations:restore_file", config=config, marker=backup["marker"], target=str(target)
    )
    assert (target / file.name).stat().st_size == size
    shutil.rmtree(directory)
    return float(backup["peak_bytes"]), float(restore["peak_bytes"])
