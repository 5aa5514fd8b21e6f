"""Fixtures that all layers of the suite share: the broker, the S3 server and a small file system."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from statemgr.errors import PrerequisiteMissing
from statemgr.testing.memory_servers import MemoryServers
from statemgr_tools.dev.kafka import KafkaBroker
from statemgr_tools.dev.signals import SIGNALS
from tests import servers
from tests.scheduling import OutlivingScheduling
from tests.secured import SecuredKafka
from tests.small_disks import mounted

_LAYERS = {
    "crash": pytest.mark.crash,
    "integration": pytest.mark.integration,
    "property": pytest.mark.property,
    "spark": pytest.mark.spark,
}

# Otherwise the Spark Connect client would restart its threads in each child of this process, between fork and exec.
# That breaks the child, and no session could start afterwards.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# A run starts hundreds of Python processes. Without bytecode on the disk, each would compile the project once more, and
# each worker would rewrite the assertions of all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

_SERVERS = {"kafka", "s3", "forgetful", "own_kafka", "secured_kafka"}


def pytest_configure(config: pytest.Config) -> None:
    """Set up the run in the process that the user started. The workers inherit its directory.

    SIGTERM and a terminal that is closed end it as Ctrl-C does, which stops the run's servers.
    """
    if not hasattr(config, "workerinput"):
        servers.begin_run()
    for number in SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config) -> None:
    """Name a test when it fails, and not only after the last one: a run that is ended early says what failed. Say why a
    test that is run once more has failed."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return
    if isinstance(report, pytest.CollectReport):
        return  # pytest shows what cannot be imported
    if report.failed:
        reporter.write_line(f"\nFAILED {report.nodeid} ({report.when}, after {report.duration:.0f} s)")
    elif report.outcome == "rerun":  # type: ignore[comparison-overlap]
        reporter.write_line(f"\nRERUN {report.nodeid} ({report.when}, after {report.duration:.0f} s)")
        reporter.write_line(report.longreprtext[-4000:])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Say how a worker died: -9 is a SIGKILL from outside, other signals come with the stacks of its threads."""
    if error:
        died = node.gateway._io.popen.wait(10)
        reporter = node.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"\n{node.gateway.id} ended with status {died}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OutlivingScheduling | None:
    """Distribute tests so that a worker that dies does not end the run."""
    return OutlivingScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the run's servers after the last worker has ended."""
    if not hasattr(config, "workerinput"):
        servers.end_run()


@pytest.hookimpl(tryfirst=True)  # must run before the plugin that distributes groups to workers reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its layer. A test outside the layers that uses a server is an integration test.

    With ``STATEMGR_TEST_SHARE=1/3``, only one third of the tests is left, the same in each run.
    """
    number, _, shares = os.environ.get("STATEMGR_TEST_SHARE", "0/1").partition("/")
    mine: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        (mine if crc32(item.nodeid.encode()) % int(shares) == int(number) else others).append(item)
    if others:
        items[:] = mine
        config.hook.pytest_deselected(items=others)
    root = Path(__file__).parent
    for item in items:
        place = item.path.relative_to(root)
        layer = "crash" if place.name.startswith("test_killed") else next(filter(_LAYERS.get, place.parts), "")
        if layer:
            item.add_marker(_LAYERS[layer])
            if layer == "spark":
                # Each worker with such tests starts and warms up a JVM. One is enough, except for the long tests, with
                # which one worker would finish last. More than two JVMs would wait for each other.
                half = crc32(item.path.name.encode()) % 2 if item.get_closest_marker("long") else 0
                item.add_marker(pytest.mark.xdist_group(f"spark-{half}"))
        if layer not in ("crash", "spark") and _SERVERS & set(getattr(item, "fixturenames", ())):
            item.add_marker(_LAYERS["integration"])
        if item.get_closest_marker("heavy") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))
        if "secured_kafka" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("secured"))
    # These tests stay on few workers and take the longest, so they start first.
    items.sort(key=lambda item: item.get_closest_marker("spark") is None)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Spare the garbage collector the thousands of collected tests, which live until the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def kafka() -> servers.KafkaServer:
    """Return the run's broker. Tests share it and get unique names from ``fresh_name``."""
    return servers.kafka_server()


@pytest.fixture(scope="session")
def forgetful() -> servers.KafkaServer:
    """Return the run's broker that forgets a transactional ID after 1.5 s without use."""
    return servers.forgetful_server()


@pytest.fixture(scope="session")
def secured_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    """Start a broker with an authorizer. The tests that use it run on one worker."""
    with SecuredKafka(tmp_path_factory.mktemp("secured-kafka")) as broker:
        yield broker


@pytest.fixture(scope="session")
def s3() -> servers.S3Server:
    """Return the run's S3 server. Tests share its bucket and get unique prefixes from ``fresh_prefix``."""
    try:
        return servers.s3_server()
    except PrerequisiteMissing as missing:  # of a kind that the environment asks for
        pytest.skip(f"{missing.message}: {missing.hint}")


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator[Callable[..., KafkaBroker]]:
    """Return a factory of local brokers that a test may stop, kill, suspend and restart: ``own_kafka(**settings)``.

    Settings are broker properties by name: ``own_kafka(**{"log.cleaner.backoff.ms": "100"})``.
    """
    brokers: list[KafkaBroker] = []

    def start(**settings: str) -> KafkaBroker:
        broker = KafkaBroker(
            directory=tmp_path / f"kafka-{len(brokers)}", settings={**servers.BROKER_SETTINGS, **settings}
        )
        brokers.append(broker)
        broker.start()
        return broker

    yield start
    for broker in brokers:
        broker.delete()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 16 MiB with 200 inodes."""
    target = tmp_path / "disk"
    with mounted(target, "size=16m,nr_inodes=200"):
        yield target


@pytest.fixture(autouse=True)
def _no_ambient_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the AWS credentials and endpoint of the person who runs the tests out of the tests."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(name="servers")
def memory_servers(request: pytest.FixtureRequest) -> Iterator[MemoryServers]:
    """Servers in memory, of the job ``CONFIG`` of the test's file."""
    made = MemoryServers(request.module.CONFIG)
    made.open()
    yield made
    made.close()
