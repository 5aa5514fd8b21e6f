"""The consumer loop that :meth:`statemgr.StateManager.run` owns.

Steps of a turn, which takes one message, or with ``process_batch`` the messages that have already arrived (at most
``task.batch.messages``, and about 16 MiB):

1. poll; rebalances arrive here (assign, revoke, lost)
2. pass the message to ``process``, or the messages of each task to ``process_batch``, and remember the next offset of
   each source partition. With batches, steps 3 to 6 also follow each batch.
3. when the restore of a task has ended, call ``on_open``, seek to the checkpoint's input offsets and resume its
   partitions
4. call the timers that are due
5. when a commit has ended, tell the consumer group; when ``task.commit.ms`` has passed, go past the ends of
   transactions in the input, and start a commit for each task that has none in progress; repeat a commit that has
   failed, without waiting as long; if the local files of a task are damaged or missing, open the task again, once, and
   go back to its checkpoint; if a part of its state is still in the blob store and cannot be fetched, do that when it
   can
6. back-pressure: pause the partitions of a task whose commit takes longer than ``task.commit.max.delay.ms``, and resume
   them when it ends

The loop polls for every message, so a member keeps its membership as long as one message takes less than
``max.poll.interval.ms``. A stop, a commit or a rebalance waits for one message at most. With batches, a stop and a
commit wait for one batch; a rebalance, and the next poll, wait for the batches of all messages that were polled
together. Partitions are paused while their task restores or is held back, and polling continues.

After a stop, restores are cancelled, and tasks commit what they have. After two thirds of ``task.shutdown.ms`` no other
commit begins, and tasks close without leaving local copies. Work that has not ended after ``task.shutdown.ms`` is given
up. The next owner processes the input of these tasks again.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from statemgr.consumer.application import Application
from statemgr.consumer.assigned_task import AssignedTask
from statemgr.consumer.assigned_tasks import AssignedTasks
from statemgr.consumer.delivery import Delivery
from statemgr.consumer.loop_health import LoopHealth
from statemgr.consumer.loop_log import LoopStory
from statemgr.consumer.opener import Opener
from statemgr.engine.input_lag import ASK_EVERY_S, InputLag
from statemgr.errors import ConfigError, LocalStateLost, MissingState, StatemgrError, StateUnreachable, UnavailableError
from statemgr.flows.worker import Worker
from statemgr.ids import task_name
from statemgr.kafka.clients import ANSWER_S, DEADLINE_S, ClientLog
from statemgr.kafka.errors import DENIED, OUT_OF_RANGE, translate, turned_away
from statemgr.kafka.group_consumer import GroupConsumer
from statemgr.kafka.input_topics import GONE, InputTopics, topic_problem
from statemgr.kafka.output_topics import OutputTopics
from statemgr.logs import Event, tell
from statemgr.model.jobs.permissions import Permissions
from statemgr.services import Closing, Services
from statemgr.telemetry.metric_declarations import PROCESS_BUCKETS

log = logging.getLogger(__name__)
#: Share of ``task.shutdown.ms`` after which no last commit begins, and tasks close without leaving a local copy.
_HURRY = 2 / 3
#: Commits in progress from which no other one begins: a stop waits for all of them.
_COMMITS_AT_ONCE = 64
_POLL_S = 0.1
#: Seconds after which a poll has returned, unless the process was suspended in it, or a rebalance took as long.
_RETURNED_S = 5.0
#: Most seconds in which a member leaves its group.
_LEAVE_S = 1.0
#: Seconds between two looks at restores, commits and back-pressure while messages arrive.
_LOOK_S = 0.05
#: Longest call of the application that the loop counts itself: another call for each message would cost too much.
_QUICK_S = PROCESS_BUCKETS[0]


class ConsumerLoop:
    """Runs until SIGTERM or SIGINT (or :meth:`stop`), then commits and closes.

    It calls the application on one thread. An exception in it stops the loop, and the messages that it was called with
    are not committed.

    All input topics have ``job.tasks`` partitions, and partition i of each goes to the member that has partition i of
    the others (the ``range`` strategy, which is the client's default).

    Args:
        permissions: only for the first opening of each task.
        published_tasks: returns how many tasks have checkpoints; None for a new job.
    """

    def __init__(
        self,
        services: Services,
        manager: Opener,
        inputs: InputTopics,
        consumer: Consumer,
        application: Application,
        topics: Sequence[str],
        permissions: Permissions,
        published_tasks: Callable[[], int | None],
    ) -> None:
        if not topics:
            raise ConfigError(
                "the job has no input topics", hint="set task.inputs, or pass topics=[…]", key="task.inputs"
            )
        self._services = services
        self._config = services.config
        self._clock = services.clock
        self._inputs = inputs
        self._consumer = consumer
        self._topics = list(dict.fromkeys(topics))
        self._published_tasks = published_tasks
        self._manager = manager
        self._outputs = OutputTopics(services.config, inputs)
        self._tasks = AssignedTasks(services, manager, inputs, self._outputs, consumer, self._topics, permissions)
        self._delivery = Delivery(self._tasks, application, self._config.batch_messages, self._open_again)
        self._errors = consumer.errors if isinstance(consumer, GroupConsumer) else None
        named = self._config.kafka_client("consumer").get("group.instance.id")
        #: The name of this member, if it has one of its own.
        self._instance = str(named) if named else None
        self._client_log = ClientLog(services.config.hider())
        self._story = LoopStory(services, self._tasks, manager.metrics)
        self._health = LoopHealth(services, self._tasks, by_brokers=self._by_brokers)
        self._watched_by = manager.metrics.health
        self._to_pause: list[TopicPartition] = []
        #: Whether every polled message was processed.
        self._settled = True
        self._interval = services.config.commit_ms / 1000
        #: Seconds after a stop until the work that is still in progress is given up.
        self._stop_s = services.config.shutdown_ms / 1000
        self._due = self._look = self._ask_due = 0.0
        #: The last look at the clock of durations. Looks are a large part of what a message costs, so a turn has two.
        self._now = self._clock.elapsed()
        self._took = manager.metrics.process_seconds.took
        #: Calls of the application that took no longer than the first bucket, and their seconds, until the next look.
        self._quick, self._quick_s = 0, 0.0
        self._lag: InputLag | None = None
        #: Tasks whose commit is due.
        self._to_commit: list[AssignedTask] = []
        #: Not an event: a handler of signals sets it, and a second signal may interrupt the first one.
        self._asked_to_stop = False
        self._ending = False
        self._hurry_at = float("inf")
        self._deadline: Worker[None] = Worker(services, "stop", f"job {self._config.job_name}", background=True)

    @property
    def _by_brokers(self) -> bool:
        """Whether the brokers assign the partitions."""
        return isinstance(self._consumer, GroupConsumer) and self._consumer.by_brokers

    def stop(self, *why: Any) -> None:
        """Ask the loop to end after the current message or batch. Also a handler of signals."""
        self._story.asked_to_stop(*why)
        self._asked_to_stop = True
        if self._ending:
            self._stopping()

    def commit_soon(self) -> None:
        """Ask for a commit at the next turn, without waiting for ``task.commit.ms`` to pass."""
        self._due = float("-inf")

    @property
    def committing(self) -> bool:
        """Whether a commit is in progress, or the loop has not looked at its result yet. Another thread may ask while
        the loop waits for input."""
        return any(owned.committing for owned in self._tasks)

    def run(self) -> None:
        """Raises: what the application or a commit raises; the consumer is left to the caller."""
        self._inputs.check(self._consumer, self._topics, self._published_tasks(), self._config.outputs)
        self._outputs.ask()
        previous = self._install_signals()
        try:
            with self._story.told(), self._health.watched(self._watched_by):
                self._run()
        finally:
            self._deadline.close(wait=False)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _run(self) -> None:
        self._consumer.subscribe(self._topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)
        self._now = self._clock.elapsed()
        self._due = self._now + self._interval
        self._manager.metrics.watch("input_messages", self._tasks.processed)
        self._lag = lag = self._manager.watch_lag(self._tasks.reached)
        self._health.silent_s = lag.silent_s
        failed: Exception | None = None
        try:
            while not self._asked_to_stop:
                self._turn()
            self._story.stopping()
            self._stopping()
            self._tasks.cancel_openings()
            self._pass_ends()
            self._tasks.commit_and_wait({owned.index for owned in self._tasks}, self._stopping_asked, self._hurried)
        except Exception as error:
            self._manager.metrics.failed(error)
            failed = error
            raise
        finally:
            self._ending = True
            self._manager.unwatch_lag(lag)
            self._manager.metrics.unwatch(self._tasks.processed)
            self._stopping()  # after an error, too, a blob store that hangs must not hold up the end
            with Closing(failed) as closing:
                closing.callback(self._tasks.shut_down, self._hurried)
            with suppress(KafkaException):  # a member that the group has turned away cannot leave it
                self._leave()

    def _leave(self) -> None:
        """Leave the group, also if nobody closes the consumer: the client tells the brokers in a poll. Otherwise the
        next member waits until the session has timed out. A member with a name of its own (KIP-345) does not leave:
        its tasks wait for its next start."""
        if self._instance is not None:
            return
        self._consumer.unsubscribe()
        until = self._clock.elapsed() + _LEAVE_S
        while self._consumer.assignment() and self._clock.elapsed() < until:
            self._consumer.poll(_POLL_S)

    def _turn(self) -> None:
        message = self._poll(_POLL_S)  # 1
        if message is None or (error := message.error()) is not None:
            if message is not None and error is not None:
                self._consumer_error(error, message)
            self._between(message)
        elif self._delivery.in_batches:
            self._batches(message)
        else:
            begun = self._now
            processed = self._delivery.one(message)  # 2
            self._between(message, begun if processed else None)

    def _batches(self, first: Message) -> None:
        self._settled = False
        batches, event = self._delivery.gather(first, partial(self._poll, 0))
        self._settled = not batches
        for batch in batches:
            if self._asked_to_stop:
                return
            begun = self._clock.elapsed()
            processed = self._delivery.batch(batch)  # 2
            self._settled = batch is batches[-1]
            self._between(first, begun if processed else None)
        if event is not None and (error := event.error()) is not None:
            self._consumer_error(error, event)

    def _poll(self, timeout_s: float) -> Message | None:
        self._health.polled_s = asked_s = self._now
        message = self._consumer.poll(timeout_s)
        self._now = self._clock.elapsed()
        if self._now - asked_s > _RETURNED_S:
            for owned in self._tasks:
                owned.suspended(self._now - asked_s)
        if self._to_pause:
            self._pause_assigned()
        return message

    def _between(self, message: Message | None, begun: float | None = None) -> None:
        """Steps 3 to 6, at most every :data:`_LOOK_S` seconds while messages arrive. ``begun``: when the application
        was called, if it was."""
        self._now = now = self._clock.elapsed()
        if begun is not None:
            seconds = now - begun
            if seconds <= _QUICK_S:
                self._quick += 1
                self._quick_s += seconds
            else:
                self._took(seconds)
        if message is None or now >= self._look:
            self._look = now + _LOOK_S
            if self._quick:
                self._took(self._quick_s, self._quick)
                self._quick, self._quick_s = 0, 0.0
            self._check_refused(message)
            self._tasks.try_again()
            self._start_restored()  # 3
            self._delivery.run_timers()  # 4
            self._commit(now)  # 5
            self._hold_back()  # 6
            if self._lag is not None and now >= self._ask_due:
                self._ask_due = now + ASK_EVERY_S
                self._story.blocked(self._lag.blocked())
                self._story.unanswered(self._lag.silent_s())
            self._now = self._clock.elapsed()  # the next poll begins here, and not before a long `on_open` or timer

    def _consumer_error(self, error: KafkaError, message: Message) -> None:
        """Log an error that the client recovers from. Raises: all other errors, which end the loop."""
        where: dict[str, Any] = {"topic": message.topic(), "partition": message.partition()}
        if error.code() in OUT_OF_RANGE:
            found = self._tasks.find(message.topic(), message.partition())
            raise MissingState(
                f"the next records of the input are gone: {error.str()}",
                hint=GONE,
                offset=found[1].next if found else None,
                **where,
            )
        if error.code() in DENIED:
            raise translate(error, "consuming", reported=self._errors, **where)
        if error.fatal() or error.code() == KafkaError._FATAL:
            named = {} if self._instance is None else {"group_instance_id": self._instance}
            raise turned_away(error, self._errors, **named)
        if error.code() != KafkaError._PARTITION_EOF:
            self._client_log.error(error)

    def _check_refused(self, message: Message | None) -> None:
        """While nothing arrives: raises AccessDenied if the credentials are refused and no broker answers."""
        if self._errors is None or (refused := self._errors.refused()) is None:
            return
        if message is not None:
            if message.error() is None:
                self._errors.clear()  # a later outage has nothing to do with it
            return
        try:
            self._consumer.list_topics(self._topics[0], timeout=ANSWER_S)
        except KafkaException as error:
            raise translate(refused, "consuming", topic=self._topics[0]) from error
        self._errors.clear()

    # --- rebalances ----------------------------------------------------------------------------------------------

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Begin to open tasks that are whole. Partitions are paused after the poll. Offsets are in the checkpoint."""
        if self._ending:
            return  # the end of the loop, or the close of the consumer, still delivers an assignment that was waiting
        for partition in partitions:
            if partition.partition >= self._config.tasks:
                now = len(consumer.list_topics(partition.topic, timeout=ANSWER_S).topics[partition.topic].partitions)
                problem = topic_problem(self._config, partition.topic, now, self._published_tasks())
                if problem is not None:
                    raise problem
        at_start = [TopicPartition(partition.topic, partition.partition, OFFSET_BEGINNING) for partition in partitions]
        in_steps = isinstance(consumer, GroupConsumer) and consumer.in_steps
        try:
            (consumer.incremental_assign if in_steps else consumer.assign)(at_start)
        except KafkaException:
            if in_steps:
                raise
            consumer.incremental_assign(at_start)
        self._health.assigned()
        if in_steps and not partitions:
            return  # what stays is not listed
        self._take(partitions)

    def _take(self, partitions: list[TopicPartition]) -> None:
        self._story.assigned(partitions)
        self._tasks.add(partitions)
        self._to_pause += partitions

    def _pause_assigned(self) -> None:
        """The delivery drops messages that the poll has already returned; the seek reads them again."""
        self._consumer.pause(self._to_pause)
        self._to_pause = []
        for owned in self._tasks:
            self._has_inputs(owned)

    def _has_inputs(self, owned: AssignedTask) -> bool:
        """Whether the task has its partition of every topic. Raises: ConfigError if it will not get them; MissingState
        if a topic was deleted.

        Brokers that assign partitions give each one as soon as its last owner has released it.
        """
        if len(owned.inputs) == len(self._topics):
            return True
        if self._by_brokers and self._clock.monotonic() - owned.assigned_s < DEADLINE_S:
            return False
        self._inputs.check(self._consumer, self._topics, self._published_tasks())
        missing = set(self._topics) - {position.place.topic for position in owned.inputs}
        setting = "group.remote.assignor" if self._by_brokers else "partition.assignment.strategy"
        raise ConfigError(
            f"{task_name(owned.index)} was assigned without its partition of {', '.join(sorted(missing))}",
            hint=f"set {setting} of the consumer to range",
        )

    def _start_restored(self) -> None:
        self._story.waiting()
        restored = [
            owned
            for owned in self._tasks
            if not owned.held
            and self._has_inputs(owned)
            and any(position.next is None for position in owned.inputs)
            and owned.restored()
            and self._delivery.announce(owned)
        ]
        started = [place for owned in self._tasks.located(restored) for place in self._start(owned)]
        if started:
            # all at once: while the client waits for new messages of one, a question about another waits, too
            self._consumer.resume(started)

    def _start(self, owned: AssignedTask) -> list[TopicPartition]:
        """Go to the checkpoint's input offsets. If the client has not begun to fetch yet, the next turn tries again.

        Returns: the partitions to resume. Those of a task that begins at the end are resumed together.
        """
        started: list[TopicPartition] = []
        task = owned.task
        skip = task is not None and task.may_skip_input
        for position in owned.inputs:
            if position.next is not None:
                continue
            known = owned.offsets.get(position.source)
            place = position.place
            offset = position.start(known, skip=skip, at_end=owned.at_end)
            try:
                self._consumer.seek(TopicPartition(place.topic, place.partition, offset))
            except KafkaException as error:
                if error.args[0].code() == KafkaError._STATE:
                    return [] if owned.at_end else started
                raise UnavailableError(f"seeking failed: {error.args[0].str()}", topic=place.topic) from error
            position.next = offset
            owned.dirty |= known not in (None, offset)  # publish a permitted skip, even without new input
            started.append(place)
        if owned.at_end:
            started = [position.place for position in owned.inputs]
            owned.dirty = True
            self._due = self._now  # until the commit, whoever opens the task begins at a later end
        # a migration must not wait for input
        owned.dirty |= task is not None and task.has_new_factories
        self._story.opened(owned)
        return started

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Commit and close the leaving tasks, before another member may open them."""
        leaving = {partition.partition for partition in partitions}
        owned = [at.place for task in self._tasks if task.index in leaving for at in task.inputs]
        if isinstance(consumer, GroupConsumer) and not consumer.in_steps:
            self._health.revoked()  # in steps, it keeps the others, and nothing may follow
        self._story.revoked(partitions)
        try:
            self._pass_ends()
            self._tasks.commit_and_wait(leaving, self._stopping_asked, self._hurried)
        except MissingState:
            raise  # input was skipped, and the next owner would not know
        except StatemgrError as error:
            tell(
                log, Event.FAILED, "a last commit failed, and the next owner processes that input again: %s", error,
                level=logging.WARNING,
            )  # fmt: skip
        finally:
            self._let_go(leaving)
        self._keep_rest(partitions, owned)

    def _lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Close without a commit, because another member may already own the partitions."""
        self._health.lost()
        self._story.revoked(partitions, lost=True)
        self._let_go({partition.partition for partition in partitions})

    def _let_go(self, tasks: set[int]) -> None:
        self._to_pause = [partition for partition in self._to_pause if partition.partition not in tasks]
        self._tasks.close(tasks)

    def _keep_rest(self, left: list[TopicPartition], owned: list[TopicPartition]) -> None:
        """Keep tasks of which only a part has ``left``, and this member still has the rest.

        Brokers take all partitions of a task together, unless a topic is deleted or a member does not see it for a
        moment. So the task waits until its other partitions are back (:meth:`_has_inputs`), and opens then.
        """
        gone = {(partition.topic, partition.partition) for partition in left}
        rest = [place for place in owned if (place.topic, place.partition) not in gone]
        if rest and not self._ending:
            self._take(rest)

    # --- commits -------------------------------------------------------------------------------------------------

    def _pass_ends(self) -> None:
        if self._settled:
            self._tasks.pass_ends()

    def _commit(self, now: float) -> None:
        """The commits of many tasks begin in several turns, and few are in progress at once, so that a stop and
        a rebalance need not wait for all."""
        if now >= self._due and not self._to_commit:
            self._pass_ends()
            self._due = now + self._interval
            self._to_commit = list(self._tasks)
        self._to_commit += [owned for owned in self._tasks if owned.commits_early and owned not in self._to_commit]
        with self._inputs.shared():
            in_progress = [owned for owned in self._tasks if owned.committing]
            for owned in in_progress:
                with self._reopening(owned):
                    checkpoint = owned.ended_commit()
                    if checkpoint is not None:
                        self._tasks.store_offsets(owned, checkpoint.input_offsets)
            free = _COMMITS_AT_ONCE - sum(owned.committing for owned in in_progress)
            until = self._clock.monotonic() + _LOOK_S
            while self._to_commit and free and not self._asked_to_stop and self._clock.monotonic() <= until:
                owned = self._to_commit.pop()
                if not owned.lost.is_set():
                    with self._reopening(owned):
                        owned.start_commit()
                    free -= owned.committing

    @contextmanager
    def _reopening(self, owned: AssignedTask) -> Iterator[None]:
        """A block that opens the task again if its local state turns out to be lost, or cannot be fetched."""
        try:
            yield
        except (LocalStateLost, StateUnreachable) as lost:
            self._open_again(owned, lost)

    def _open_again(self, owned: AssignedTask, lost: LocalStateLost | StateUnreachable) -> None:
        """Restore a task whose local files are damaged or missing, and go back to its checkpoint. If a part of its
        state cannot be fetched, do that as soon as the blob store can be reached.

        Raises: ``lost`` if files were damaged before since its last commit.
        """
        waits = isinstance(lost, StateUnreachable)
        if owned.reopened and not waits:
            raise lost
        why = "it waits for its blob store" if waits else "its local files are damaged or missing"
        tell(
            log, Event.RETRYING, "%s: paused and opened again, because %s: %s",
            task_name(owned.index), why, lost.message, level=logging.WARNING, task=task_name(owned.index),
        )  # fmt: skip
        self._consumer.pause([position.place for position in owned.inputs])
        self._tasks.open_again(owned, waits=waits)

    def _hold_back(self) -> None:
        for owned in self._tasks:
            held = owned.hold_back()
            if held == owned.held:
                continue
            owned.held = held
            started = [position.place for position in owned.inputs if position.next is not None]
            (self._consumer.pause if held else self._consumer.resume)(started)
            self._story.held(owned, held)

    # --- the end -------------------------------------------------------------------------------------------------

    def _stopping_asked(self) -> bool:
        if self._asked_to_stop:
            self._stopping()
        return self._asked_to_stop

    def _stopping(self) -> None:
        """Give up the work in progress ``task.shutdown.ms`` from now."""
        self._hurry_at = min(self._hurry_at, self._clock.elapsed() + self._stop_s * _HURRY)
        self._deadline.attempt("giving up what is in progress", self._give_up_late)

    def _hurried(self) -> bool:
        """Whether a stop has so little time left that nothing new should begin. Any thread may call this."""
        return self._clock.elapsed() >= self._hurry_at

    def _give_up_late(self) -> None:
        if self._deadline.pause(self._stop_s):
            self._services.give_up()

    def _install_signals(self) -> dict[int, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {number: signal.signal(number, self.stop) for number in (signal.SIGTERM, signal.SIGINT)}
