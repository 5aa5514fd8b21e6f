"""Servers of Google Cloud Storage and Azure Blob Storage as child processes: fake-gcs-server and Azurite.

Both keep objects in files. fake-gcs-server takes requests without credentials, Azurite has an account key of its own.
Writes in the server's own directory, and builds the programs in the user's cache directory.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import os
import secrets
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path

from statemgr.errors import PrerequisiteMissing
from statemgr_tools.dev.process import Server, ServerProcess, spawn
from statemgr_tools.dev.programs import go_program, npm_program

FAKE_GCS_VERSION = "v1.56.1"
AZURITE_VERSION = "3.35.0"
_API_VERSION = "2021-12-02"


@dataclass(kw_only=True)
class _CloudServer(Server):
    """A server with one bucket."""

    ready_deadline_s = 30.0
    grace_s = 5.0

    bucket: str = "statemgr"

    def answers(self) -> bool:
        return self._request("GET", "/") is not None

    def _request(self, method: str, path: str, headers: dict[str, str] | None = None) -> int | None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5.0)
        try:
            connection.request(method, path, headers=headers or {})
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


@dataclass(kw_only=True)
class GcsServer(_CloudServer):
    """A fake-gcs-server."""

    name = "the GCS server"

    @property
    def endpoint(self) -> str:
        """The URL for clients."""
        return f"http://127.0.0.1:{self.port}"

    def spawn(self) -> ServerProcess:
        program = find_fake_gcs()
        if program is None:
            raise PrerequisiteMissing(
                "fake-gcs-server was not found", hint="put it on PATH, or install Go so that it can be built"
            )
        data = (self.directory / "objects").absolute()
        (data / self.bucket).mkdir(parents=True, exist_ok=True)  # a directory at the top is a bucket
        command = [str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port)]
        command += ["-public-host", f"127.0.0.1:{self.port}", "-backend", "filesystem", "-filesystem-root", str(data)]
        return spawn([*command, "-log-level", "warn"], log=self.directory / "gcs.log", cwd=self.directory)


@dataclass(kw_only=True)
class AzureServer(_CloudServer):
    """An Azurite with one storage account."""

    name = "the Azure server"

    account: str = "statemgr"
    key: str = field(default_factory=lambda: base64.b64encode(secrets.token_bytes(32)).decode(), repr=False)

    @property
    def connection_string(self) -> str:
        """What clients need, with the account key."""
        return (
            f"AccountName={self.account};AccountKey={self.key};BlobEndpoint=http://127.0.0.1:{self.port}/{self.account}"
        )

    def spawn(self) -> ServerProcess:
        program = find_azurite()
        if program is None:
            raise PrerequisiteMissing("Azurite was not found", hint="install npm, or put azurite-blob on PATH")
        data = (self.directory / "blobs").absolute()
        data.mkdir(parents=True, exist_ok=True)
        command = [str(program), "--silent", "--disableTelemetry", "--blobHost", "127.0.0.1"]
        command += ["--blobPort", str(self.port), "--location", str(data)]
        environment = os.environ | {"AZURITE_ACCOUNTS": f"{self.account}:{self.key}"}
        return spawn(command, log=self.directory / "azure.log", environment=environment, cwd=self.directory)

    def wait(self, process: ServerProcess, deadline_s: float) -> None:
        """Wait until the server answers, and create the container (409 if it exists)."""
        super().wait(process, deadline_s)
        date = formatdate(usegmt=True)
        path = f"/{self.account}/{self.bucket}"
        lines = ["PUT", *[""] * 11, f"x-ms-date:{date}", f"x-ms-version:{_API_VERSION}"]
        text = "\n".join([*lines, f"/{self.account}{path}", "restype:container"])
        digest = hmac.digest(base64.b64decode(self.key), text.encode(), hashlib.sha256)
        signature = f"SharedKey {self.account}:{base64.b64encode(digest).decode()}"
        headers = {"x-ms-date": date, "x-ms-version": _API_VERSION, "Authorization": signature, "Content-Length": "0"}
        self._request("PUT", f"{path}?restype=container", headers)


def find_fake_gcs(*, build: bool = True) -> Path | None:
    """Return the fake-gcs-server program, as :func:`statemgr_tools.dev.programs.go_program`."""
    return go_program("fake-gcs-server", "github.com/fsouza/fake-gcs-server", FAKE_GCS_VERSION, build=build)


def find_azurite(*, build: bool = True) -> Path | None:
    """Return Azurite's blob server, as :func:`statemgr_tools.dev.programs.npm_program`."""
    return npm_program("azurite-blob", "azurite", AZURITE_VERSION, build=build)
