"""An S3 server as a child process on this machine: versitygw, or moto if versitygw is not available, or SeaweedFS.

versitygw stores objects as files, checks checksums and answers conditional writes; moto keeps them in memory.
Writes in the server's own directory, and builds versitygw in the user's cache directory.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path

from statemgr.errors import PrerequisiteMissing
from statemgr_tools.dev.process import Server, ServerProcess, free_port, spawn, wait_until_ready
from statemgr_tools.dev.programs import go_program

VERSITYGW_VERSION = "v1.8.0"
SEAWEEDFS_VERSION = "v0.0.0-20261109003541-7506e5f91cd6"
REGION = "us-east-1"


@dataclass(kw_only=True)
class S3Server(Server):
    """An S3 server with one bucket and its own keys. A moto server loses its objects when it stops.

    Args:
        kind: ``versitygw``, ``moto`` or ``seaweedfs``. None takes the first available one.
    """

    name = "the S3 server"
    ready_deadline_s = 30.0
    grace_s = 5.0

    bucket: str = "statemgr"
    kind: str | None = None
    access_key: str = field(default_factory=lambda: "dev" + secrets.token_hex(8))
    secret_key: str = field(default_factory=lambda: secrets.token_hex(20), repr=False)
    region: str = REGION

    @property
    def endpoint(self) -> str:
        """The URL for clients. Buckets are in the path."""
        return f"http://127.0.0.1:{self.port}"

    def spawn(self) -> ServerProcess:
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.kind == "seaweedfs":
            return spawn(self._seaweedfs(), log=self.directory / "s3.log", cwd=self.directory)
        program = self.choose()
        moto = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        command = self._versitygw(program) if program else moto
        environment = os.environ | {"ROOT_ACCESS_KEY": self.access_key, "ROOT_SECRET_KEY": self.secret_key}
        return spawn(command, log=self.directory / "s3.log", environment=environment, cwd=self.directory)

    def choose(self) -> Path | None:
        """Choose versitygw or moto, unless ``kind`` is given. May build versitygw.

        Returns: the program of versitygw; None for moto. Raises: PrerequisiteMissing if this machine lacks it.
        """
        program = find_versitygw() if self.kind in (None, "versitygw") else None
        if self.kind == "versitygw" and program is None:
            raise PrerequisiteMissing(
                "versitygw was not found", hint="put it on PATH, or install Go so that it can be built"
            )
        if program is None and not all(importlib.util.find_spec(package) for package in ("moto", "flask")):
            raise PrerequisiteMissing(
                "no S3 server was found",
                hint="if you need none, use `statemgr dev up --no-s3`; or pip install 'moto[server]', or put versitygw "
                "on PATH, or install Go, which builds it",
            )
        self.kind = "versitygw" if program else "moto"
        return program

    def wait(self, process: ServerProcess, deadline_s: float) -> None:
        """Wait until the server answers and the bucket exists."""
        super().wait(process, deadline_s)
        if self.kind == "moto":
            self._request("PUT", f"/{self.bucket}")
        if self.kind == "seaweedfs":
            # a directory of its file server is a bucket
            made = lambda: self._request("POST", f"/buckets/{self.bucket}/", self._filer_port) in (200, 201)  # noqa: E731
            wait_until_ready(process, made, name=self.name, deadline_s=deadline_s)

    def answers(self) -> bool:
        """Return whether the server answers HTTP at all."""
        return self._request("GET", "/") is not None

    def _request(self, method: str, path: str, port: int | None = None) -> int | None:
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=2.0)
        try:
            connection.request(method, path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _versitygw(self, program: Path) -> list[str]:
        data = (self.directory / "objects").absolute()
        # a directory at the top is a bucket
        (data / self.bucket).mkdir(parents=True, exist_ok=True)
        command = [
            str(program),
            "--port",
            f"127.0.0.1:{self.port}",
            "--region",
            self.region,
            "--quiet",
            "--keep-alive",  # as other stores do; without it each request opens a connection
            "posix",
        ]
        if not _has_extended_attributes(data):
            sidecar = (self.directory / "metadata").absolute()
            sidecar.mkdir(exist_ok=True)
            command += ["--sidecar", str(sidecar)]
        return [*command, str(data)]

    def _seaweedfs(self) -> list[str]:
        program = find_seaweedfs()
        if program is None:
            raise PrerequisiteMissing("SeaweedFS was not found", hint="put weed on PATH, or install Go")
        (self.directory / "objects").mkdir(exist_ok=True)
        keys = {"accessKey": self.access_key, "secretKey": self.secret_key}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        users = self.directory / "users.json"
        users.touch(0o600)
        users.write_text(json.dumps({"identities": [{"name": "dev", "credentials": [keys], "actions": actions}]}))
        self._filer_port = free_port()
        ports = {"filer": self._filer_port, "s3": self.port, "master": free_port(), "volume": free_port()}
        command = [str(program), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", "-dir=objects"]
        command += [f"-{name}.port={port}" for name, port in ports.items()]
        command += [f"-{name}.port.grpc={free_port()}" for name in ports]
        return [*command, "-s3.config=users.json", "-volume.max=100", "-master.volumeSizeLimitMB=256"]


def find_versitygw(*, build: bool = True) -> Path | None:
    """Return the versitygw program, as :func:`statemgr_tools.dev.programs.go_program`."""
    return go_program("versitygw", "github.com/versity/versitygw/cmd/versitygw", VERSITYGW_VERSION, build=build)


def find_seaweedfs(*, build: bool = True) -> Path | None:
    """Return SeaweedFS's program, as :func:`statemgr_tools.dev.programs.go_program`. To build it takes minutes."""
    package = "github.com/seaweedfs/seaweedfs/weed"
    return go_program("weed", package, SEAWEEDFS_VERSION, build=build, as_dependency=True)


def _has_extended_attributes(directory: Path) -> bool:
    if not hasattr(os, "setxattr"):
        return sys.platform == "darwin"  # macOS file systems have them, but Python there has no function
    probe = directory / ".xattr-probe"
    try:
        probe.touch()
        os.setxattr(probe, "user.statemgr", b"1")
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True
