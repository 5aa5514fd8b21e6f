"""Serdes whose schemas are in a Schema Registry: Avro, JSON Schema and Protobuf, by confluent-kafka's own client.

A value begins with a zero byte and the ID of its writer's schema (4 bytes, big-endian; Protobuf adds the path of the
message type). Source: Confluent's wire format of Schema Registry.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from statemgr.config import JobConfig
from statemgr.errors import (
    AccessDenied,
    ConfigError,
    CorruptError,
    InvalidError,
    PrerequisiteMissing,
    StatemgrError,
    UnavailableError,
)
from statemgr.serdes import Serde

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
    from google.protobuf.message import Message

    M = TypeVar("M", bound=Message)

_PREREQUISITE = "pip install 'statemgr[schema-registry]'"
#: URLs of the client's own registry for tests.
_IN_MEMORY = "mock://"
_TIMEOUT_S = 30
#: Of a value: a zero byte, and the ID of its schema.
_HEADER = 5
_READ_HINT = "find out who wrote it, and with which registry"


class SchemaRegistry:
    """Makes serdes for the values of a subject. Each one is checked against the registry when it is made.

    Args:
        config: the job, whose settings below ``schema.registry.`` are the client's; or these settings themselves, under
            the client's own names.

    Raises: ConfigError if there is no URL or the client refuses a setting; PrerequisiteMissing.
    """

    def __init__(self, config: JobConfig | Mapping[str, Any]) -> None:
        settings = config.schema_registry() if isinstance(config, JobConfig) else dict(config)
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient
        except ImportError as error:
            raise PrerequisiteMissing(
                f"the client of the Schema Registry needs the package {error.name}", hint=_PREREQUISITE
            ) from error
        self._url = str(settings.get("url", ""))
        if not self._url:
            hint = 'for example schema.registry.url = "http://localhost:8081"'
            raise ConfigError("schema.registry.url is not set", hint=hint, key="schema.registry.url")
        settings.setdefault("timeout", _TIMEOUT_S)  # the client's own default is to wait for ever
        try:
            self._client: SchemaRegistryClient = SchemaRegistryClient.new_client(settings)
        except Exception as error:  # the client raises many types for its settings
            raise ConfigError(
                f"the client of the Schema Registry refuses its settings: {error}",
                hint="use the names and values of confluent-kafka's SchemaRegistryClient",
                key="schema.registry.*",
            ) from error

    def subjects(self) -> list[str]:
        """The subjects in the registry. Raises: UnavailableError, AccessDenied."""
        with self._asking(None):
            return self._client.get_subjects()

    def avro(self, subject: str, schema: str | None = None, *, register: bool = False) -> Serde[Any]:
        """Values as Avro.

        Args:
            subject: such as ``orders-value``.
            schema: the schema as JSON. Values are written with it, and those of other versions are resolved into it.
                Without one, the newest version of the subject is used.
            register: add the schema to the subject if it is not there. Otherwise it has to be there.

        Raises: ConfigError if the subject does not have the schema, if the registry refuses it, or if it is not
            compatible with the versions of the subject; UnavailableError, AccessDenied.
        """
        from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer

        used = self._agreed(subject, schema, "AVRO", register)
        write = AvroSerializer(self._client, used, conf=self._settings(subject))
        read = AvroDeserializer(self._client, used)
        return self._serde(subject, "avro", write, read)

    def json_schema(self, subject: str, schema: str | None = None, *, register: bool = False) -> Serde[Any]:
        """Values as JSON that fits a JSON Schema. Arguments and errors: as :meth:`avro`.

        Nothing is resolved: a value of another version has the fields that it was written with.
        """
        from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer

        used = self._agreed(subject, schema, "JSON", register)
        write = JSONSerializer(used, self._client, conf=self._settings(subject))
        read = JSONDeserializer(used, schema_registry_client=self._client)
        return self._serde(subject, "json", write, read)

    def protobuf(self, subject: str, message: type[M], *, register: bool = False) -> Serde[M]:
        """Values as Protobuf messages of a generated class. ``register`` and errors: as :meth:`avro`.

        The schema is the file of the message type. Files that it imports are registered under their names.
        """
        from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
        from confluent_kafka.schema_registry.protobuf import _schema_to_str as text_of

        file: Any = message.DESCRIPTOR.file
        self._agreed(subject, text_of(file), "PROTOBUF", register)
        conf = {"use.deprecated.format": False}
        write = ProtobufSerializer(message, self._client, conf={**self._settings(subject), **conf})
        read = ProtobufDeserializer(message, conf, self._client)
        return self._serde(subject, "protobuf", write, read)

    def _agreed(self, subject: str, schema: str | None, kind: str, register: bool) -> Schema:
        """The schema, once the registry has it. Raises: as :meth:`avro`."""
        from confluent_kafka.schema_registry import Schema
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        with self._asking(subject):
            if schema is None:
                found = self._client.get_latest_version(subject).schema
                if (found.schema_type or "AVRO") != kind:
                    raise ConfigError(
                        f"the subject has schemas of the type {found.schema_type}, not {kind}",
                        hint="use the serde of that type",
                        subject=subject,
                    )
                return found
            given = Schema(schema, kind)
            try:
                self._client.lookup_schema(subject, given)
            except SchemaRegistryError as error:
                if not _is_unknown(error):
                    raise
                self._check_compatible(subject, given)
                if not register:
                    raise ConfigError(
                        "the subject does not have this schema",
                        hint="register it when you deploy, or let this call do it (register)",
                        subject=subject,
                        registry=self._url,
                    ) from error
                self._client.register_schema(subject, given)
            return given

    def _check_compatible(self, subject: str, schema: Schema) -> None:
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        if self._url.startswith(_IN_MEMORY):
            return  # it has no rules
        try:
            if self._client.test_compatibility(subject, schema):
                return
        except SchemaRegistryError as error:
            if _is_unknown(error):  # the subject is new
                return
            raise
        raise ConfigError(
            "the schema is not compatible with those of the subject",
            hint="change it so that values of the older versions can be read: give each new field a default",
            subject=subject,
            registry=self._url,
        )

    def _settings(self, subject: str) -> dict[str, Any]:
        return {"auto.register.schemas": False, "subject.name.strategy": lambda *_: subject}

    def _serde(self, subject: str, kind: str, write: Callable[..., Any], read: Callable[..., Any]) -> Serde[Any]:
        from confluent_kafka.serialization import MessageField, SerializationContext

        context = SerializationContext(subject, MessageField.VALUE)

        def serialize(value: Any) -> bytes:
            with self._asking(subject, InvalidError, "a value does not fit the schema of its subject"):
                data: bytes = write(value, context)
                return data

        def deserialize(data: bytes) -> Any:
            if len(data) >= _HEADER and data[0] == 0:  # the client gets it once, and not again when it reads the value
                with self._asking(subject, UnavailableError, "the answer of the Schema Registry cannot be read"):
                    self._client.get_schema(int.from_bytes(data[1:_HEADER], "big"), subject_name=subject)
            with self._asking(subject, CorruptError, "a value cannot be read with the schema of its ID"):
                return read(data, context)

        return Serde(serialize, deserialize, f"schema-registry-{kind}")

    @contextmanager
    def _asking(
        self, subject: str | None, otherwise: type[StatemgrError] = ConfigError, what: str = "the registry refuses this"
    ) -> Iterator[None]:
        """Raises typed errors in place of the client's; ``otherwise`` for those that no server or network causes."""
        where = {"registry": self._url, **({} if subject is None else {"subject": subject})}
        try:
            yield
        except StatemgrError:
            raise
        except Exception as error:
            status, code, network = _cause(error)
            if status in (401, 403):
                raise AccessDenied(
                    f"the Schema Registry refuses access: {error}",
                    hint="check schema.registry.basic.auth.user.info and the rights of this user",
                    **where,
                ) from error
            if status == 404 and code > 0:  # its own answer, and not that of a proxy
                if otherwise is ConfigError:
                    hint = "check the subject's name, or give a schema and let this call register it"
                    raise ConfigError("the registry has no such subject", hint=hint, **where) from error
                raise CorruptError(
                    f"the Schema Registry does not know the schema of a value: {error}", hint=_READ_HINT, **where
                ) from error
            asks = otherwise in (ConfigError, UnavailableError)  # and reads no value of somebody else
            # the registry says that a schema is wrong with 409 and 422
            if network or (status is not None and status not in (409, 422)) or (asks and _is_no_json(error)):
                raise UnavailableError(
                    f"the Schema Registry does not answer as it should: {error}",
                    hint="check schema.registry.url, the server and what is between, then try again",
                    **where,
                ) from error
            hint = _READ_HINT if otherwise is CorruptError else "correct the schema or the value"
            raise otherwise(f"{what}: {str(error) or type(error).__name__}", hint=hint, **where) from error


def _is_unknown(error: Any) -> bool:
    """Whether the registry itself says that it has no such subject, version or schema."""
    return bool(error.http_status_code == 404 and error.error_code > 0)


def _is_no_json(error: BaseException) -> bool:
    """Whether an answer was not JSON, such as a page of a proxy."""
    return isinstance(error, json.JSONDecodeError) or isinstance(error.__cause__, json.JSONDecodeError)


def _cause(error: BaseException) -> tuple[int | None, int, bool]:
    """The HTTP status and the registry's code in an error or in one of its causes, and whether the network is the
    cause. The client has the code -1 for an answer that is not the registry's."""
    at: BaseException | None = error
    while at is not None:
        status = getattr(at, "http_status_code", None)
        if isinstance(status, int):
            return status, int(getattr(at, "error_code", -1)), status <= 0
        if type(at).__module__.startswith(("httpx", "authlib")) or isinstance(at, ConnectionError | TimeoutError):
            return None, -1, True
        at = at.__cause__ or at.__context__
    return None, -1, False
