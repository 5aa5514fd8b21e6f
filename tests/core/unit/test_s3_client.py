"""How the S3 client asks, and how it reads answers."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("botocore")

from botocore.awsrequest import AWSResponse
from botocore.exceptions import ClientError, CredentialRetrievalError
from botocore.utils import parse_timestamp
from urllib3 import HTTPResponse

from statemgr.blobs.s3.administration import S3Administration
from statemgr.blobs.s3.client import Place, make_client, parsed_time
from statemgr.blobs.s3.errors import translated
from statemgr.blobs.s3.store import S3BlobStore
from statemgr.errors import ConfigError, InvalidError, UnavailableError
from statemgr.local.machine import SystemClock
from statemgr.ports import FileSlice
from statemgr.version import __version__


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-27T15:02:16.123Z",
        "2026-11-27T15:02:16Z",
        "2026-11-27T16:02:16+01:00",
        "Fri, 27 Nov 2026 15:02:16 GMT",
        "Fri, 27 Nov 2026 16:02:16 +0100",
        "1795791736",
        1795791736,
        1795791736.5,
        "Fri Nov 27 15:02:16 2026 UTC",
    ],
)
def test_a_time_is_what_the_sdk_reads(text: str | float) -> None:
    """The times in lists and headers, and forms that no known server sends, mean the same to both."""
    assert parsed_time(text) == parse_timestamp(text)


def test_text_that_is_no_time_is_refused() -> None:
    """The error has the text."""
    with pytest.raises(ValueError, match="soon"):
        parsed_time("soon")


def test_a_bucket_without_conditions_must_have_no_rule() -> None:
    """An upload that arrives late tags a published object again there, and a rule would delete it."""
    rules: list[Any] = []
    client = SimpleNamespace(
        get_bucket_lifecycle_configuration=lambda **_: {"Rules": rules}, get_bucket_versioning=lambda **_: {}
    )
    abilities: Any = SimpleNamespace(lacks=frozenset({"IfNoneMatch"}), deletes_many=True, checks_uploads=lambda: True)
    administration = S3Administration(Place(client, "bucket", ""), 7, abilities, "orders/1/")
    assert administration.fix() == ()
    assert [text.split(":")[0] for text in administration.probe()] == ["note"]
    tag = {"Key": "statemgr-ttl", "Value": "7"}
    rules.append({"Status": "Enabled", "Filter": {"Tag": tag}, "Expiration": {"Days": 7}})
    (problem,) = administration.probe()
    assert problem.endswith("remove this rule")


def test_installing_a_rule_keeps_the_setting_of_the_others() -> None:
    """S3 sets the size from which rules move objects to its default if a request does not name it."""
    setting = {"TransitionDefaultMinimumObjectSize": "varies_by_storage_class"}
    installed: dict[str, Any] = {}
    client = SimpleNamespace(
        get_bucket_lifecycle_configuration=lambda **_: {"Rules": [{"ID": "mine"}], **setting},
        get_bucket_versioning=lambda **_: {},
        put_bucket_lifecycle_configuration=lambda **given: installed.update(given),
    )
    abilities: Any = SimpleNamespace(lacks=frozenset())
    S3Administration(Place(client, "bucket", ""), 7, abilities, "orders/1/").fix()
    assert installed.items() >= setting.items()
    assert len(installed["LifecycleConfiguration"]["Rules"]) == 2


class VersionedBucket:
    """The client of a bucket with this state of versioning, or with this error in its place."""

    def __init__(self, state: str | ClientError) -> None:
        self.state = state
        self.rules: list[dict[str, Any]] = [{"ID": "mine", "Status": "Enabled", "Filter": {"Prefix": "logs/"}}]

    def get_bucket_versioning(self, **_: object) -> dict[str, str]:
        if isinstance(self.state, ClientError):
            raise self.state
        return {"Status": self.state} if self.state else {}

    def get_bucket_lifecycle_configuration(self, **_: object) -> dict[str, Any]:
        return {"Rules": self.rules}

    def put_bucket_lifecycle_configuration(self, **given: Any) -> None:
        self.rules = given["LifecycleConfiguration"]["Rules"]

    def administration(self, job: str = "orders/1/") -> S3Administration:
        """The administration for the blobs of a job."""
        abilities: Any = SimpleNamespace(lacks=frozenset(), deletes_many=True, checks_uploads=lambda: True)
        client: Any = self
        return S3Administration(Place(client, "bucket", "team/"), 7, abilities, job)


@pytest.mark.parametrize("state", ["Enabled", "Suspended"])
def test_versions_of_deleted_blobs_are_deleted(state: str) -> None:
    """Without a rule, a bucket that keeps versions keeps every blob that was ever deleted. The rule is about the job's
    own blobs, and touches no current one."""
    bucket = VersionedBucket(state)
    store = bucket.administration()
    assert [text for text in store.probe() if "version" in text and text.startswith("note: ")]
    for _ in range(2):
        assert any("versions" in done for done in store.fix())
        assert store.probe() == []
    assert [rule["ID"] for rule in bucket.rules] == ["mine", "statemgr-ttl-7-team", "statemgr-versions-team/orders/1"]
    rule = bucket.rules[-1]
    assert rule["Filter"] == {"Prefix": "team/orders/1/"}
    assert (rule["NoncurrentVersionExpiration"], rule["Expiration"]) == (
        {"NoncurrentDays": 7},
        {"ExpiredObjectDeleteMarker": True},
    )
    assert any("version" in text for text in bucket.administration("orders/10/").probe()), "another job"


@pytest.mark.parametrize(
    ("rule", "is_enough"),
    [
        ({"Filter": {}}, True),
        ({"Prefix": "team/"}, True),
        ({"Filter": {"Prefix": "team/"}, "Status": "Disabled"}, False),
        ({"Filter": {"Prefix": "other/"}}, False),
        ({"Filter": {"Tag": {"Key": "a", "Value": "b"}}}, False),
        ({"Filter": {}, "NoncurrentVersionExpiration": {"NoncurrentDays": 1, "NewerNoncurrentVersions": 2}}, False),
    ],
)
def test_a_rule_of_somebody_else_may_delete_versions(rule: dict[str, Any], is_enough: bool) -> None:
    """A rule counts if it deletes all versions of the job's blobs, whatever the number of days."""
    bucket = VersionedBucket("Enabled")
    bucket.rules = [{"Status": "Enabled", "NoncurrentVersionExpiration": {"NoncurrentDays": 90}, **rule}]
    assert any("version" in text for text in bucket.administration().probe()) is not is_enough


@pytest.mark.parametrize(
    ("code", "status"),
    [("AccessDenied", 403), ("NotImplemented", 501), ("InvalidArgument", 400), ("NoSuchKey", 404), ("404", 404)],
)
def test_a_server_that_does_not_tell_of_versions_has_none(code: str, status: int) -> None:
    """A missing right or an unknown request is no problem."""
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    bucket = VersionedBucket(ClientError(answer, "GetBucketVersioning"))
    assert bucket.administration().fix() == ("the lifecycle rule is installed",)
    assert bucket.administration().probe() == []


@pytest.mark.parametrize(
    ("request_name", "hint"),
    [("GetBucketLifecycleConfiguration", "`statemgr gc --write`"), ("PutObject", "another S3 server")],
)
def test_a_job_works_without_lifecycle_rules(request_name: str, hint: str) -> None:
    """A server without them does not have to be replaced; one that lacks what commits need does."""
    answer: Any = {"Error": {"Code": "NotImplemented"}, "ResponseMetadata": {"HTTPStatusCode": 501}}
    with pytest.raises(InvalidError) as caught, translated("bucket"):
        raise ClientError(answer, request_name)
    assert hint in str(caught.value.hint)


def test_an_outage_of_the_source_of_the_credentials_is_repeated() -> None:
    """It may pass, and the error says what to check if it does not."""
    with pytest.raises(UnavailableError, match="credential_process"), translated("bucket"):
        raise CredentialRetrievalError(provider="custom-process", error_msg="the vault is sealed")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ('{"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "b", "Expiration": "2020-01-01T00:00:00Z"}', "expired"),
        ('{"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "b", "Expiration": "secret"}', "ParserError"),
        ('["secret"]', "AttributeError"),
        ("secret", "JSONDecodeError"),
    ],
)
def test_credentials_that_cannot_be_used_are_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, message: str
) -> None:
    """The source may be late, or a clock wrong: the SDK raises errors that are not its own. What the source has given
    is in no message."""
    (tmp_path / "output").write_text(output)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = cat {tmp_path / 'output'}\n")
    for name, value in (("CONFIG_FILE", tmp_path / "config"), ("SHARED_CREDENTIALS_FILE", tmp_path / "none")):
        monkeypatch.setenv(f"AWS_{name}", str(value))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    with pytest.raises(UnavailableError, match=message) as caught, translated("bucket"):
        make_client({"endpoint": "http://127.0.0.1:1", "region": "us-east-1"}, 1).head_bucket(Bucket="bucket")
    assert "clock" in str(caught.value.hint)
    assert "secret" not in str(caught.value)


def test_an_endpoint_that_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK also finds endpoints in the environment, where nobody has checked them. Errors that are its own stay."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "minio:9000")
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL_S3"):
        make_client({"region": "us-east-1"}, 1)
    with pytest.raises(InvalidError, match="region_name"):
        make_client({"region": "eu west"}, 1)


def test_another_error_in_a_request_is_not_about_credentials() -> None:
    """It is a bug, and stays visible."""
    with pytest.raises(RuntimeError), translated("bucket"):
        raise RuntimeError("a bug")


def test_the_service_of_temporary_credentials_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 13: the retrying decorator owns the deadline, so the SDK repeats nothing there either. An identity
    provider that STS cannot reach is an outage."""
    asked: list[str] = []

    class Sts(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            body = b"<ErrorResponse><Error><Code>IDPCommunicationError</Code></Error></ErrorResponse>"
            self.send_response(400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    (tmp_path / "token").write_text("token")
    with HTTPServer(("127.0.0.1", 0), Sts) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in (
            ("ROLE_ARN", "arn:aws:iam::123456789012:role/r"),
            ("WEB_IDENTITY_TOKEN_FILE", tmp_path / "token"),
            ("ENDPOINT_URL_STS", f"http://127.0.0.1:{server.server_port}"),
            ("CONFIG_FILE", tmp_path / "none"),
            ("SHARED_CREDENTIALS_FILE", tmp_path / "none"),
        ):
            monkeypatch.setenv(f"AWS_{name}", str(value))
        monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
        try:
            client = make_client({"endpoint": "http://127.0.0.1:1", "region": "us-east-1"}, 1)
            with pytest.raises(UnavailableError, match="IDPCommunicationError"), translated("bucket"):
                client.head_bucket(Bucket="bucket")
        finally:
            server.shutdown()
    assert len(asked) == 1


def test_requests_say_who_asks() -> None:
    """The log of a bucket tells statemgr's requests from others."""
    agents = []

    def answer(request: Any, **_: object) -> AWSResponse:
        agents.append(request.headers["User-Agent"])
        return AWSResponse(request.url, 200, {}, HTTPResponse(BytesIO(), preload_content=False))

    settings = {"endpoint": "http://127.0.0.1:1", "region": "us-east-1", "access.key": "a", "secret.key": "b"}
    client = make_client(settings, 1)
    client.meta.events.register("before-send.s3", answer)
    client.head_bucket(Bucket="bucket")
    assert f"statemgr/{__version__} Botocore/" in str(agents[0])


@pytest.mark.parametrize("endpoint", [None, "http://127.0.0.1:1"])
def test_a_blob_that_s3_cannot_take_is_not_sent(tmp_path: Path, endpoint: str | None) -> None:
    """Amazon refuses more than 5 GiB, after it has received all of it. Another server may take more, or refuse less."""
    size = 5 * 1024**3 + 1 if endpoint is None else 10
    with (tmp_path / "large").open("wb") as file:
        file.truncate(size)
    asked: list[str] = []

    def answer(request: Any, **_: object) -> AWSResponse:
        asked.append(request.method)
        body = b"<Error><Code>EntityTooLarge</Code></Error>"
        return AWSResponse(request.url, 400, {}, HTTPResponse(BytesIO(body), preload_content=False))

    settings = {"endpoint": endpoint or "", "region": "us-east-1", "access.key": "a", "secret.key": "b"}
    client = make_client(settings, 1)
    client.meta.events.register("before-send.s3", answer)
    store = S3BlobStore(Place(client, "bucket", ""), SystemClock(), ttl_days=7, encryption={}, own="orders/1/")
    with pytest.raises(InvalidError, match="at most 5 GiB") as caught:
        store.put("orders/1/blob", FileSlice(tmp_path / "large", 0, size), ttl_days=7)
    assert "statemgr rescale" in str(caught.value.hint)
    assert caught.value.where["blob"] == "orders/1/blob"
    assert bool(asked) == (endpoint is not None)
