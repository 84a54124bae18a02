"""What comes over the wire never becomes a path unless it is exactly an identity of ours, and costs no time first."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from costs import Cost
from eyas.capture.assembler import Assembler, Chunk, Refused
from eyas.capture.contract import (
    LAST_PARAM,
    SPEC_PARAM,
    CaptureReply,
    Refusal,
    RequestId,
    ServerHello,
    check_runs,
    is_own_rid,
)
from eyas.capture.spool import parse_name
from eyas.config import ServerConfig
from eyas.extract.build import new_session
from security.hostile import HELLO, SPEC, recorder, rid, send, wait_for

GOOD = rid(7)
HOSTILE_RIDS = [
    "eyas.run00000.sess0000.00000007.00/../../x",
    "eyas.../../../../etc/cron.d/x",
    "eyas./../x",
    "eyas.run00000.sess0000.00000007/00",
    "eyas.run00000.sess0000.../00007.00",
    f"{GOOD}\x00.safetensors",
    f"{GOOD}\n",
    f"\n{GOOD}",
    f"{GOOD} ",
    f"{GOOD}.",
    f"{GOOD}/",
    f"../{GOOD}",
    GOOD.upper(),
    GOOD.replace("7", "\u0667"),  # ARABIC-INDIC DIGIT SEVEN, a digit to `\\d` and to int()
    GOOD.replace("7", "\uff17"),  # FULLWIDTH DIGIT SEVEN
    GOOD.replace("run", "rün"),
    GOOD.replace("s", "\u017f"),  # LATIN SMALL LETTER LONG S, equal to s where case is ignored
    GOOD.replace(".", "\u2024"),
    "eyas." + "a" * 1_000_000,
    "eyas.",
    "eyas.run00000.sess0000.-0000007.00",
    "eyas.run00000.sess0000.+0000007.00",
    "eyas.run00000.sess0000.0000_007.00",
    "eyas.\ud800",
]


@pytest.mark.parametrize("text", HOSTILE_RIDS, ids=lambda text: ascii(text[:40]))
def test_only_an_exact_identity_is_one(text: str) -> None:
    assert RequestId.parse(text) is None
    for suffix in (".safetensors", ".failed"):
        assert parse_name(f"{text}{suffix}") is None
    assert parse_name(f".{text}.tmp") is None


def test_an_identity_has_no_character_that_a_path_minds() -> None:
    parsed = RequestId.parse(GOOD)
    assert parsed is not None
    assert str(parsed) == GOOD
    assert set(GOOD) <= set("abcdefghijklmnopqrstuvwxyz0123456789.")
    assert Path("/spool", GOOD).parent == Path("/spool")
    assert RequestId.parse(str(RequestId("run00000", new_session(), 0, 0)))


@pytest.mark.parametrize("text", HOSTILE_RIDS, ids=lambda text: ascii(text[:40]))
def test_a_request_under_another_name_is_refused_and_makes_no_file(text: str, tmp_path: Path) -> None:
    if not is_own_rid(text):
        return  # the plugin does not look at it at all
    with recorder(tmp_path / "spool") as to:
        reply = send(to, text)
        assert reply is not None
        assert (reply.status, reply.reason) == ("refused", Refusal.BAD_REQUEST)
        assert len(json.dumps(reply.to_dict())) < 2000
        send(to, rid(0))
        wait_for(tmp_path / "spool" / f"{rid(0)}.safetensors")
    assert [path.name for path in tmp_path.rglob("*")] == ["spool", f"{rid(0)}.safetensors"]


@pytest.mark.parametrize("text", [None, 7, 1.5, b"eyas.x", ["eyas."], {"eyas.": 1}, True])
def test_a_request_id_that_is_no_text_is_not_ours(text: Any) -> None:
    assert not is_own_rid(text)


JSON_VALUES = [
    None,
    True,
    7,
    -1,
    1.5,
    float("nan"),
    10**5000,
    "",
    "0" * 32,
    "x" * 10_000_000,
    "/etc/passwd",
    [],
    [[]],
    {},
    {"a": {"b": [1]}},
    [0, 2, "x"],
]


@pytest.mark.parametrize("value", JSON_VALUES, ids=range(len(JSON_VALUES)))
def test_a_spec_of_any_type_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    with recorder(tmp_path) as to:
        reply = send(to, rid(0), params={SPEC_PARAM: value, LAST_PARAM: [0, 2]})
        assert reply is not None
        assert (reply.status, reply.reason) == ("refused", Refusal.SPEC_DIFFERS)
        assert len(reply.detail) < 300
    assert list(tmp_path.iterdir()) == []


BAD_RUNS = [
    *(value for value in JSON_VALUES if value != []),
    [0],
    [0, 0],
    [2, 0],
    [0, 6],
    [-1, 2],
    [0, 10**5000],
    [10**5000, 10**5000 + 1],
    [False, True],
    [0.0, 2.0],
    ["0", "2"],
    [None, None],
    [[0], [2]],
    [0, 2, 1, 3],
    [0, float("nan")],
    [0, "x" * 1_000_000],
]


@pytest.mark.parametrize("value", BAD_RUNS, ids=range(len(BAD_RUNS)))
def test_positions_of_any_other_form_are_refused_by_name(value: Any, tmp_path: Path) -> None:
    with recorder(tmp_path) as to:
        reply = send(to, rid(0), params={SPEC_PARAM: SPEC.spec_id, LAST_PARAM: value})
        assert reply is not None
        assert (reply.status, reply.reason) == ("refused", Refusal.BAD_REQUEST)
        assert len(reply.detail) < 300
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [[], 5, "x", True, [{}], None])
def test_custom_params_that_are_no_object_are_refused_by_name(value: Any) -> None:
    class Owner:
        pass

    owner = Owner()
    step = Assembler(SPEC).add(Chunk(rid(0), 0, 3, [1, 2, 3], value, owner))
    assert isinstance(step, Refused)
    assert step.reason is Refusal.BAD_REQUEST


def test_millions_of_positions_do_not_hold_the_scheduler_up(tmp_path: Path) -> None:
    """Bounded by the prompt's length before any of them is looked at."""
    many = list(range(10_000_000))
    with recorder(tmp_path) as to, Cost() as cost:
        tracemalloc.start()
        reply = send(to, rid(0), params={SPEC_PARAM: SPEC.spec_id, LAST_PARAM: many})
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert cost.lines < 10_000
    assert peak < 8e6  # a copy of them has 80 MB
    assert reply is not None
    assert reply.reason == Refusal.BAD_REQUEST
    assert "5000000 position runs for 5 tokens" in reply.detail

    class Counting(list[int]):
        looked_at = 0

        def __getitem__(self, key: Any) -> Any:
            Counting.looked_at += 1
            return super().__getitem__(key)

    with pytest.raises(ValueError, match="position runs for 5 tokens"):
        check_runs(Counting(range(100)), 5)
    assert Counting.looked_at == 0


def test_every_position_may_be_a_run_of_its_own() -> None:
    check_runs([edge for position in range(5) for edge in (position, position + 1)], 5)


MEASURED = ("forward_us_p50", "forward_us_p99")
REPLY = CaptureReply("accepted", "0" * 32, "1" * 32, 3).to_dict()


@pytest.mark.parametrize("field", sorted(REPLY))
@pytest.mark.parametrize("value", [None, True, 1.5, [], {}, ["accepted"], float("nan")], ids=repr)
def test_a_reply_of_another_type_is_not_taken(field: str, value: Any) -> None:
    if field in MEASURED and value == 1.5:
        value = "1.5"
    with pytest.raises(ValueError, match=f"{field} is (ill-typed|no time)"):
        CaptureReply.from_dict(REPLY | {field: value})


@pytest.mark.parametrize("value", [-1.0, float("inf"), -float("inf")])
@pytest.mark.parametrize("field", MEASURED)
def test_a_time_is_one(field: str, value: float) -> None:
    assert getattr(CaptureReply.from_dict(REPLY | {field: 1.5}), field) == 1.5
    with pytest.raises(ValueError, match=f"{field} is no time"):
        CaptureReply.from_dict(REPLY | {field: value})


@pytest.mark.parametrize(
    "provenance", [{"host": 1}, {"host": None}, {"host": ["x"]}, ["x"], "x", {"host": {"a": "b"}}], ids=repr
)
def test_a_hello_is_texts_and_numbers_of_the_right_kind(provenance: Any) -> None:
    data = json.loads(HELLO.to_json())
    with pytest.raises(ValueError, match="provenance is ill-typed"):
        ServerHello.from_json(json.dumps(data | {"provenance": provenance}))
    for key in ("max_row_tokens", "quota_bytes"):
        for value in (0, -1, True, 1.5, "9"):
            with pytest.raises(ValueError, match=key):
                ServerHello.from_json(json.dumps(data | {key: value}))


def test_the_spool_is_found_from_settings_and_a_port_only() -> None:
    """No word of the server's decides where the client looks."""
    assert "spool" not in ServerHello.__dataclass_fields__
    assert ServerConfig().spool is None
