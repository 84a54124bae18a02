"""Faults by name: HTTP errors of several servers' shapes, Retry-After, and texts that never hold the key."""

from __future__ import annotations

import datetime
from email.utils import format_datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.data.regenerate.openai_faults import LONGEST_RETRY_AFTER_S, FaultKind, clean, fault_of_status, retry_after
from eyas.errors import ConfigError, EngineError

NOW = datetime.datetime(2026, 3, 1, 12, 0, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "99999999"}, LONGEST_RETRY_AFTER_S),
        ({"retry-after": "inf"}, LONGEST_RETRY_AFTER_S),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "0.25"}, 0.25),
        ({"retry-after": "1e999"}, LONGEST_RETRY_AFTER_S),
        ({"retry-after": "-inf"}, 0.0),
        ({"retry-after": "Wed, 21 Oct 99999999999 07:28:00 GMT"}, None),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 +99999999999999999999"}, None),
        ({"retry-after": "Wed, 21 Oct 2026 99:28:00 GMT"}, None),
        ({"retry-after": format_datetime(NOW + datetime.timedelta(seconds=42), usegmt=True)}, 42.0),
        ({"retry-after": format_datetime(NOW - datetime.timedelta(hours=1), usegmt=True)}, 0.0),
        ({"retry-after": "Sun, 01 Mar 2026 12:00:30"}, 30.0),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers, NOW) == seconds


@given(st.text())
def test_any_retry_after_is_bounded(text: str) -> None:
    seconds = retry_after({"retry-after": text}, NOW)
    assert seconds is None or 0 <= seconds <= LONGEST_RETRY_AFTER_S


@pytest.mark.parametrize(
    ("status", "body", "reason", "kind"),
    [
        (408, "", "server-timeout", FaultKind.RETRY),
        (409, None, "conflict", FaultKind.RETRY),
        (429, {"message": "slow down"}, "rate-limited", FaultKind.RETRY),
        (500, "<html>", "server-error", FaultKind.RETRY),
        (529, {"error": "overloaded"}, "server-error", FaultKind.RETRY),
        (400, {"message": "The input (9 tokens) is longer than the model's context"}, "prompt-too-long", FaultKind.ROW),
        (400, {"error": {"code": "context_length_exceeded", "message": "no"}}, "prompt-too-long", FaultKind.ROW),
        (422, {"detail": [{"loc": ["body"], "msg": "bad"}]}, "bad-request", FaultKind.ROW),
        (413, "", "bad-request", FaultKind.ROW),
        (400, {"message": "stream_options is not supported"}, "bad-request", FaultKind.NO_STREAM_OPTIONS),
    ],
)  # fmt: skip
def test_statuses(status: int, body: Any, reason: str, kind: FaultKind) -> None:
    fault = fault_of_status(status, body, {}, "http://x")
    assert (fault.reason, fault.kind, fault.charged) == (reason, kind, False)
    assert fault.detail.startswith(f"HTTP {status}")


@pytest.mark.parametrize(
    ("status", "error"), [(401, EngineError), (402, EngineError), (403, EngineError), (405, EngineError)]
)
def test_statuses_about_us_end_the_run(status: int, error: type[Exception]) -> None:
    fault = fault_of_status(status, {"message": "no"}, {}, "http://x")
    assert fault.kind is FaultKind.STOP
    assert isinstance(fault.error, error)


def test_a_model_that_is_not_known() -> None:
    for status, body in (
        (404, {"message": "The model `m` does not exist.", "code": 404}),
        (400, {"code": "model_not_found"}),
    ):
        assert isinstance(fault_of_status(status, body, {}, "http://x").error, ConfigError)


@given(st.text("ab \n", max_size=700), st.text("abk", min_size=4, max_size=30))
def test_details_are_one_short_line_without_the_key(text: str, key: str) -> None:
    line = clean(text + key + text, key)
    assert len(line) <= 300
    assert "\n" not in line
    assert key not in line
