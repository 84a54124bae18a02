from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from eyas.capture.contract import (
    CONTRACT_VERSION,
    DTYPES,
    LAST_MODES,
    CaptureReply,
    CaptureSpec,
    RecordHeader,
    RequestId,
    ServerHello,
    check_runs,
    count_of,
    default_layers,
    is_own_rid,
    runs_hash,
    runs_of,
    token_hash,
)
from eyas.capture.settings import ServerSettings

WORD = st.text("0123456789abcdefghijklmnopqrstuvwxyz", min_size=8, max_size=8)
RIDS = st.builds(RequestId, WORD, WORD, st.integers(0, 99_999_999), st.integers(0, 99))
SPEC = CaptureSpec((1, 4, 6), "loss", "bf16", 64, 1000, 10, "f" * 32)


@st.composite
def specs(draw: st.DrawFn) -> CaptureSpec:
    num_layers = draw(st.integers(1, 90))
    layers = draw(st.sets(st.integers(0, num_layers - 1), min_size=1, max_size=8))
    return CaptureSpec(
        tuple(sorted(layers)),
        draw(st.sampled_from(LAST_MODES)),
        draw(st.sampled_from(sorted(DTYPES))),
        draw(st.integers(1, 20_000)),
        draw(st.integers(1, 300_000)),
        num_layers,
        draw(st.text("0123456789abcdef", min_size=32, max_size=32)),
    )


# --- request ids


@given(RIDS)
def test_rid_round_trips_with_fixed_width(rid: RequestId) -> None:
    text = str(rid)
    assert RequestId.parse(text) == rid
    assert len(text) == 34
    assert is_own_rid(text)
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz0123456789.")


@given(RIDS, RIDS)
def test_no_rid_is_a_prefix_of_another(one: RequestId, other: RequestId) -> None:
    assert one == other or not str(one).startswith(str(other))


@given(RIDS, st.text(max_size=3), st.text(max_size=3))
def test_rid_with_anything_around_it_is_not_one(rid: RequestId, before: str, after: str) -> None:
    parsed = RequestId.parse(before + str(rid) + after)
    assert (parsed == rid) == (before + after == "")


@given(st.text())
def test_foreign_rid_parses_to_none(text: str) -> None:
    assert RequestId.parse(text) is None or is_own_rid(text)


@pytest.mark.parametrize("text", ["HEALTH_CHECK_0af3", "0123456789abcdef", "", None, 7, "xeyas.a", "eyasx"])
def test_warmups_and_other_users_are_not_ours(text: object) -> None:
    assert not is_own_rid(text)


@pytest.mark.parametrize(
    "text",
    [
        "eyas.run00000.ses00000.1.00",  # not fixed width
        "eyas.RUN00000.ses00000.00000001.00",
        "eyas.run00000.ses00000.00000001.00\n",
        "eyas.run00000.ses00000.00000001.\u0660\u0660",  # digits of another script
    ],
)
def test_malformed_own_rid_parses_to_none(text: str) -> None:
    assert RequestId.parse(text) is None


# --- runs and hashes


@given(st.lists(st.booleans(), max_size=60))
def test_runs_describe_exactly_the_positions(mask: list[bool]) -> None:
    positions = [i for i, kept in enumerate(mask) if kept]
    runs = runs_of(positions)
    assert [i for start, stop in zip(runs[::2], runs[1::2], strict=True) for i in range(start, stop)] == positions
    assert count_of(runs) == len(positions)
    check_runs(runs, len(mask))
    assert len(runs) == 2 * sum(1 for i, kept in enumerate(mask) if kept and not (i and mask[i - 1]))


@pytest.mark.parametrize("runs", [[0], [0, 0], [2, 1], [0, 6], [-1, 2], [0, 3, 2, 4], [3, 4, 0, 1], ["0", 1], [0.0, 1]])
def test_bad_runs_are_refused(runs: list[int]) -> None:
    with pytest.raises(ValueError, match=r"run|pairs"):
        check_runs(runs, 5)


def test_touching_runs_are_allowed_but_hash_differently() -> None:
    check_runs([0, 2, 2, 4], 5)
    assert runs_hash([0, 2, 2, 4]) != runs_hash([0, 4])


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_token_hash_is_xxh3_of_little_endian_int32(tokens: list[int]) -> None:
    data = b"".join(token.to_bytes(4, "little") for token in tokens)
    assert token_hash(tokens) == xxhash.xxh3_128_hexdigest(data) == token_hash(data)


# --- spec


@given(specs())
def test_spec_round_trips_through_json(spec: CaptureSpec) -> None:
    again = CaptureSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert again.spec_id == spec.spec_id
    assert spec.differences(again) == []


@given(specs(), specs())
def test_spec_id_tells_specs_apart(one: CaptureSpec, other: CaptureSpec) -> None:
    assert (one.spec_id == other.spec_id) == (one == other) == (one.differences(other) == [])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", (1, 4)),
        ("last", "all"),
        ("dtype", "f32"),
        ("hidden_size", 65),
        ("vocab_size", 1),
        ("num_layers", 11),
        ("model", "0"),
    ],
)
def test_every_field_changes_the_id_and_is_named(field: str, value: object) -> None:
    other = dataclasses.replace(SPEC, **{field: value})
    assert other.spec_id != SPEC.spec_id
    (difference,) = SPEC.differences(other)
    assert difference.startswith(f"{field}: ")


@pytest.mark.parametrize(
    "change",
    [
        {"layers": ()},
        {"layers": (4, 1)},
        {"layers": (1, 1)},
        {"layers": (-1, 2)},
        {"layers": (1, 10)},
        {"last": "first"},
        {"dtype": "f64"},
        {"hidden_size": 0},
        {"vocab_size": 0},
    ],
)
def test_impossible_spec_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"layers|last|dtype|positive"):
        dataclasses.replace(SPEC, **change)


@pytest.mark.parametrize("change", [{"extra": 1}, {"layers": None}, {"layers": ["x"]}])
def test_dict_that_is_no_spec_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"spec|invalid literal"):
        CaptureSpec.from_dict({**SPEC.to_dict(), **change})


def test_dict_without_a_field_is_refused() -> None:
    data = SPEC.to_dict()
    del data["model"]
    with pytest.raises(ValueError, match="model"):
        CaptureSpec.from_dict(data)


def test_record_bytes() -> None:
    assert SPEC.record_bytes(10, 3) == 10 * 3 * 64 * 2 + 3 * 64 * 2


@given(st.integers(7, 200))
def test_default_layers_are_distinct_and_inside(num_layers: int) -> None:
    layers = default_layers(num_layers)
    assert dataclasses.replace(SPEC, layers=layers, num_layers=num_layers).layers == layers


@pytest.mark.parametrize("num_layers", range(7))
def test_small_models_have_no_default_layers(num_layers: int) -> None:
    with pytest.raises(ValueError, match="name them"):
        default_layers(num_layers)


# --- messages


def hello(spec: CaptureSpec = SPEC) -> ServerHello:
    return ServerHello(spec.to_dict(), spec.spec_id, {"engine": "sglang"}, 4000, 1 << 30)


@given(specs())
def test_hello_round_trips(spec: CaptureSpec) -> None:
    assert ServerHello.from_json(hello(spec).to_json()) == hello(spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contract": CONTRACT_VERSION + 1}, "contract version"),
        ({"spec_id": "0" * 32}, "not the hash"),
        ({"spec": SPEC.to_dict() | {"dtype": "f32"}}, "not the hash"),
        ({"spec": {}}, "not a capture spec"),
        ({"news": 1}, "ServerHello"),
    ],
)
def test_wrong_hello_is_refused_by_name(change: dict[str, object], message: str) -> None:
    text = json.dumps(json.loads(hello().to_json()) | change)
    with pytest.raises(ValueError, match=message):
        ServerHello.from_json(text)


@given(st.data())
def test_cut_messages_are_refused(data: st.DataObject) -> None:
    header = RecordHeader(
        str(RequestId("a" * 8, "b" * 8, 1, 0)), SPEC.spec_id, "0" * 32, 3, 1, "0" * 16, [[0, 3]], "0" * 16, "0" * 16
    )
    assert RecordHeader.from_json(header.to_json()) == header
    for kind, text in ((RecordHeader, header.to_json()), (ServerHello, hello().to_json())):
        cut = data.draw(st.integers(0, len(text) - 1))
        with pytest.raises(ValueError, match="JSON"):
            kind.from_json(text[:cut])


def test_reply_round_trips_and_refuses_strangers() -> None:
    reply = CaptureReply("refused", SPEC.spec_id, "0" * 32, 3, "spool-full", "8 GiB")
    assert CaptureReply.from_dict(reply.to_dict()) == reply
    with pytest.raises(ValueError, match="CaptureReply"):
        CaptureReply.from_dict({**reply.to_dict(), "more": 1})


def test_settings_round_trip_through_the_environment() -> None:
    settings = ServerSettings((1, 2), "/dev/shm/x", "all", "f32", 5, 0o660, "users", 9.0)
    assert ServerSettings.from_env(settings.to_env()) == settings
    with pytest.raises(ValueError, match="EYAS_CAPTURE"):
        ServerSettings.from_env("{}")


def test_contract_needs_only_the_standard_library_and_xxhash() -> None:
    code = f"""
import sys
sys.path[:] = {sys.path!r}
import eyas.capture.contract
print(*{{module.partition(".")[0] for module in sys.modules}} - sys.stdlib_module_names)
"""
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) - {"__main__"} == {"eyas", "xxhash"}
