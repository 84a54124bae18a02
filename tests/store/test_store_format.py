"""Golden bytes: the format is what these hashes say, read here without the code that wrote it."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from eyas.capture.contract import DTYPES, CaptureSpec
from eyas.store.check import verify_store
from eyas.store.format import Sidecar, StoreInfo, pack_contents, shard_layout
from eyas.store.journal import Session, session_line
from eyas.store.plan import Plan, Shard, make_plan
from eyas.store.reader import StoreReader
from eyas.store.writer import StoreWriter

GOLDEN_SPEC = CaptureSpec((1, 2), "loss", "bf16", 4, 32, 8, "0123456789abcdef" * 2)
GOLDEN_ROWS = [
    ([5, 6, 7], [0, 1, 1], [1]),
    ([5, 9], [1, 1], [0]),  # failed
    ([8, 7, 6, 5], [1, 1, 1, 0], [0, 1]),
]
GOLDEN_SHA256 = {
    "shard-00000.safetensors": "a2b3354787b3e3dfa5d1a32ca2b4a96d3bf9d81e3275061dd26e8bef0e1bca4d",
    "shard-00000.json": "7cc5ee8ca4a7d92b003e4a6157d61012c9870e4ba5dfdee573f69d59dc6edb3c",
    "store.json": "207a2880e422f4a2d04d67284354c63dd8a3d79cf2fff184b652f20f275aa2b5",
    "manifest.json": "4079a49949433032c71a21f3f4f20c76596f4f4b2ece85a1b7f977692e9e372a",
}
GOLDEN_FP8_SHA256 = "a20a2ed1969cdf27418f65d8063e0365758948c41b1ea4ff4725d78153eeed55"


def golden_states(row: int) -> tuple[np.ndarray, np.ndarray]:
    """bf16 numbers row + n / 8, exact in bf16, as their upper halves of float32."""
    tokens, _, positions = GOLDEN_ROWS[row]
    aux = row + np.arange(len(tokens) * 2 * 4, dtype=np.float32).reshape(-1, 2, 4) / 8
    last = -row - np.arange(len(positions) * 4, dtype=np.float32).reshape(-1, 4) / 8
    return tuple((x.view(np.uint32) >> 16).astype(np.uint16) for x in (aux, last))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("golden")
    writer = StoreWriter.open(
        root,
        spec=GOLDEN_SPEC,
        corpus={"digest": "c0ffee", "rows": 3},
        tokens_N=[3, 2, 4],
        positions_N=[1, 1, 2],
        shard_bytes=1 << 20,
        provenance={"engine": "golden", "host": "anywhere"},
    )
    lease = writer.lease(writer.plan.shards[0], lambda shard: GOLDEN_ROWS[shard.start : shard.stop])
    assert lease is not None
    with lease:
        lease.put(2, *golden_states(2))
        lease.fail(1, "prefix-cached", "not stored")
        lease.put(0, *golden_states(0))
        lease.finish()
    writer.write_manifest()
    return root


def test_golden_bytes(golden):
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in golden.iterdir()}
    assert found == GOLDEN_SHA256


def test_golden_bytes_of_a_quantised_store(tmp_path):
    """Codes and scale of each state by hand: e4m3fn has a sign, 4 bits of exponent (7 is 2^0) and 3 of mantissa."""
    spec = replace(GOLDEN_SPEC, dtype="fp8_e4m3")
    # (codes, scale): 448 is 0x7e, 1 is 0x38, the smallest subnormal 2^-9 is 0x01; 0x80 is the sign.
    aux = [("7e38b801", 0.5), ("00000000", 2.0**-126), ("fe7e0138", 1.0), ("38387eb9", 0.25)]
    last = [("7e000081", 2.0)]

    def stored(states):
        return b"".join(bytes.fromhex(codes) + struct.pack("<f", scale) for codes, scale in states)

    writer = StoreWriter.open(
        tmp_path,
        spec=spec,
        corpus={"digest": "c0ffee", "rows": 1},
        tokens_N=[2],
        positions_N=[1],
        shard_bytes=1 << 20,
        provenance={"engine": "golden", "host": "anywhere"},
    )
    rows = [np.frombuffer(stored(states), "u1") for states in (aux, last)]
    with writer.lease(writer.plan.shards[0], lambda _: [([5, 6], [1, 0], [0])]) as lease:
        lease.put(0, *rows)
        lease.finish()
    data = (tmp_path / "shard-00000.safetensors").read_bytes()
    assert hashlib.sha256(data).hexdigest() == GOLDEN_FP8_SHA256
    with safe_open(tmp_path / "shard-00000.safetensors", framework="pt") as shard:
        assert shard.get_tensor("aux").shape == (2, 2, 8)
        assert bytes(shard.get_tensor("aux").flatten().tolist()) + bytes(
            shard.get_tensor("last").flatten().tolist()
        ) == (stored(aux) + stored(last))
    row = StoreReader(tmp_path)[0]
    assert row.aux.tolist() == [
        [[224, 0.5, -0.5, 2**-10], [0, 0, 0, 0]],
        [[-448, 448, 2**-9, 1], [0.25, 0.25, 112, -0.28125]],
    ]
    assert row.last.tolist() == [[896, 0, 0, -(2**-8)]]
    writer.write_manifest()
    assert verify_store(tmp_path).ok


def test_golden_shard_read_with_struct_and_json(golden):
    data = (golden / "shard-00000.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    base = 8 + length
    assert base % 8 == 0
    metadata = header.pop("__metadata__")
    assert metadata == {
        "format": "eyas-store",
        "version": "1",
        "spec": json.dumps(GOLDEN_SPEC.to_dict(), sort_keys=True, separators=(",", ":")),
        "spec_id": GOLDEN_SPEC.spec_id,
        "corpus": "c0ffee",
        "plan": json.loads((golden / "store.json").read_text())["plan"],
        "shard": "0",
        "rows": "0:3",
        "fields": "tokens,loss_mask,aux,last",
    }
    assert list(header) == [
        "row_offsets",
        "row_xxh3",
        "last_index",
        "tokens",
        "aux",
        "last",
        "loss_mask",
        "row_status",
    ]

    def raw(name: str) -> bytes:
        start, stop = header[name]["data_offsets"]
        return data[base + start : base + stop]

    assert struct.unpack("<4q", raw("row_offsets")) == (0, 3, 5, 9)
    assert struct.unpack("<9i", raw("tokens")) == (5, 6, 7, 5, 9, 8, 7, 6, 5)
    assert tuple(raw("loss_mask")) == (0, 1, 1, 1, 1, 1, 1, 1, 0)
    assert struct.unpack("<4i", raw("last_index")) == (1, 3, 5, 6)
    assert tuple(raw("row_status")) == (1, 2, 1)
    zero = {"aux": bytes(2 * 2 * 4 * 2), "last": bytes(1 * 4 * 2)}
    aux = golden_states(0)[0].tobytes() + zero["aux"] + golden_states(2)[0].tobytes()
    last = golden_states(0)[1].tobytes() + zero["last"] + golden_states(2)[1].tobytes()
    assert (raw("aux"), raw("last")) == (aux, last)
    assert base + header["row_status"]["data_offsets"][1] == len(data)

    hashes = struct.unpack("<12Q", raw("row_xxh3"))
    for row, (tokens, mask, _) in enumerate(GOLDEN_ROWS):
        expected = [xxhash.xxh3_64_intdigest(struct.pack(f"<{len(tokens)}i", *tokens))]
        expected += [xxhash.xxh3_64_intdigest(bytes(mask))]
        expected += [0, 0] if row == 1 else [xxhash.xxh3_64_intdigest(x.tobytes()) for x in golden_states(row)]
        assert list(hashes[4 * row : 4 * row + 4]) == expected

    sidecar = json.loads((golden / "shard-00000.json").read_text())
    bulk = [base + header["aux"]["data_offsets"][0], base + header["last"]["data_offsets"][1]]
    assert int(sidecar["index_xxh3"], 16) == xxhash.xxh3_64_intdigest(data[: bulk[0]] + data[bulk[1] :])
    assert sidecar["failed"] == {"1": "prefix-cached"}
    assert sidecar["bytes"] == len(data)
    manifest = json.loads((golden / "manifest.json").read_text())
    assert [manifest[k] for k in ("rows", "failed", "tokens", "positions", "bytes")] == [3, 1, 9, 4, len(data)]


def test_golden_shard_opens_with_plain_safetensors(golden):
    with safe_open(golden / "shard-00000.safetensors", framework="pt") as shard:
        assert shard.metadata()["spec_id"] == GOLDEN_SPEC.spec_id
        offsets = shard.get_tensor("row_offsets").tolist()
        ok = shard.get_tensor("row_status") == 1
        assert ok.tolist() == [True, False, True]
        aux = shard.get_slice("aux")[offsets[2] : offsets[3]]
        assert aux.dtype == torch.bfloat16
        assert torch.equal(aux.float(), 2 + torch.arange(32).reshape(4, 2, 4) / 8)
        last_index = shard.get_tensor("last_index")
        keep = (last_index >= offsets[2]) & (last_index < offsets[3])
        assert (last_index[keep] - offsets[2]).tolist() == [0, 1]
        assert torch.equal(shard.get_tensor("last")[keep].float(), -2 - torch.arange(8).reshape(2, 4) / 8)
        assert shard.get_tensor("row_xxh3").dtype == torch.uint64


@given(
    st.integers(1, 50),
    st.integers(1, 400),
    st.integers(0, 400),
    st.sampled_from(sorted(DTYPES)),
    st.integers(1, 9),
)
def test_every_tensor_is_aligned_and_aux_and_last_are_neighbours(rows, tokens, positions, dtype, hidden):
    spec = CaptureSpec((0, 5), "loss", dtype, hidden, 100, 8, "0" * 32)
    layout = shard_layout(Shard(7, 3, 3 + rows, tokens, positions), spec, "c", "p")
    sizes = {"row_offsets": 8, "row_xxh3": 8, "last_index": 4, "tokens": 4, "loss_mask": 1, "row_status": 1}
    for name, info in layout.tensors.items():
        assert info.start % sizes.get(name, DTYPES[spec.dtype][1]) == 0
    assert layout.tensors["aux"].stop == layout.tensors["last"].start
    assert layout == shard_layout(Shard(7, 3, 3 + rows, tokens, positions), spec, "c", "p")


def test_contents_that_are_not_the_planned_ones_are_refused():
    shard = Shard(0, 10, 12, 5, 2)
    good = [([1, 2, 3], [0, 1, 1], [1]), ([4, 5], [1, 1], [0])]
    assert pack_contents(shard, good).last_index.tolist() == [1, 3]
    variants = {
        "planned were": [good[:1], [*good, good[1]], [good[0], ([4, 5], [1, 1], [])]],
        "row 10: loss mask or kept": [[([1, 2, 3], [0, 1], [1]), good[1]], [([1, 2, 3], [0, 1, 1], [3]), good[1]]],
        "row 11: loss mask or kept": [[good[0], ([4, 5], [1, 1], [-1])]],
    }
    for message, cases in variants.items():
        for case in cases:
            with pytest.raises(ValueError, match=message):
                pack_contents(shard, case)
    with pytest.raises(ValueError, match="row 10: loss mask or kept"):
        pack_contents(Shard(0, 10, 11, 3, 2), [([1, 2, 3], [1, 1, 1], [1, 1])])


def golden_info(**changes: object) -> StoreInfo:
    plan = make_plan([3, 2, 4], [1, 1, 2], GOLDEN_SPEC, 5000)
    values = {"spec": GOLDEN_SPEC, "corpus": {"digest": "c"}, "shard_bytes": 5000, "plan": plan} | changes
    return StoreInfo(**values)  # type: ignore[arg-type]


def test_store_info_round_trip_and_differences():
    info = golden_info()
    assert StoreInfo.from_json(info.to_json()) == info
    assert info.differences(StoreInfo.from_json(info.to_json())) == []
    other = CaptureSpec((1, 3), "loss", "f16", 4, 32, 8, "0123456789abcdef" * 2)
    assert info.differences(golden_info(spec=other)) == ["spec layers: [1, 2] != [1, 3]", "spec dtype: bf16 != f16"]
    assert info.differences(golden_info(corpus={"digest": "d", "template": "t"})) == [
        "corpus digest: c != d",
        "corpus template: None != t",
    ]
    assert info.differences(golden_info(shard_bytes=6000)) == ["shard_bytes: 5000 != 6000"]
    assert info.differences(golden_info(plan=Plan((), "x", 0))) == [f"plan: {info.plan.digest} != x"]


SIDECAR = Sidecar("shard-00000.safetensors", (0, 3), 9, 4, 100, "s", "c", "p", 255, {1: "aborted"}, [{"engine": "e"}])


def test_sidecar_round_trip():
    assert Sidecar.from_json(SIDECAR.to_json()) == SIDECAR
    assert SIDECAR.ok_rows == 2


@pytest.mark.parametrize("document", [golden_info(), SIDECAR])
def test_documents_refuse_what_they_did_not_write(document):
    text = document.to_json()
    data = json.loads(text)
    broken = [text[:-20], "", "[]", "\0", json.dumps(data | {"version": 2}), json.dumps(data | {"kind": "other"})]
    broken += [
        json.dumps({k: v for k, v in data.items() if k != key}) for key in data if key not in {"total", "columns"}
    ]
    for case in broken:
        with pytest.raises(ValueError, match=r".+"):
            type(document).from_json(case)
    if isinstance(document, StoreInfo):
        with pytest.raises(ValueError, match="spec_id"):
            StoreInfo.from_json(json.dumps(data | {"spec_id": "0" * 32}))


# --- the document ---

DOCUMENT = Path(__file__).parents[2] / "docs" / "store-format.md"


def block(after: str) -> str:
    """The fenced block that follows a line of the document."""
    text = DOCUMENT.read_text()
    return text[text.index(after) :].split("```")[1].partition("\n")[2]


def test_documented_code_reads_a_shard(golden):
    rows: list[tuple[torch.Tensor, ...]] = []
    exec(block("### Ten lines to read one"), {"path": golden / "shard-00000.safetensors", "rows": rows})
    assert [(t.tolist(), i.tolist()) for t, _, i, _ in rows] == [([5, 6, 7], [1]), ([8, 7, 6, 5], [0, 1])]
    assert torch.equal(rows[1][1].float(), 2 + torch.arange(32).reshape(4, 2, 4) / 8)
    assert torch.equal(rows[1][3].float(), -2 - torch.arange(8).reshape(2, 4) / 8)


def test_documented_example_is_the_golden_store(golden):
    data = (golden / "shard-00000.safetensors").read_bytes()
    first, *lines = block("<!-- example -->").splitlines()
    assert first == f"bytes 0:912      header, its first 8 bytes are {data[:8].hex(' ')}"
    edge = 912
    for line in lines:
        span, name, *digits = line.split()
        start, stop = map(int, span.split(":"))
        assert (start, name in data[:912].decode("latin1")) == (edge, True)
        shown = bytes.fromhex("".join(digits).removesuffix(".."))
        assert data[start : start + len(shown)] == shown
        assert line.endswith("..") == (start + len(shown) < stop)
        edge = stop
    assert edge == len(data)
    assert block("<!-- sidecar -->") == (golden / "shard-00000.json").read_text()


def test_documented_journal_line():
    line = session_line(Session("p", "s", "c", [{"engine": "golden"}])).decode()
    assert block("<!-- journal -->") == line
