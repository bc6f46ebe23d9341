"""What a file system behind a URL says is told for what it is: absence, rights, a bucket, the way there."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from packtrain.errors import SampleError, SourceError
from packtrain.remote import ranges
from packtrain.remote.ranges import as_source, tried

S3 = "An error occurred"


def boto(code: str, status: int) -> Exception:
    """As botocore's `ClientError`."""
    error = Exception(f"{S3} ({code})")
    error.response = {  # type: ignore[attr-defined]
        "Error": {"Code": code},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return error


def hub(kind: str, status: int | None) -> Exception:
    """As an error of huggingface_hub."""
    error: Exception = type(kind, (Exception,), {})(kind)
    error.response = None if status is None else type("Answer", (), {"status_code": status})()  # type: ignore[attr-defined]
    return error


def web(status: int | None) -> Exception:
    error = Exception("an answer")
    if status is not None:
        error.status = status  # type: ignore[attr-defined]
    return error


ABSENT, REFUSED, AGAIN = ("missing_media", 1), ("unreadable_media", 1), ("unreachable_media", 3)


@pytest.mark.parametrize(
    ("kind", "cause", "doing", "expected"),
    [
        (FileNotFoundError, None, "read", ABSENT),
        (FileNotFoundError, boto("NoSuchKey", 404), "read", ABSENT),
        (FileNotFoundError, boto("NoSuchBucket", 404), "read", REFUSED),
        (FileNotFoundError, boto("NoSuchBucket", 404), "written", REFUSED),
        (FileNotFoundError, None, "written", REFUSED),  # gs:// and hf:// say no more of a bucket
        (FileNotFoundError, KeyError("name"), "read", ABSENT),  # memory://
        (FileNotFoundError, hub("EntryNotFoundError", None), "read", ABSENT),
        (FileNotFoundError, hub("RepositoryNotFoundError", 404), "read", ABSENT),
        (FileNotFoundError, hub("RepositoryNotFoundError", 401), "read", REFUSED),
        (FileNotFoundError, web(404), "read", ABSENT),
        (FileNotFoundError, web(403), "read", REFUSED),
        (FileNotFoundError, web(500), "read", AGAIN),  # fsspec's HTTP hides what went wrong
        (FileNotFoundError, web(None), "read", AGAIN),
        (PermissionError, boto("AccessDenied", 403), "written", REFUSED),
        (OSError, boto("InvalidBucketName", 400), "written", REFUSED),
        (OSError, boto("AuthorizationHeaderMalformed", 400), "read", REFUSED),
        (OSError, boto("BadDigest", 400), "written", AGAIN),
        (OSError, boto("RequestTimeout", 400), "written", AGAIN),
        (OSError, boto("InternalError", 500), "written", AGAIN),
        (OSError, boto("SlowDown", 503), "read", AGAIN),
        (OSError, None, "read", AGAIN),
    ],
)
def test_a_fault_is_told_for_what_it_is(
    kind: type[Exception],
    cause: Exception | None,
    doing: str,
    expected: tuple[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranges, "PAUSE", 0.0)
    calls: list[int] = []

    def request() -> None:
        calls.append(1)
        raise kind("said") from cause

    with pytest.raises(SampleError) as told:
        tried("s3://b/x", request, 3, doing)
    assert (told.value.reason, len(calls)) == expected
    with pytest.raises(SourceError) as seen, as_source():
        raise told.value
    far = "network is up" in (seen.value.hint or "")
    assert far == (expected == AGAIN)
    if expected == REFUSED:
        assert seen.value.hint


def test_queries_and_passwords_stand_in_no_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ranges, "PAUSE", 0.0)
    monkeypatch.setattr(ranges, "_told", set())
    secret = "500, url='https://me:hidden@host/a b?sig=hidden&x=1', https://host/y?token=hidden"

    def request() -> Any:
        raise OSError(secret)

    with caplog.at_level(logging.WARNING), pytest.raises(SampleError) as told:
        tried("https://host/x", request, 4)
    assert "hidden" not in told.value.message + caplog.text
    assert "https://host/a b" in told.value.message


def test_slow_ways_are_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(ranges, "PAUSE", 0.0)
    monkeypatch.setattr(ranges, "_told", set())
    for name in ("s3://b/x", "s3://b/y", "s3://c/x"):
        answers = [OSError("a"), OSError("b"), 5]

        def request(answers: list[Any] = answers) -> int:
            one = answers.pop(0)
            if isinstance(one, Exception):
                raise one
            return int(one)

        assert tried(name, request, 7) == 5
    assert [record.getMessage().split()[0] for record in caplog.records] == ["s3://b/x", "s3://c/x"]
    assert "tried 7 times" in caplog.text
