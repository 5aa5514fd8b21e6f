"""What is lost although no process has done anything wrong: topics, records, blobs, and bits of files."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from statemgr import JobConfig, StateManager
from statemgr.errors import PermissionNeeded, StatemgrError
from tests.simulation.model import BACKENDS, STORES, TASK, Wrong
from tests.simulation.owners import Permitted, explain

if TYPE_CHECKING:
    from tests.simulation.history import History

#: What one of two backends may lose.
LOSSES = ("nothing", "blob", "bit", "records", "tail", "topic")


class Losses:
    """Lets them happen in a history."""

    def __init__(self, history: History) -> None:
        self._history = history

    def lose_checkpoints(self, moment: str) -> None:
        """The newest transactions of the checkpoint topic are lost, but not those of the first commits. Perhaps aborted
        records take their offsets at once."""
        history = self._history
        transactions = 1 + history.scheduler.decide(f"how many checkpoints are lost {moment}", 3)
        lose = history.broker.lose_tail
        if history.scheduler.decide(f"others take the offsets of checkpoints {moment}", 2):
            lose = partial(history.broker.lose_hidden_tail, longer=True)
        if history.model.may_lose(transactions) and lose(history.topic, transactions):
            history.model.lost(transactions)

    @property
    def topic_is_deleted_before(self) -> int | None:
        """The number of the owner before which somebody deletes the checkpoint topic; None if nobody does."""
        history = self._history
        decide = history.scheduler.decide
        stays = history.stages or history.adopts or history.plugs_in or history.loses_checkpoints
        may_be = history.tasks == 1 and not stays and decide("the checkpoint topic is deleted", 4) == 0
        return 1 + decide("when the checkpoint topic is deleted", 3) if may_be else None

    def delete_checkpoint_topic(self, machine: str, number: int) -> None:
        """Somebody deletes the checkpoint topic while nobody lives. No opening starts empty while anything shows that
        there was state, until somebody permits it."""
        history = self._history
        for owner in history.owners:
            history.scheduler.kill(owner.process)
        history.scheduler.sleep(70.0)  # requests that are late have arrived, and lists are whole
        history.look_after_servers()
        if history.topic not in history.broker.topics:
            return
        history.broker.delete(history.topic)
        history.network.happened("deleted checkpoint topic", f"somebody deletes {history.topic}")
        for store in history.config(machine, 0).stores.values():  # nobody knows whose records a changelog has
            if BACKENDS[1] not in store.backup_factories:
                history.broker.topics.pop(store.changelog_topic, None)
        history.model.begin_again()
        prefix = f"{history.name}/"
        had_state = any(name.startswith(prefix) for name in history.bucket.published())

        def open_without_permission(config: JobConfig) -> None:
            with StateManager(config, services=history.services) as manager, manager.open_task(TASK):
                if had_state:
                    raise Wrong("the job starts empty, although the blob store has published state")

        def process_again(config: JobConfig) -> None:
            with StateManager(config, services=history.services) as manager:
                Permitted(history, manager, f"permitted {number}", history.parts).run()
            ended.append(True)

        ended: list[bool] = []
        for run in range(30):
            work = process_again if run else open_without_permission
            history.in_process(f"permitted-{number}-{run}", machine, partial(self._explained, work))
            if ended:
                return
        raise Wrong("nobody could start empty in 30 runs")

    def _explained(self, work: Callable[[JobConfig], None], config: JobConfig) -> None:
        """Do something that may fail, as the situation explains."""
        history = self._history
        try:
            work(config)
        except PermissionNeeded as error:
            history.scheduler.note(f"{type(error).__name__}: {error.message}")
        except StatemgrError as error:
            explain(history, config, error)

    def rot(self, machine: str, number: int) -> None:
        """One bit of a file on a machine on which nobody lives is wrong from now on."""
        history = self._history
        root = history.directory / machine
        if any(owner.thread.is_alive() and owner.process.machine == machine for owner in history.owners):
            return
        # RocksDB, in which commands build states, draws names and sizes of its own
        of_commands = {"rescale", "tmp"}
        files = sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size)
        files = [path for path in files if of_commands.isdisjoint(path.relative_to(root).parts)]
        if not files:
            return
        path = files[history.scheduler.decide(f"which file rots before {number}", len(files))]
        times, content = path.stat(), bytearray(path.read_bytes())
        content[history.scheduler.decide(f"byte before {number}", len(content))] ^= 1 << number % 8
        with path.open("r+b") as file:
            file.write(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        kind = path.parent.parent.name if path.parent.parent.name in ("committed", "live", "staging") else path.name
        history.network.happened("rotten file", f"a bit of a file of {machine} is wrong: {kind}")

    def lose(self, moment: str) -> None:
        """Something is lost of one backend, while the other one has the whole state."""
        history = self._history
        scheduler = history.scheduler
        kind = LOSSES[scheduler.decide("what is lost", len(LOSSES))]
        if kind in ("blob", "bit"):
            names = sorted(name for name in history.bucket.names() if name.startswith(f"{history.name}/"))
            if names:
                name = names[scheduler.decide(f"which blob is lost {moment}", len(names))]
                history.bucket.lose(name) if kind == "blob" else history.bucket.spoil(name, moment)
            return
        store = STORES[scheduler.decide(f"which changelog is lost {moment}", 2)]
        topic = history.config("", 0).stores[store].changelog_topic
        if topic not in history.broker.topics:
            return
        if kind == "records":
            end = history.broker.end(topic, 0, only_settled=True)
            offset = scheduler.decide(f"where it begins {moment}", end + 1)
            history.broker.log(topic, 0).delete_before(offset)
            history.network.happened("cut changelog", f"somebody deletes the records of {topic} before {offset}")
        elif kind == "tail":
            self.lose_tail(topic, moment)
        elif kind == "topic":
            history.broker.delete(topic)
            history.network.happened("deleted changelog", f"somebody deletes {topic}")

    def delete_made_topics(self) -> None:
        """Somebody deletes changelogs that the broker has made for a record of an owner that lived on without one, and
        empty ones of a rescale that another one has overtaken."""
        history = self._history
        config = history.config("", 0)
        for store in STORES:
            topic = config.stores[store].changelog_topic
            if (found := history.broker.topics.get(topic)) is None:
                continue
            is_left = len(found.logs) != config.tasks and not any(log.entries for log in found.logs)
            if is_left or found.settings["cleanup.policy"] != "compact":
                history.broker.delete(topic)
                history.network.happened("deleted changelog", f"somebody deletes {topic}, which no owner has made")

    def lose_tail(self, topic: str, moment: str) -> None:
        """A changelog loses its newest transactions, and perhaps aborted records take their offsets at once.

        While an owner lives, they do not take exactly these offsets: nobody but the owner has a transaction there.
        """
        history = self._history
        transactions = 1 + history.scheduler.decide(f"how much is lost {moment}", 3)
        if history.scheduler.decide(f"others take the offsets {moment}", 2):
            lives = any(owner.thread.is_alive() for owner in history.owners)
            history.broker.lose_hidden_tail(topic, transactions, longer=lives)
        else:
            history.broker.lose_tail(topic, transactions)
