"""Serdes whose schemas are in a Schema Registry: Avro, JSON Schema and Protobuf, by confluent-kafka's own client.

A value begins with a zero byte and the ID of its writer's schema (4 bytes, big-endian; Protobuf adds the path of the
message type). Source: Confluent's wire format of Schema Registry.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from statemgr.config import JobConfig
from statemgr.config.loading import hidden_texts, without, without_user
from statemgr.errors import (
    AccessDenied,
    ConfigError,
    CorruptError,
    InvalidError,
    PrerequisiteMissing,
    StatemgrError,
    UnavailableError,
)
from statemgr.kafka.registry.registry_answers import Session
from statemgr.kafka.registry.registry_schemas import EndlessReferences, avro_body, referenced
from statemgr.serdes import SERDES, Serde
from statemgr.serdes.avro import AvroBody

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
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
        #: For errors: the user and the password that it may contain are left out.
        self._url = without_user("url", str(settings.get("url", "")))
        if not self._url:
            hint = 'for example schema.registry.url = "http://localhost:8081"'
            raise ConfigError("schema.registry.url is not set", hint=hint, key="schema.registry.url")
        settings.setdefault("timeout", _TIMEOUT_S)  # the client's own default is to wait for ever
        self._session: Session | None = None
        try:
            self._client: SchemaRegistryClient = SchemaRegistryClient.new_client(settings)
            if not self._url.startswith(_IN_MEMORY):
                rest: Any = self._client._rest_client
                rest.session = self._session = Session(rest.session, float(rest.timeout), len(rest.base_urls))
        except Exception as error:  # the client raises many types for its settings
            hidden = hidden_texts(config.values if isinstance(config, JobConfig) else config)
            raise ConfigError(
                f"the client of the Schema Registry refuses its settings: {without(hidden, str(error))}",
                hint="use the names and values of confluent-kafka's SchemaRegistryClient",
                key="schema.registry.*",
            ) from None

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
        used, schema_id = self._agreed(subject, schema, "AVRO", register)
        with self._asking(subject):
            own = avro_body(self._client, used)
            if own is not None:
                own.prepare()
        header = b"\0" + schema_id.to_bytes(4, "big")
        known: dict[int, AvroBody | None] = {schema_id: own}

        def write(value: Any, context: Any) -> bytes:
            return header + bytes(memoryview(value)) if own is None else own.encode(value, header)

        def read(data: bytes, context: Any) -> Any:
            writer = int.from_bytes(data[1:_HEADER], "big")
            if writer not in known:
                known[writer] = avro_body(self._client, self._client.get_schema(writer, subject_name=subject))
            body = known[writer]
            if body is None:
                return data[_HEADER:]
            return body.decode(data, _HEADER, None if body is own else own)

        return self._serde(subject, "avro", write, read)

    def json_schema(self, subject: str, schema: str | None = None, *, register: bool = False) -> Serde[Any]:
        """Values as JSON that fits a JSON Schema. Arguments and errors: as :meth:`avro`.

        Nothing is resolved: a value of another version has the fields that it was written with.
        """
        from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer

        used, _ = self._agreed(subject, schema, "JSON", register)
        write = JSONSerializer(used, self._client, conf=self._settings(subject))
        read = JSONDeserializer(used, schema_registry_client=self._client, json_decode=SERDES["json"].deserialize)
        return self._serde(subject, "json", write, read)

    def protobuf(self, subject: str, message: type[M], *, register: bool = False) -> Serde[M]:
        """Values as Protobuf messages of a generated class. ``register`` and errors: as :meth:`avro`.

        The schema is the file of the message type. The files that it imports have subjects of their names.
        """
        from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
        from confluent_kafka.schema_registry.protobuf import _schema_to_str as text_of

        file: Any = message.DESCRIPTOR.file
        self._agreed(subject, text_of(file), "PROTOBUF", register, self._imported(file, register))
        conf = {"use.deprecated.format": False}
        write = ProtobufSerializer(message, self._client, conf={**self._settings(subject), **conf})
        read = ProtobufDeserializer(message, conf, self._client)
        return self._serde(subject, "protobuf", write, read)

    def _imported(self, file: Any, register: bool) -> list[SchemaReference]:
        """The files that a Protobuf file imports, once the registry has them. Raises: as :meth:`avro`."""
        from confluent_kafka.schema_registry import SchemaReference
        from confluent_kafka.schema_registry.protobuf import _is_builtin
        from confluent_kafka.schema_registry.protobuf import _schema_to_str as text_of

        found: list[SchemaReference] = []
        for one in file.dependencies:
            if not _is_builtin(one.name):
                used, _ = self._agreed(one.name, text_of(one), "PROTOBUF", register, self._imported(one, register))
                with self._asking(one.name):
                    version = self._client.lookup_schema(one.name, used).version
                found.append(SchemaReference(one.name, one.name, version))
        return found

    def _agreed(
        self, subject: str, schema: str | None, kind: str, register: bool, references: Sequence[SchemaReference] = ()
    ) -> tuple[Schema, int]:
        """The schema and its ID, once the registry has it. Raises: as :meth:`avro`."""
        from confluent_kafka.schema_registry import Schema
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        with self._asking(subject):
            if schema is None:
                newest = self._client.get_latest_version(subject)
                found = newest.schema
                if (found.schema_type or "AVRO") != kind:
                    raise ConfigError(
                        f"the subject has schemas of the type {found.schema_type}, not {kind}",
                        hint="use the serde of that type",
                        subject=subject,
                    )
                referenced(self._client, found)
                return found, int(newest.schema_id or 0)
            given = Schema(schema, kind, list(references))
            try:
                return given, int(self._client.lookup_schema(subject, given).schema_id or 0)
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
                return given, self._client.register_schema(subject, given)

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

    def _check_references(self, schema: Schema) -> None:
        """Get all that the schema of a value refers to; the client keeps it."""
        try:
            referenced(self._client, schema)
        except EndlessReferences as error:
            raise CorruptError(f"a value cannot be read: {error}", hint=_READ_HINT) from error

    def _settings(self, subject: str) -> dict[str, Any]:
        return {"auto.register.schemas": False, "subject.name.strategy": lambda *_: subject}

    def _serde(self, subject: str, kind: str, write: Callable[..., Any], read: Callable[..., Any]) -> Serde[Any]:
        from confluent_kafka.serialization import MessageField, SerializationContext

        context = SerializationContext(subject, MessageField.VALUE)
        checked: set[int] = set()

        def serialize(value: Any) -> bytes:
            with self._asking(subject, InvalidError, "a value does not fit the schema of its subject"):
                data: bytes = write(value, context)
                return data

        def deserialize(data: bytes) -> Any:
            if len(data) >= _HEADER and data[0] == 0:  # the client gets it once, and not again when it reads the value
                schema_id = int.from_bytes(data[1:_HEADER], "big")
                with self._asking(subject, UnavailableError, "the answer of the Schema Registry cannot be read"):
                    schema = self._client.get_schema(schema_id, subject_name=subject)
                    if schema_id not in checked:
                        self._check_references(schema)
                        checked.add(schema_id)
            with self._asking(subject, CorruptError, "a value cannot be read with the schema of its ID"):
                if len(data) < _HEADER or data[0] != 0:
                    raise ValueError("it does not begin with a zero byte and an ID")
                return read(data, context)

        return Serde(serialize, deserialize, f"schema-registry-{kind}")

    @contextmanager
    def _asking(
        self, subject: str | None, otherwise: type[StatemgrError] = ConfigError, what: str = "the registry refuses this"
    ) -> Iterator[None]:
        """Raises typed errors in place of the client's; ``otherwise`` for those that no server or network causes."""
        where = {"registry": self._url, **({} if subject is None else {"subject": subject})}
        if self._session is not None:
            self._session.begin()
        try:
            yield
        except StatemgrError as error:
            error.with_where(**where)
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
