"""Metrics whose values are asked for when Prometheus scrapes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from statemgr.telemetry.metric_declarations import named

log = logging.getLogger(__name__)
#: The values of the labels after ``job``, and the number.
Series = Iterable[tuple[tuple[str, ...], float]]
Source = Callable[[], Series]


class Asked(Collector):
    """Asks its sources at each scrape. A source that fails is left out of the scrape.

    Registers itself, so that the series exist only as long as their source is watched.
    """

    def __init__(self, job: str, registry: CollectorRegistry) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._sources: list[tuple[str, Source]] = []
        registry.register(self)

    def watch(self, name: str, source: Source) -> None:
        """Ask for the series of a declared metric (without ``statemgr_``) from now on."""
        named(name)
        with self._lock:
            self._sources.append((name, source))

    def unwatch(self, source: Source) -> None:
        """Ask ``source`` no more. Waits for a scrape in progress."""
        with self._lock:
            self._sources = [entry for entry in self._sources if entry[1] != source]

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing: the names are known from the declarations."""
        return []

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """The series of all sources, by metric."""
        with self._lock:
            families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
            for name, source in self._sources:
                declared = named(name)
                kind = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
                family = families.setdefault(name, kind(declared.name, declared.text, labels=["job", *declared.labels]))
                try:
                    for labels, value in source():
                        family.add_metric([self._job, *labels], value)
                except Exception:  # a scrape shows what it can
                    log.debug("the values of %s are unknown", declared.name, exc_info=True)
        yield from families.values()
