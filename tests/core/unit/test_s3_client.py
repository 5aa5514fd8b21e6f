"""How the S3 client asks, and how it reads answers."""

from __future__ import annotations

from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("botocore")

from botocore.awsrequest import AWSResponse
from botocore.exceptions import CredentialRetrievalError
from botocore.utils import parse_timestamp
from urllib3 import HTTPResponse

from statemgr.blobs.s3.administration import S3Administration
from statemgr.blobs.s3.client import Place, make_client, parsed_time
from statemgr.blobs.s3.errors import translated
from statemgr.errors import UnavailableError
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


def test_installing_a_rule_keeps_the_setting_of_the_others() -> None:
    """S3 sets the size from which rules move objects to its default if a request does not name it."""
    setting = {"TransitionDefaultMinimumObjectSize": "varies_by_storage_class"}
    installed: dict[str, Any] = {}
    client = SimpleNamespace(
        get_bucket_lifecycle_configuration=lambda **_: {"Rules": [{"ID": "mine"}], **setting},
        put_bucket_lifecycle_configuration=lambda **given: installed.update(given),
    )
    abilities: Any = SimpleNamespace(lacks=())
    S3Administration(Place(client, "bucket", ""), 7, abilities).fix()
    assert installed.items() >= setting.items()
    assert len(installed["LifecycleConfiguration"]["Rules"]) == 2


def test_an_outage_of_the_source_of_the_credentials_is_repeated() -> None:
    """It may pass, and the error says what to check if it does not."""
    with pytest.raises(UnavailableError, match="credential_process"), translated("bucket"):
        raise CredentialRetrievalError(provider="custom-process", error_msg="the vault is sealed")


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
