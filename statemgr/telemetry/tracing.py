"""OpenTelemetry spans of commits, publishes, restores and snapshots, with a child for each phase.

Needs ``opentelemetry-api`` (``pip install 'statemgr[otel]'``). Without it, or in an application that has configured no
tracer provider, nothing is recorded. ``docs/monitoring.md`` describes the spans.

A phase has a span from its announcement to the next one about the same store or task. A few phases are moments: they
become events of the flow's span.
"""

from __future__ import annotations

import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

from statemgr.phases import (
    Flow,
    Phase,
    add_flow_observer,
    add_observer,
    current_flow,
    remove_flow_observer,
    remove_observer,
    tasks_of,
)
from statemgr.version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

#: Phases that begin nothing which takes time.
_MOMENTS = {Phase.PREPARED, Phase.ACKNOWLEDGED, Phase.CLEANED_UP, Phase.MATERIALIZE, Phase.MATERIALIZED}
#: Phases of these kinds, announced on a thread that does not know its flow, belong to the open flow of their task.
_FLOW_OF = {"restore": "restore", "commit": "commit", "publish": "commit", "clean-up": "commit"}
_PREFIX = "statemgr."


def trace_job(job: str) -> Tracing | None:
    """Make spans for a job (``<name>/<ID>``) from now on; None if OpenTelemetry is not installed."""
    try:
        api = import_module("opentelemetry.trace")
    except ImportError:
        return None
    return Tracing(api, job)


class Tracing:
    """Observes the flows and the phases of one job. Safe to use from many threads."""

    def __init__(self, api: Any, job: str) -> None:

        self._api = api
        self._job = job
        self._tracer: Tracer = api.get_tracer("statemgr", __version__)
        self._lock = threading.Lock()
        self._open: dict[Flow, _Spans] = {}
        add_flow_observer(self, job)
        add_observer(self._phase, job)

    def close(self) -> None:
        """Observe nothing more. Flows in progress still end their spans."""
        remove_observer(self._phase)
        remove_flow_observer(self)

    def began(self, flow: Flow) -> None:
        """Begin the span of a flow, below the application's current span if there is one."""
        span = self._tracer.start_span(_PREFIX + flow.name, attributes={"statemgr.job": self._job.partition("/")[0]})
        for key, value in _where(flow.subject).items():
            span.set_attribute(key, value)
        if span.is_recording():
            with self._lock:
                self._open[flow] = _Spans(self._api, self._tracer, span)

    def ended(self, flow: Flow, error: BaseException | None) -> None:
        """End the span of a flow and of its last phases."""
        with self._lock:
            spans = self._open.pop(flow, None)
            if spans is None:
                return
            spans.end_phases()
        for name, value in flow.attributes.items():
            spans.root.set_attribute(_PREFIX + name, value)
        if error is not None:
            spans.root.record_exception(error)
            spans.root.set_status(self._api.Status(self._api.StatusCode.ERROR, type(error).__name__))
        spans.root.end()

    def _phase(self, phase: Phase, subject: str) -> None:
        if not self._open:
            return  # nothing is recorded
        current = current_flow()
        with self._lock:
            spans = self._open.get(current) if current is not None else self._of_task(phase, subject)
            if spans is not None:
                spans.phase(phase, subject)

    def _of_task(self, phase: Phase, subject: str) -> _Spans | None:
        wanted, tasks = _FLOW_OF.get(phase.value.partition(".")[0]), tasks_of(subject)
        for flow, spans in self._open.items():
            if flow.name == wanted and (flow.subject,) == tasks:
                return spans
        return None


class _Spans:
    """The span of a flow, and the open ones of its phases by subject."""

    def __init__(self, api: Any, tracer: Tracer, root: Span) -> None:
        self.root = root
        self._tracer = tracer
        self._context = api.set_span_in_context(root)
        self._phases: dict[str, Span] = {}

    def phase(self, phase: Phase, subject: str) -> None:
        """End the last phase of the subject, or of the whole task if the subject is one, and begin this one."""
        self.end_phases(subject)
        if phase in _MOMENTS:
            self.root.add_event(phase.value)
        else:
            where = _where(subject)
            self._phases[subject] = self._tracer.start_span(phase.value, context=self._context, attributes=where)

    def end_phases(self, subject: str | None = None) -> None:
        """End the phases of a subject; None: all."""
        for one in list(self._phases):
            if subject is None or one == subject or one.startswith(subject + "/") or subject.startswith(one + "/"):
                self._phases.pop(one).end()


def _where(subject: str) -> dict[str, str | int]:
    """The task and the store of a subject; of several tasks only their number, because there may be thousands."""
    tasks = tasks_of(subject)
    if len(tasks) > 1:
        return {"statemgr.tasks": len(tasks)}
    found: dict[str, str | int] = {}
    if tasks:
        found["statemgr.task"] = tasks[0]
        if store := subject.partition("/")[2]:
            found["statemgr.store"] = store
    return found
