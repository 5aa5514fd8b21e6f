"""Orders of a rescale to other machines, such as Spark's executors, and their answers, both as JSON text. Pure.

1. the driver, which is the process that rescales, makes an :class:`Order` from its plan for each unit
2. another machine builds the unit in a directory that this try alone uses (``spread``). It takes
   no lock and publishes nothing. Its blobs have names of their own, and expire unless the driver publishes them. Before
   it writes to a new changelog, it fences the earlier tries
3. the driver notes the answer in the unit's directory (:mod:`statemgr.operations.rescale.build`)

So the same order may be carried out several times, also at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from statemgr.config import JobConfig
from statemgr.ids import task_name
from statemgr.model.checkpoint import CheckpointRecord, Layout
from statemgr.model.codecs import decode_checkpoint, encode_checkpoint
from statemgr.model.content import Content
from statemgr.operations.rescale.built import BuiltUnit, NewStore, Unit
from statemgr.operations.rescale.one_store import StoredStore
from statemgr.operations.rescale.plan import RescalePlan
from statemgr.ports import TopicInfo


@dataclass(frozen=True)
class Order:
    """A unit to build, or to look at.

    Attributes:
        plan: it has at least the records of the unit's old tasks.
        new_config: the configuration of the new layout.
        partitioners: the one by which the keys are spread. If there are several, only look which of them fit.
        changelog: the store's new changelog, if it has one.
    """

    plan: RescalePlan
    new_config: JobConfig
    unit: Unit
    partitioners: Sequence[str]
    changelog: TopicInfo | None = None

    def to_json(self) -> str:
        """Secrets that the configuration refers to stay references."""
        plan, unit = self.plan, self.unit
        records = {}
        for name in map(task_name, unit.sources):
            record = plan.records[name]
            checkpoints = [encode_checkpoint(one).hex() for one in record.checkpoints]
            records[name] = {
                "layout": asdict(record.layout),
                "checkpoints": checkpoints,
                "target": record.checkpoints.index(plan.targets[name]),
            }
        return json.dumps(
            {
                "config": plan.config.to_mapping(),
                "new_config": self.new_config.to_mapping(),
                "records": records,
                "unit": [unit.store, list(unit.sources), list(unit.tasks)],
                "partitioners": list(self.partitioners),
                "grouping": plan.grouping,
                "changelog": None if self.changelog is None else asdict(self.changelog),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Order:
        """Raises: CorruptRecord, ConfigError."""
        told = json.loads(text)
        config, new_config = (JobConfig.from_mapping(told[key]) for key in ("config", "new_config"))
        records, targets = {}, {}
        for name, found in told["records"].items():
            checkpoints = tuple(decode_checkpoint(bytes.fromhex(data)) for data in found["checkpoints"])
            layout = Layout(**found["layout"])
            records[name] = CheckpointRecord(config.job_name, config.job_id, name, layout, checkpoints)
            targets[name] = checkpoints[found["target"]]
        return cls(
            RescalePlan(config, records, targets, new_config.tasks, told["grouping"]),
            new_config,
            Unit(*told["unit"]),
            told["partitioners"],
            None if told["changelog"] is None else TopicInfo(**told["changelog"]),
        )


#: Carries out an order, as JSON, on another machine, and returns the answer. Called from several threads.
Elsewhere = Callable[[str], str]


def answer(built: BuiltUnit) -> str:
    """What the driver needs to know of a unit that was built elsewhere: its content, and where it is durable."""
    stores = {task: {"size": store.size, **store.stored.to_json()} for task, store in built.stores.items()}
    return json.dumps({"keys": built.content.keys, "total": built.content.total, "stores": stores})


def answered(unit: Unit, directory: Path, told: Mapping[str, Any]) -> BuiltUnit:
    """A unit that was built elsewhere: no store is in its directory. Raises: ValueError, KeyError, TypeError,
    CorruptRecord (the answer of another version)."""
    stores = {
        task: NewStore(None, told["stores"][str(task)]["size"], StoredStore.from_json(told["stores"][str(task)]))
        for task in unit.tasks
    }
    return BuiltUnit(unit, directory, Content(told["keys"], told["total"]), stores, elsewhere=True)
