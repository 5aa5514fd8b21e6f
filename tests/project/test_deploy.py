"""The files of deploy/: what Kubernetes' schemas, the configuration and the metrics say about them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from statemgr import JobConfig
from tests.docs.blocks import blocks

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
#: Kinds that others define: the schemas of these resources are with their operators (docs/deploy.md).
_OF_OPERATORS = {"PodMonitor", "ScaledObject", "ServiceMonitor", "SparkApplication"}


def _resources(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))


def _all() -> dict[str, dict[str, Any]]:
    return {resource["kind"]: resource for file in FILES for resource in _resources(file)}


@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_kubernetes_takes_every_resource(version: str) -> None:
    """Each field exists and has its type, by the strict schemas of an old version and of the newest."""
    seen = set()
    for file in FILES:
        for resource in _resources(file):
            if resource["kind"] not in _OF_OPERATORS:
                kubernetes_validate.validate(resource, version, strict=True)
            seen.add(resource["kind"])
    expected = {"ConfigMap", "StatefulSet", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler"}
    assert seen == expected | _OF_OPERATORS


def test_a_field_that_does_not_exist_is_found() -> None:
    """The checker is strict: a typing error is no silent nothing."""
    wrong = _all()["PodDisruptionBudget"] | {"spec": {"maxUnavailabel": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


def test_the_parts_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration loads, and ports, paths, names and metrics are those that the other files use."""
    monkeypatch.setenv("POD_NAME", "orders-0")
    found = _all()
    config = JobConfig.from_mapping(tomllib.loads(found["ConfigMap"]["data"]["job.toml"]))
    assert config.kafka_client("consumer")["group.instance.id"] == "orders-0"
    pod = found["StatefulSet"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > config.shutdown_ms / 1000 + 10
    (container,) = pod["containers"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(config.state_dir), "/app/job.toml"} <= mounts
    assert container["ports"] == [{"name": "metrics", "containerPort": config.get("metrics.port")}]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    claims = found["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert mounted == {one["name"] for one in pod["volumes"]} | {one["metadata"]["name"] for one in claims}
    assert (container["livenessProbe"]["httpGet"]["path"], container["readinessProbe"]["httpGet"]["path"]) == (
        "/healthz",
        "/readyz",
    )
    for scaler in ("ScaledObject", "HorizontalPodAutoscaler"):
        spec = found[scaler]["spec"]
        assert spec["scaleTargetRef"]["name"] == found["StatefulSet"]["metadata"]["name"]
        assert spec.get("maxReplicaCount", spec.get("maxReplicas")) == config.tasks
    monitoring = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    texts = [file.read_text(encoding="utf-8") for file in FILES if file.name.startswith("scale-")]
    for name in re.findall(r"statemgr_[a-z_]+", "".join(texts)):
        assert f"`{name}`" in monitoring
    labels = found["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("Service", "PodDisruptionBudget", "ServiceMonitor"):
        selector = found[kind]["spec"]["selector"]
        assert selector.get("matchLabels", selector) == labels


def test_topics_of_the_job_survive_the_loss_of_a_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The brokers' default may be one replica, and the checkpoint topic is the only record of what is current."""
    monkeypatch.setenv("POD_NAME", "orders-0")
    config = JobConfig.from_mapping(tomllib.loads(_all()["ConfigMap"]["data"]["job.toml"]))
    assert config.checkpoint_replication_factor == 3
    assert config.topic_settings == {"min.insync.replicas": "2"}


def test_prometheus_finds_each_process_that_serves_metrics() -> None:
    """The monitors select the labels and the port of the service's pods, and of the driver. Executors serve none."""
    found = _all()
    driver = found["SparkApplication"]["spec"]["driver"]
    pods = found["PodMonitor"]["spec"]
    assert pods["selector"]["matchLabels"] == {**driver["labels"], "spark-role": "driver"}
    (endpoint,) = pods["podMetricsEndpoints"]
    assert [endpoint["port"]] == [port["name"] for port in driver["ports"]]
    (of_service,) = found["ServiceMonitor"]["spec"]["endpoints"]
    assert [of_service["port"]] == [port["name"] for port in found["Service"]["spec"]["ports"]]
    assert endpoint["honorLabels"]
    assert of_service["honorLabels"]


def test_the_image_runs_as_nobody_and_compiles_nothing() -> None:
    """The user is the one of the pod, and pip takes wheels only."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    user = _all()["StatefulSet"]["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    assert f"\nUSER {user}\n" in text
    assert "--only-binary :all:" in text
    assert "HEALTHCHECK" in text
    assert "9100/healthz" in text
    assert "apt-get" not in text


def test_the_image_of_a_query_has_a_python_of_its_own() -> None:
    """Spark's image has an older Python than statemgr needs. Driver and executors use one that statemgr supports."""
    text = (DEPLOY / "spark.Dockerfile").read_text(encoding="utf-8")
    final = text.rpartition("\nFROM ")[2]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (version,) = re.findall(r"^ARG PYTHON=(.+)$", text, re.MULTILINE)
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]
    assert not re.search(r"(?<!uv )\bpip3? ", text), "the pip of the image belongs to its own Python"
    assert "UV_PYTHON_INSTALL_DIR=/opt/python\n" in text, "not in a home directory, which only its user can read"
    for directory in ("/opt/python", "/opt/statemgr"):
        assert f"COPY --from=build {directory} {directory}\n" in final
    assert dict(re.findall(r"(PYSPARK_\w+)=(\S+)", final)) == dict.fromkeys(
        ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"), "/opt/statemgr/bin/python"
    )
    beside = {one for one in project["optional-dependencies"]["spark"] if not one.startswith("pyspark")}
    assert set(re.findall(r"'(\S+)'", text)) == beside


@pytest.mark.parametrize("file", ["Dockerfile", "spark.Dockerfile"])
def test_the_user_of_an_image_can_read_its_configuration(file: str) -> None:
    """`statemgr init` writes job.toml with mode 0600, so the copy in the image belongs to the user that reads it."""
    text = (DEPLOY / file).read_text(encoding="utf-8")
    (user,) = re.findall(r"^USER (.+)$", text.rpartition("\nFROM ")[2], re.MULTILINE)
    (copied,) = re.findall(r"^COPY (.+) job\.toml ", text, re.MULTILINE)
    assert copied.startswith(f"--chown={user}:{user} ")


def test_spark_submit_takes_the_settings_of_the_operator() -> None:
    """The command of docs/deploy.md sets what spark.yaml does. Packages go where the user of the image may write."""
    spec = _all()["SparkApplication"]["spec"]
    (command,) = blocks("docs/deploy.md", "## Spark on Kubernetes", "sh")
    assert dict(re.findall(r"--conf (\S+?)=(\S+)", command)) == {
        "spark.kubernetes.container.image": spec["image"],
        "spark.kubernetes.authenticate.driver.serviceAccountName": spec["driver"]["serviceAccount"],
        **spec["sparkConf"],
    }
    assert "--packages" not in command
    assert spec["sparkConf"]["spark.jars.ivy"].startswith("/tmp/")


def test_the_page_shows_the_commands() -> None:
    """docs/deploy.md names every file of deploy/."""
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    for file in [*FILES, *DEPLOY.glob("*Dockerfile")]:
        assert f"{file.relative_to(ROOT)}" in page
    assert blocks("docs/deploy.md", "# In a cluster", "sh")
