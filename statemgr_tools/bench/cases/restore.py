"""``restore-file``, ``restore-s3`` and ``backup-s3``: complete states, compared with plain code.

Every measurement runs in its own process, with memory available. A restore ends with the first read of a verified store
in place. Plain code only moves bytes. Neither waits for the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from statemgr_tools.bench.backups import Backup, backup_of, upload
from statemgr_tools.bench.fresh import in_fresh_process
from statemgr_tools.bench.measure import Series, Variant, interleaved
from statemgr_tools.bench.memory import fresh_place, let_go_at_first_file
from statemgr_tools.bench.peers.peer import PeerFailed
from statemgr_tools.bench.registry import case
from statemgr_tools.bench.result import Line, Target, compared
from statemgr_tools.bench.session import GIBIBYTE, Session
from statemgr_tools.bench.states import State, state_of

_NEARLY = Target("at least", 0.9)
_COPY = Target("at least", 0.8)
_TWICE = Target("at least", 2)
#: The directory for the files of plain GETs.
_PLAIN = "plain-get"


@case("restore-file")
def restore_file(session: Session) -> Iterator[Line]:
    """1 GiB and 4 GiB from a directory of blobs, compared with a copy of the same files."""
    for size, value_size in ((GIBIBYTE, 100), (4 * GIBIBYTE, 4096)):
        yield _from_directory(session, state_of(session, session.bytes(size), value_size))


def _from_directory(session: Session, state: State) -> Line:
    backup = backup_of(session, state, s3=False)
    paths = [str(path) for path in state.paths()]
    variants: dict[str, Variant] = {
        "restore": lambda number: restored(session, backup),
        "copy": lambda number: _plain(session, state, "statemgr_tools.bench.operations:copy", paths=paths),
    }
    found = interleaved(variants, session.rounds, session.report)
    return _speeds("restore-file", state, found["restore"], f"plain parallel copy of {state}", found["copy"], _COPY)


@case("restore-s3")
def restore_s3(session: Session) -> Iterator[Line]:
    """1 GiB from an S3 server, compared with a plain GET of the same files and with Samza's restore."""
    state = state_of(session, session.bytes(GIBIBYTE))
    backup = backup_of(session, state, s3=True)
    s3 = asdict(session.servers.s3())
    in_fresh_process("statemgr_tools.bench.plain_s3:put", s3=s3, paths=[str(p) for p in state.paths()], prefix=_PLAIN)
    plain = {"s3": s3, "names": list(state.files), "prefix": _PLAIN}
    variants: dict[str, Variant] = {
        "restore": lambda number: restored(session, backup),
        "GET": lambda number: _plain(session, state, "statemgr_tools.bench.plain_s3:get", **plain),
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
    """A first commit of 1 GiB to an S3 server, compared with a plain PUT of the same files."""
    state = state_of(session, session.bytes(GIBIBYTE))
    address = session.servers.s3()
    s3 = asdict(address)
    paths = [str(path) for path in state.paths()]

    def plain(number: int) -> float:
        prefix = f"plain-put-{number}"
        with fresh_place(session, "plain", state.bytes) as (_, held):
            found = in_fresh_process(
                "statemgr_tools.bench.plain_s3:put", s3=s3, paths=paths, prefix=prefix, held=str(held)
            )
        address.remove(prefix)
        return float(found["seconds"])

    def ours(number: int) -> float:
        backup = upload(session, state, s3=True)
        address.remove(backup.config.job_name)
        return backup.seconds

    found = interleaved({"backup": ours, "PUT": plain}, session.rounds, session.report)
    what = f"plain parallel PUT of {state}, 8 threads"
    yield _speeds("backup-s3", state, found["backup"], what, found["PUT"], _NEARLY)


def restored(session: Session, backup: Backup) -> dict[str, float]:
    """Restore once on an empty machine, in a new process."""
    with fresh_place(session, "restored", backup.state.bytes) as (place, held):
        found = in_fresh_process("statemgr_tools.bench.operations:restore", **backup.arguments(place), held=str(held))
    assert found["factory"] == "blob-store", found
    return {"seconds": found["seconds"], "peak": found["peak_bytes"], "fetched": found["bytes_fetched"]}


def _plain(session: Session, state: State, function: str, **arguments: Any) -> float:
    """Run plain code that makes the state's files in a directory, in a new process. Returns seconds."""
    with fresh_place(session, "plain", state.bytes) as (place, held):
        found = in_fresh_process(function, **arguments, target=str(place / "files"), held=str(held))
    return float(found["seconds"])


def _samza_restore(session: Session, state: State) -> Variant | None:
    peer = session.peers.samza()
    if peer is None:
        return None
    run = peer.on(session.servers.s3(), session.bucket("restore"))
    index = session.fresh("samza") / "index"
    run.measure("full", state.directory, index)

    def measure(number: int) -> float:
        with fresh_place(session, "samza", state.bytes) as (place, held), let_go_at_first_file(held, place):
            found = run.measure("restore", place / "restored", index)
        if not found["same"]:
            raise PeerFailed(f"Samza restored something else than what it backed up: {found}")
        return float(found["withVerify_s"])

    return measure


def _speeds(
    name: str, state: State, ours: Series, reference: str, other: Series | None, target: Target | None = None
) -> Line:
    """Return the megabytes per second of both."""
    size = state.bytes / 1e6
    theirs = size / other.median() if other is not None else None
    return compared(name, size / ours.median(), "MB/s", reference, theirs, target)
