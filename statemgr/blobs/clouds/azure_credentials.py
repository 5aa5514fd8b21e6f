"""How requests to Azure are signed: with an account key, a shared access signature, or a token.

Sources: Azure Storage's documentation, "Authorize with Shared Key" and "Configure a connection string".
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable, Mapping
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from azure.core.exceptions import AzureError, ClientAuthenticationError, ServiceRequestError, ServiceResponseError

from statemgr.blobs.clouds.http import Renewals, loading
from statemgr.errors import AccessDenied, ConfigError, UnavailableError
from statemgr.ports import Clock

KEYS_HINT = (
    "check blob.store.azure.connection.string, or the identity of this machine (the AZURE_ variables) and its roles"
)
_SCOPE = "https://storage.azure.com/.default"
#: Answers of the service of the credentials that no retry changes.
_REFUSED = (400, 401, 403)
_SIGNED = (
    "content-encoding", "content-language", "content-length", "content-md5", "content-type", "date",
    "if-modified-since", "if-match", "if-none-match", "if-unmodified-since", "range",
)  # fmt: skip


class SharedKey:
    """An account key. Raises: ConfigError, without the key."""

    def __init__(self, account: str, key: str, clock: Clock) -> None:
        self._account = account
        try:
            self._key = base64.b64decode(key, validate=True)
        except ValueError:
            raise ConfigError(
                "the account key in the connection string of the Azure account is not Base64",
                hint="copy it from the account's access keys", key="blob.store.azure.connection.string",
            ) from None  # fmt: skip
        self._clock = clock

    def sign(self, method: str, url: str, headers: dict[str, str]) -> str:
        _date(headers, self._clock)
        lower = {name.lower(): value for name, value in headers.items()}
        if lower.get("content-length") == "0":
            lower["content-length"] = ""
        parts = urlsplit(url)
        vendor = sorted((name, value) for name, value in lower.items() if name.startswith("x-ms-"))
        query = sorted((name.lower(), value) for name, value in parse_qsl(parts.query, keep_blank_values=True))
        lines = [method, *(lower.get(name, "") for name in _SIGNED), *(f"{name}:{value}" for name, value in vendor)]
        resource = f"/{self._account}{parts.path}" + "".join(f"\n{name}:{value}" for name, value in query)
        digest = hmac.digest(self._key, "\n".join([*lines, resource]).encode(), hashlib.sha256)
        headers["Authorization"] = f"SharedKey {self._account}:{base64.b64encode(digest).decode()}"
        return url

    def renew(self) -> bool:
        return False


class Signature:
    """A shared access signature."""

    def __init__(self, signature: str, clock: Clock) -> None:
        self._signature = signature.lstrip("?")
        self._clock = clock

    def sign(self, method: str, url: str, headers: dict[str, str]) -> str:
        _date(headers, self._clock)
        return f"{url}{'&' if '?' in url else '?'}{self._signature}"

    def renew(self) -> bool:
        return False


class Token:
    """A token of a workload identity, a managed identity, or what else the loaded credential finds."""

    def __init__(self, load: Callable[[], Any], clock: Clock) -> None:
        self._load = load
        self._clock = clock
        self._renewals = Renewals()
        self._credential: Any = None
        self._had_token = False

    def sign(self, method: str, url: str, headers: dict[str, str]) -> str:
        _date(headers, self._clock)
        headers["Authorization"] = f"Bearer {self._renewals(self._token)}"
        return url

    def _token(self) -> str:
        try:
            if self._credential is None:
                with loading("Azure", KEYS_HINT, AzureError):
                    self._credential = self._load()
            token: str = self._credential.get_token(_SCOPE).token  # the credential keeps it until it is old
        except (ServiceRequestError, ServiceResponseError) as error:
            raise UnavailableError("the service of Azure's credentials does not answer") from error
        except ClientAuthenticationError as error:  # its text is long, and names every way that was tried
            # without an answer this type can also mean an outage: an earlier token shows that there are credentials
            if self._had_token and getattr(error.response, "status_code", None) not in _REFUSED:
                raise UnavailableError("Azure gives no token now", hint=KEYS_HINT) from error
            raise AccessDenied("there are no Azure credentials", hint=KEYS_HINT) from error
        except AzureError as error:
            raise UnavailableError(f"Azure gives no token now: {type(error).__name__}") from error
        self._had_token = True
        return token

    def renew(self) -> bool:
        """A new credential has nothing kept."""
        with self._renewals.lock:
            self._credential = None
        return True


def connection(text: str) -> Mapping[str, str]:
    """The fields of a connection string, by their names in lower case. Raises: ConfigError, without the string."""
    fields = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(
                "the connection string of the Azure account has a part without '='",
                hint="copy it from the account's access keys", key="blob.store.azure.connection.string",
            )  # fmt: skip
        fields[name.lower()] = value
    return fields


def secrets_of(fields: Mapping[str, str]) -> list[str]:
    """What must be in no output."""
    signature = fields.get("sharedaccesssignature", "")
    found = [fields.get("accountkey", ""), signature, dict(parse_qsl(signature)).get("sig", "")]
    return [*filter(None, (*found, *map(unquote, found)))]


def _date(headers: dict[str, str], clock: Clock) -> None:
    headers["x-ms-date"] = formatdate(clock.time_ns() / 1e9, usegmt=True)
