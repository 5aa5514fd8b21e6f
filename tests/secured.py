"""A broker with an authorizer, an S3 server with bucket policies, and one user of both with chosen rights."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from statemgr_tools.dev.kafka import KafkaBroker
from statemgr_tools.dev.process import ServerProcess, free_port, spawn, wait_until_ready
from statemgr_tools.dev.s3 import S3Server, find_versitygw

USER, PASSWORD = "job-user", "job-users-password"
BUCKET = "shared"
PAGE = Path(__file__).parents[1] / "docs" / "security.md"
_ROW = re.compile(r"^\| (Kafka|S3) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$")
_KINDS = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional ID": ResourceType.TRANSACTIONAL_ID,
}


@dataclass(frozen=True)
class Right:
    """One right on one resource and its purpose, as the security page lists it."""

    server: str
    resource: str
    right: str
    purpose: str


def documented(names: Mapping[str, str]) -> list[Right]:
    """Return the rows of the page, one right each. ``names`` replaces placeholders such as ``<job.name>``."""
    found = []
    for row in filter(None, map(_ROW.match, PAGE.read_text().splitlines())):
        resource = re.sub(r"<[^>]+>", lambda name: names[name[0]], row[2])
        for right in row[3].split(","):
            found.append(Right(row[1], resource.strip(), right.strip().strip("`"), row[4].strip()))
    assert len(found) > 20
    return found


@dataclass
class SecuredKafka:
    """A broker that treats a plain connection as a super user. Over SASL it accepts one user, whom ACLs restrict."""

    directory: Path
    broker: KafkaBroker = field(init=False)
    sasl_port: int = field(default_factory=free_port)

    def __enter__(self) -> SecuredKafka:
        port, controller = free_port(), free_port()
        jaas = "org.apache.kafka.common.security.plain.PlainLoginModule required"
        listeners = f"PLAINTEXT://127.0.0.1:{port},SASL://127.0.0.1:{self.sasl_port}"
        settings = {
            "listeners": f"{listeners},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": listeners,
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL:SASL_PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.name.sasl.sasl.enabled.mechanisms": "PLAIN",
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl.plain.sasl.jaas.config": f'{jaas} user_{USER}="{PASSWORD}";',
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        }
        self.broker = KafkaBroker(directory=self.directory, port=port, controller_port=controller, settings=settings)
        self.broker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.broker.delete()

    def make_topic(self, name: str) -> None:
        """Create a topic with one partition."""
        admin = self._admin()
        admin.create_topics([NewTopic(name, 1)])[name].result(30)

    @property
    def settings(self) -> dict[str, object]:
        """Return the settings of a job that connects as the user."""
        return {
            "kafka.bootstrap.servers": f"127.0.0.1:{self.sasl_port}",
            "kafka.security.protocol": "SASL_PLAINTEXT",
            "kafka.sasl.mechanism": "PLAIN",
            "kafka.sasl.username": USER,
            "kafka.sasl.password": PASSWORD,
        }

    def allow(self, rights: Iterable[Right]) -> None:
        """Give the user these rights and no others."""
        everything = AclBindingFilter(
            ResourceType.ANY, None, ResourcePatternType.ANY, None, None, AclOperation.ANY, AclPermissionType.ANY
        )
        admin = self._admin()
        for future in admin.delete_acls([everything]).values():
            future.result(30)
        bindings = [_binding(right) for right in rights if right.server == "Kafka"]
        for made in admin.create_acls(bindings).values():
            made.result(30)

    def _admin(self) -> AdminClient:
        # no client is kept: it would outlive the broker and log errors once a second
        return AdminClient({"bootstrap.servers": self.broker.bootstrap_servers})


def _binding(right: Right) -> AclBinding:
    kind, _, name = right.resource.partition(" `")
    name = name.strip("`")
    pattern = ResourcePatternType.PREFIXED if name.endswith("*") else ResourcePatternType.LITERAL
    operation = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", right.right).upper()
    return AclBinding(
        _KINDS[kind], name.rstrip("*"), pattern, f"User:{USER}", "*", AclOperation[operation], AclPermissionType.ALLOW
    )


@dataclass
class SecuredS3:
    """A versitygw server with one bucket. The root user owns it, and a policy opens it to the user."""

    directory: Path
    server: S3Server = field(init=False)

    def __enter__(self) -> SecuredS3:
        program = find_versitygw()
        assert program is not None
        server = self.server = S3Server(directory=self.directory, bucket=BUCKET, kind="versitygw")
        for name in ("objects/" + BUCKET, "iam", "metadata"):
            (self.directory / name).mkdir(parents=True)
        command = [
            str(program), "--port", f"127.0.0.1:{server.port}", "--iam-dir", str(self.directory / "iam"),
            "--iam-cache-disable", "--quiet", "posix", "--sidecar", str(self.directory / "metadata"),
            str(self.directory / "objects"),
        ]  # fmt: skip
        environment = os.environ | {"ROOT_ACCESS_KEY": server.access_key, "ROOT_SECRET_KEY": server.secret_key}
        self._process: ServerProcess = spawn(command, log=self.directory / "s3.log", environment=environment)
        wait_until_ready(self._process, server.answers, name="the S3 server", deadline_s=300)
        admin = [str(program), "admin", "-a", server.access_key, "-s", server.secret_key, "-er", server.endpoint]
        subprocess.run([*admin, "create-user", "-a", USER, "-s", PASSWORD, "-r", "user"], check=True, timeout=300)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop(2.0)

    def settings(self, prefix: str) -> dict[str, object]:
        """Return the settings of a job that connects as the user."""
        return {
            "blob.store.uri": f"s3://{BUCKET}/{prefix}",
            "blob.store.s3.endpoint": self.server.endpoint,
            "blob.store.s3.region": self.server.region,
            "blob.store.s3.access.key": USER,
            "blob.store.s3.secret.key": PASSWORD,
            "blob.store.s3.path.style": True,
        }

    def root(self) -> Any:
        """Return a client with all rights."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.server.endpoint,
            region_name=self.server.region,
            aws_access_key_id=self.server.access_key,
            aws_secret_access_key=self.server.secret_key,
        )

    def allow(self, rights: Iterable[Right]) -> None:
        """Give the user these rights and no others."""
        by_resource: dict[str, list[str]] = {}
        for right in rights:
            if right.server == "S3":
                by_resource.setdefault(right.resource.strip("`"), []).append(right.right)
        statements = [
            {
                "Effect": "Allow",
                "Principal": {"AWS": [USER]},
                "Action": actions,
                "Resource": f"arn:aws:s3:::{resource}",
            }
            for resource, actions in by_resource.items()
        ]
        client = self.root()
        client.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps({"Version": "2012-10-17", "Statement": statements}))
        client.close()
