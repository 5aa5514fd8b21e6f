"""A real Apache Samza job for the adoption tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.old_jobs import Adopter, make, write
from tests.peers import environments
from tests.servers import KafkaServer

_STORAGE = "org.apache.samza.storage"
KAFKA, BLOBS = (
    f"{_STORAGE}.KafkaChangelogStateBackendFactory",
    f"{_STORAGE}.blobstore.BlobStoreStateBackendFactory",
)


@dataclass
class SamzaJob:
    """A job with the store ``counts``: the number of rows of each key since its last row ``0``.

    ``program`` and ``stores``: of a job with several stores, see ``SamzaShapes.java``.
    """

    kafka: KafkaServer
    directory: Path
    partitions: int = 2
    backends: tuple[str, ...] = (KAFKA,)
    program: str = "Counts"
    stores: tuple[str, ...] = ("counts",)
    expected: list[dict[bytes, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Samza replaces underscores in the checkpoint topic's name
        self.name = self.kafka.fresh_name("old") + "_samza"
        self.topic, self.changelog = f"{self.name}-rows", f"{self.name}-counts"
        self.blobs = self.directory / "samza-blobs"
        make(self.kafka, self.topic, self.partitions, cleanup__policy="delete")
        self.expected = [{} for _ in range(self.partitions)]

    @property
    def checkpoints(self) -> str:
        """Return the checkpoint topic."""
        return f"__samza_checkpoint_ver_1_for_{self.name.replace('_', '-')}_1"

    def send(self, rows: Mapping[int, list[tuple[str, str]]], *, count: bool = True) -> int:
        """Write rows by partition and return their number. Without ``count``, the expected state leaves them out."""
        for partition, of in rows.items():
            write(self.kafka, self.topic, partition, [(key.encode(), value.encode()) for key, value in of])
        if count:
            self.count(rows)
        return sum(map(len, rows.values()))

    def count(self, rows: Mapping[int, list[tuple[str, str]]]) -> None:
        """Add rows to the expected state."""
        for partition, of in rows.items():
            counts = self.expected[partition]
            for key, value in of:
                if value == "0":
                    counts.pop(key.encode(), None)
                else:
                    counts[key.encode()] = b"%d" % (int(counts.get(key.encode(), b"0")) + 1)

    def run(self, rows: int, *, status: int = 0, **more: str) -> None:
        """Run the job until it has processed ``rows`` rows. Names of settings use ``__`` for ``.``."""
        file = self.directory / "job.properties"
        settings = self.settings(rows) | {key.replace("__", "."): value for key, value in more.items()}
        file.write_text("".join(f"{key}={value}\n" for key, value in settings.items() if value))
        environments.run([*environments.samza_java(self.program), file], status=status)

    def settings(self, rows: int) -> dict[str, str]:
        """Return the job's configuration."""
        samza, servers = "org.apache.samza", self.kafka.bootstrap_servers
        found = {
            "job.name": self.name,
            "job.id": "1",
            "job.default.system": "kafka",
            "job.jmx.enabled": "false",
            "job.coordinator.factory": f"{samza}.standalone.PassthroughJobCoordinatorFactory",
            "task.name.grouper.factory": f"{samza}.container.grouper.task.SingleContainerGrouperFactory",
            "processor.id": "0",
            "task.class": self.program,
            "task.inputs": f"kafka.{self.topic}",
            "task.checkpoint.factory": f"{samza}.checkpoint.kafka.KafkaCheckpointManagerFactory",
            "task.checkpoint.system": "kafka",
            "task.checkpoint.replication.factor": "1",
            "task.commit.ms": "500",
            "task.commit.max.delay.ms": "0",
            "systems.kafka.samza.factory": f"{samza}.system.kafka.KafkaSystemFactory",
            "systems.kafka.samza.key.serde": "string",
            "systems.kafka.samza.msg.serde": "string",
            "systems.kafka.samza.offset.default": "oldest",
            "systems.kafka.consumer.zookeeper.connect": "none",
            "systems.kafka.consumer.bootstrap.servers": servers,
            "systems.kafka.producer.bootstrap.servers": servers,
            "serializers.registry.string.class": f"{samza}.serializers.StringSerdeFactory",
            "job.logged.store.base.dir": str(self.directory / "samza"),
            "job.non-logged.store.base.dir": str(self.directory / "samza"),
            "rows": str(rows),
        }
        for store in self.stores:
            found |= self.store(store)
            if KAFKA in self.backends:
                found |= {f"stores.{store}.changelog": f"kafka.{self.name}-{store}"}
                found |= {f"stores.{store}.changelog.replication.factor": "1"}
        if BLOBS in self.backends:
            found |= {"blob.store.manager.factory": "Blobs$Factory", "blob.store.admin.factory": "Blobs$Factory"}
            found |= {"blobs.directory": str(self.blobs)}
        return found

    def store(self, name: str) -> dict[str, str]:
        """Return the settings of a store, but for its changelog."""
        factory = "org.apache.samza.storage.kv.RocksDbKeyValueStorageEngineFactory"
        backends = dict.fromkeys(("backup.factories", "restore.factories"), ",".join(self.backends))
        # Samza sends what its cache has when it commits, and does not wait for that before it asks where the changelog
        # ends: on a busy machine, the checkpoint may then have an older end
        uncached = {"object.cache.size": "0", "write.batch.size": "0"}
        settings = {"factory": factory, "key.serde": "string", "msg.serde": "string", **backends, **uncached}
        return {f"stores.{name}.{key}": value for key, value in settings.items()}

    def adopter(self, *more: str) -> Adopter:
        """Return a runner of ``statemgr adopt`` for the job."""
        return Adopter(self.kafka, self.directory, "--from", "samza", "--job", self.name, *more)
