from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from costs import Cost
from eyas.capture.contract import PROBE_ROW, SPEC_FILE, CaptureSpec, RequestId, ServerHello
from eyas.errors import EngineError
from eyas.extract.engine import Failed, Retry
from eyas.extract.inbox import Inbox

SPEC = CaptureSpec((1, 3, 6), "loss", "bf16", 24, 1000, 10, "f" * 32)
HELLO = ServerHello(SPEC.to_dict(), SPEC.spec_id, {"engine": "sglang"}, 100, 1 << 20)


def rid(row: int, session: str = "ses00000", run: str = "run00000") -> str:
    return str(RequestId(run, session, row, 0))


def put(folder: Path, name: str, text: str = "x") -> Path:
    (folder / "tmp").write_text(text)
    return (folder / "tmp").rename(folder / name)


async def wait_all(inbox: Inbox, *waits: Coroutine[Any, Any, Path | Failed]) -> list[Path | Failed]:
    try:
        return await asyncio.gather(*waits)
    finally:
        await inbox.close()


def test_records_come_to_whoever_waits_for_them_in_any_order(tmp_path: Path) -> None:
    async def scenario() -> list[Path | Failed]:
        inbox = Inbox(tmp_path)
        put(tmp_path, f"{rid(0)}.safetensors")

        async def publish() -> Failed:
            for row in (5, 2, 4, 1, 3):
                await asyncio.sleep(0.01)
                put(tmp_path, f"{rid(row)}.safetensors")
                put(tmp_path, f"{rid(row, session='ses00001')}.safetensors")
            return Failed("published")

        return await wait_all(inbox, *(inbox.wait(rid(row), 5) for row in range(6)), publish())

    results = asyncio.run(scenario())
    assert results[:6] == [tmp_path / f"{rid(row)}.safetensors" for row in range(6)]


def test_a_failure_note_is_the_failure_and_is_removed(tmp_path: Path) -> None:
    note = put(tmp_path, f"{rid(1)}.failed", json.dumps({"reason": "write-failed", "detail": "disk full"}))
    inbox = Inbox(tmp_path)
    (result,) = asyncio.run(wait_all(inbox, inbox.wait(rid(1), 5)))
    assert result == Failed("write-failed", "disk full", Retry.PROBE)
    assert not note.exists()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"reason": "x"}'])
def test_a_damaged_failure_note_is_still_a_failure(text: str, tmp_path: Path) -> None:
    put(tmp_path, f"{rid(1)}.failed", text)
    inbox = Inbox(tmp_path)
    (result,) = asyncio.run(wait_all(inbox, inbox.wait(rid(1), 5)))
    assert isinstance(result, Failed)
    assert result.reason == "record-damaged"


def test_a_late_record_fails_by_name_at_its_own_deadline(tmp_path: Path) -> None:
    put(tmp_path, f".{rid(1)}.tmp")  # still being written
    inbox = Inbox(tmp_path)
    started = time.monotonic()
    late, later = asyncio.run(wait_all(inbox, inbox.wait(rid(1), 0.05), inbox.wait(rid(2), 0.3)))
    assert late == later == Failed("record-late", "accepted, but it did not come", Retry.PROBE)
    assert 0.3 <= time.monotonic() - started < 20


def test_a_spool_that_is_gone_fails_every_waiter(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "gone")
    results = asyncio.run(wait_all(inbox, inbox.wait(rid(1), 5), inbox.wait(rid(2), 5)))
    assert [result.reason for result in results if isinstance(result, Failed)] == ["spool-gone", "spool-gone"]


def test_a_cancelled_wait_leaves_the_others_alone(tmp_path: Path) -> None:
    async def scenario() -> Path | Failed:
        inbox = Inbox(tmp_path)
        gone, stays = (asyncio.create_task(inbox.wait(rid(row), 5)) for row in (1, 2))
        await asyncio.sleep(0.02)
        gone.cancel()
        await asyncio.sleep(0.02)
        put(tmp_path, f"{rid(2)}.safetensors")
        result = await stays
        await inbox.close()
        return result

    assert asyncio.run(scenario()) == tmp_path / f"{rid(2)}.safetensors"


def test_polling_backs_off_and_stops(tmp_path: Path) -> None:
    async def scenario() -> None:
        inbox = Inbox(tmp_path)
        waiting = asyncio.create_task(inbox.wait(rid(1), 0.6))
        with Cost() as cost:
            await waiting
        assert cost.lines < 5000  # looks at intervals of 0.1 ms run 17,000
        await asyncio.sleep(0.06)
        assert len(asyncio.all_tasks()) == 1  # the poller has ended
        put(tmp_path, f"{rid(2)}.safetensors")
        assert await inbox.wait(rid(2), 5) == tmp_path / f"{rid(2)}.safetensors"
        await inbox.close()

    asyncio.run(scenario())


def test_remove_is_idempotent(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    record = put(tmp_path, f"{rid(1)}.safetensors")
    other = put(tmp_path, f"{rid(2)}.safetensors")
    inbox.remove(rid(1))
    inbox.remove(rid(1))
    assert not record.exists()
    assert other.exists()


def test_abandoned_records_are_removed_whenever_they_come(tmp_path: Path) -> None:
    async def scenario() -> None:
        inbox = Inbox(tmp_path)
        now = put(tmp_path, f"{rid(1)}.safetensors")
        inbox.abandon(rid(1))
        assert not now.exists()
        inbox.abandon(rid(2))
        inbox.abandon(rid(3))
        soon = put(tmp_path, f"{rid(2)}.safetensors")
        await inbox.wait(rid(9), 0.1)
        assert not soon.exists()
        at_the_end = put(tmp_path, f"{rid(3)}.failed")
        await inbox.close()
        assert not at_the_end.exists()

    asyncio.run(scenario())


def test_stale_records_of_dead_sessions_of_this_run_only(tmp_path: Path) -> None:
    dead = [
        put(tmp_path, f"{rid(row, 'dead0000')}{suffix}") for row in (1, 2) for suffix in (".safetensors", ".failed")
    ]
    kept = [
        put(tmp_path, f"{rid(1, 'alive000')}.safetensors"),
        put(tmp_path, f"{rid(1, 'dead0000', 'run00001')}.safetensors"),
        put(tmp_path, f"{rid(PROBE_ROW, 'dead0000')}.safetensors"),
        put(tmp_path, f".{rid(1, 'dead0000')}.tmp"),
        put(tmp_path, SPEC_FILE),
        put(tmp_path, "someone-elses.safetensors"),
    ]
    assert Inbox(tmp_path).clean_stale("run00000", lambda session: session == "alive000") == 4
    assert not any(path.exists() for path in dead)
    assert all(path.exists() for path in kept)


def test_what_cannot_be_removed_is_no_reason_not_to_start(tmp_path: Path) -> None:
    rid = RequestId("run00000", "ses00000", 1, 0)
    (tmp_path / f"{rid}.safetensors").mkdir()
    (tmp_path / f"{rid._replace(row=2)}.safetensors").touch()
    assert Inbox(tmp_path).clean_stale("run00000", lambda session: False) == 1
    assert [path.is_dir() for path in tmp_path.iterdir()] == [True]


def test_usage_counts_records(tmp_path: Path) -> None:
    put(tmp_path, f"{rid(1)}.safetensors", "12345")
    put(tmp_path, f"{rid(2, 'other000', 'run00009')}.safetensors", "123")
    put(tmp_path, f"{rid(3)}.failed", "1")
    put(tmp_path, "stranger", "123456789")
    assert Inbox(tmp_path).usage_bytes() == 8
    assert Inbox(tmp_path / "gone").usage_bytes() == 0


def test_hello_is_read(tmp_path: Path) -> None:
    (tmp_path / SPEC_FILE).write_text(HELLO.to_json())
    assert Inbox(tmp_path).hello() == HELLO


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (None, "found no spool"),
        ("{", "cannot understand the plugin"),
        (HELLO.to_json().replace('"contract": 1', '"contract": 2'), r"contract version 2, this is version 1"),
        (HELLO.to_json().replace(HELLO.spec_id, "0" * 32), "not the hash"),
    ],
)
def test_a_hello_that_will_not_do_is_named(text: str | None, what: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / SPEC_FILE).write_text(text)
    with pytest.raises(EngineError, match=what) as error:
        Inbox(tmp_path).hello()
    assert error.value.hint
    assert "\n" not in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_spool_we_may_not_read_is_named(tmp_path: Path) -> None:
    (tmp_path / SPEC_FILE).write_text(HELLO.to_json())
    (tmp_path / SPEC_FILE).chmod(0)
    with pytest.raises(EngineError, match="may not read"):
        Inbox(tmp_path).hello()


def test_a_second_record_under_a_fetched_ones_name_is_removed(tmp_path: Path) -> None:
    """Somebody imitates our ids: theirs came first, ours (the same states) after it was fetched."""

    async def scenario() -> list[Path | Failed]:
        inbox = Inbox(tmp_path)
        put(tmp_path, f"{rid(0)}.safetensors")
        first = await inbox.wait(rid(0), 5)
        inbox.remove(rid(0))
        put(tmp_path, f"{rid(0)}.safetensors")
        put(tmp_path, f"{rid(1)}.safetensors")
        second = await inbox.wait(rid(1), 5)
        assert not (tmp_path / f"{rid(0)}.safetensors").exists()
        put(tmp_path, f"{rid(0)}.failed")  # and one after the last wait
        await inbox.close()
        return [first, second]

    assert [path.name for path in asyncio.run(scenario()) if isinstance(path, Path)] == [
        f"{rid(row)}.safetensors" for row in range(2)
    ]
    assert [path.name for path in tmp_path.iterdir()] == [f"{rid(1)}.safetensors"]
