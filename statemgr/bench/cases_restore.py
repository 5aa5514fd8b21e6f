"""``restore-file``, ``restore-s3`` and ``backup-s3``: whole states, beside plain code that moves the same bytes.

Every measurement is a process of its own. A restore ends with the first read of a verified store in place; plain code
only moves bytes. Neither waits for the disk; what others have left to be written is written before each measurement.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from statemgr.bench.backups import Backup, backup_of, upload
from statemgr.bench.fresh import in_fresh_process
from statemgr.bench.measure import Series, Variant, interleaved
from statemgr.bench.registry import case
from statemgr.bench.result import Line, Target, compared
from statemgr.bench.session import GIBIBYTE, Session, changed
from statemgr.bench.states import State, state_of
from statemgr.engine import checkpoint_to_bytes

_NEARLY = Target("at least", 0.9)
_COPY = Target("at least", 0.8)
_TWICE = Target("at least", 2)
#: Where the files are that plain GETs get.
_PLAIN = "plain-get"


@case("restore-file")
def restore_file(session: Session) -> Iterator[Line]:
    """1 GiB and 4 GiB from a directory of blobs, beside a copy of the same files."""
    for size, value_size, rounds in ((GIBIBYTE, 100, session.rounds), (4 * GIBIBYTE, 4096, min(session.rounds, 2))):
        state = state_of(session, session.bytes(size), value_size)
        backup = backup_of(session, state, s3=False)
        variants: dict[str, Variant] = {
            "restore": lambda number, b=backup: restored(session, b),  # type: ignore[misc]
            "copy": lambda number, s=state: _copied(session, s),  # type: ignore[misc]
        }
        found = interleaved(variants, rounds, session.report)
        what = f"plain parallel copy of {state}"
        yield _speeds("restore-file", state, found["restore"], what, found["copy"], _COPY)


@case("restore-s3")
def restore_s3(session: Session) -> Iterator[Line]:
    """1 GiB from an S3 server, beside a plain GET of the same files, and Samza's restore of them."""
    state = state_of(session, session.bytes(GIBIBYTE))
    backup = backup_of(session, state, s3=True)
    s3 = asdict(session.servers.s3())
    in_fresh_process("statemgr.bench.plain_s3:put", s3=s3, paths=[str(p) for p in state.paths()], prefix=_PLAIN)
    variants: dict[str, Variant] = {
        "restore": lambda number: restored(session, backup),
        "GET": lambda number: _got(session, state),
    }
    peer = _samza_restore(session, state)
    if peer is not None:
        variants["Samza"] = peer
    found = interleaved(variants, session.rounds, session.report)
    what = f"plain parallel GET of {state}, 8 threads"
    yield _speeds("restore-s3", state, found["restore"], what, found["GET"], _NEARLY)
    samzas = "Samza 1.8 restore, verified"
    yield _speeds("restore-s3", state, found["restore"], samzas, found.get("Samza"), _TWICE)


@case("backup-s3")
def backup_s3(session: Session) -> Iterator[Line]:
    """A first commit of 1 GiB to an S3 server, beside a plain PUT of the same files."""
    state = state_of(session, session.bytes(GIBIBYTE))
    s3 = asdict(session.servers.s3())
    paths = [str(path) for path in state.paths()]

    def plain(number: int) -> float:
        prefix = f"plain-put-{number}"
        os.sync()
        took = in_fresh_process("statemgr.bench.plain_s3:put", s3=s3, paths=paths, prefix=prefix)["seconds"]
        _remove(s3, prefix)
        return float(took)

    def ours(number: int) -> float:
        os.sync()
        backup = upload(session, state, s3=True)
        _remove(s3, f"{s3['prefix']}/{backup.config.job_name}")
        return backup.seconds

    found = interleaved({"backup": ours, "PUT": plain}, session.rounds, session.report)
    what = f"plain parallel PUT of {state}, 8 threads"
    yield _speeds("backup-s3", state, found["backup"], what, found["PUT"], _NEARLY)


def restored(session: Session, backup: Backup) -> dict[str, float]:
    """One restore on an empty machine, in a new process."""
    config = changed(backup.config, state__dir=str(session.fresh("restored")))
    os.sync()
    try:
        found = in_fresh_process(
            "statemgr.bench.operations:restore",
            config=config.to_mapping(),
            checkpoint=checkpoint_to_bytes(backup.checkpoint).hex(),
        )
        assert found["factory"] == "blob-store", found
        return {"seconds": found["seconds"], "peak": found["peak_bytes"], "fetched": found["bytes_fetched"]}
    finally:
        shutil.rmtree(config.state_dir)


def _copied(session: Session, state: State) -> float:
    """A plain copy of the state's files."""
    target = session.fresh("copied")
    os.sync()
    try:
        paths = [str(path) for path in state.paths()]
        found = in_fresh_process("statemgr.bench.operations:copy", paths=paths, target=str(target / "files"))
        return float(found["seconds"])
    finally:
        shutil.rmtree(target)


def _got(session: Session, state: State) -> float:
    """A plain GET of the state's files."""
    target = session.fresh("got")
    os.sync()
    try:
        found = in_fresh_process(
            "statemgr.bench.plain_s3:get",
            s3=asdict(session.servers.s3()), names=list(state.files), prefix=_PLAIN, target=str(target / "files"),
        )  # fmt: skip
        return float(found["seconds"])
    finally:
        shutil.rmtree(target)


def _samza_restore(session: Session, state: State) -> Variant | None:
    peer = session.peers.samza()
    if peer is None:
        return None
    run = peer.on(session.servers.s3(), session.bucket("restore"))
    index = session.fresh("samza") / "index"
    run.measure("full", state.directory, index)

    def measure(number: int) -> float:
        target: Path = session.fresh("samza") / "restored"
        os.sync()
        try:
            found = run.measure("restore", target, index)
            assert found["same"], found
            return float(found["withVerify_s"])
        finally:
            shutil.rmtree(target.parent)

    return measure


def _remove(s3: dict[str, str], prefix: str) -> None:
    from statemgr.bench import plain_s3

    plain_s3.remove(s3, prefix)


def _speeds(
    name: str, state: State, ours: Series, reference: str, other: Series | None, target: Target | None = None
) -> Line:
    """Megabytes a second of both."""
    size = state.bytes / 1e6
    theirs = size / other.median() if other is not None else None
    return compared(name, size / ours.median(), "MB/s", reference, theirs, target)
