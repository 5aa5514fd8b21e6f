"""The peers. Their harnesses are built in the work directory when they are first needed.

``--peers DIR`` names a directory with ``samza/`` and ``kafka/`` (their READMEs describe them). Its files are copied and
built, never changed. Without it, or if a build fails, the cases that need it have no reference.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from statemgr.errors import StatemgrError
from statemgr_tools.bench.measure import Report
from statemgr_tools.bench.peers.harnesses import KafkaStreams, Quix, Samza
from statemgr_tools.bench.peers.peer import Peer

P = TypeVar("P", bound=Peer)


class Peers:
    """The known peers.

    Args:
        source: the directory in ``--peers``, or None.
        target: the directory for the builds, which stays between runs.
        report: called with the name of the peer that is being built.
    """

    def __init__(self, source: Path | None, target: Path, report: Report) -> None:
        self._source = source
        self._target = target
        self._report = report
        self._failed: dict[str, str] = {}

    def samza(self) -> Samza | None:
        """Return Samza's blob-store backup and restore, or None."""
        return self._peer("samza", Samza)

    def streams(self) -> KafkaStreams | None:
        """Return Kafka Streams' restore of a changelog, or None."""
        return self._peer("kafka", KafkaStreams)

    def quix(self) -> Quix | None:
        """Return Quix Streams' restore of a changelog and its commits, or None."""
        return self._peer("kafka", Quix)

    @property
    def notes(self) -> Sequence[str]:
        """Return the errors of peers that could not be built."""
        return list(self._failed.values())

    def _peer(self, folder: str, kind: type[P]) -> P | None:
        name = kind.__name__
        if self._source is None or name in self._failed:
            return None
        peer = kind(self._target / name, self._source.absolute() / folder)
        try:
            if not peer.built:
                self._report(f"building {name} (the first time)")
                shutil.rmtree(peer.directory, ignore_errors=True)
                shutil.copytree(peer.source, peer.directory)
                peer.build()
                (peer.directory / ".built").touch()
        except (OSError, StatemgrError) as error:
            self._failed[name] = f"{name} did not build: {error}"
            return None
        return peer
