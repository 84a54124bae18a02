"""Every kind of damage is found, named, and does not hide other damage."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_samples import SPEC, contents, open_store, row_contents, row_states, write_store

from eyas.capture.contract import DTYPES, CaptureSpec, field_hash
from eyas.errors import StoreError
from eyas.store.check import ProblemKind, finite_check, verify_shard, verify_store
from eyas.store.format import Sidecar
from eyas.store.writer import StoreWriter, write_manifest

FAILED_ROW = 2


@pytest.fixture
def store(tmp_path: Path) -> StoreWriter:
    return write_store(tmp_path, 12, failing={FAILED_ROW})


def kinds(root: Path, **options: object) -> list[tuple[ProblemKind, str, int | None]]:
    report = verify_store(root, contents, **options)  # type: ignore[arg-type]
    assert report.ok == (not report.problems)
    return [(p.kind, p.shard, p.row) for p in report.problems]


def edit(path: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def test_a_good_store(store):
    seen = []
    report = verify_store(store.root, contents, progress=lambda shard, part: seen.append((shard.index, part.rows)))
    assert report.problems == ()
    assert (report.shards, report.rows, report.failed) == (len(store.plan.shards), 11, 1)
    assert report.tokens == sum(len(row_contents(row)[0]) for row in range(12) if row != FAILED_ROW)
    assert report.bytes == sum(store.paths(shard).final.stat().st_size for shard in store.plan.shards)
    assert seen == [(s.index, s.rows - (s.start <= FAILED_ROW < s.stop)) for s in store.plan.shards]


def test_every_single_byte_of_a_shard_is_covered(store):
    """Flip each byte of a shard in turn: none goes unnoticed."""
    path = store.paths(store.plan.shards[0]).final
    sidecar = store.sidecar(store.plan.shards[0])
    good = path.read_bytes()
    step = max(1, len(good) // 1500)
    for at in [*range(0, 1000), *range(1000, len(good), step), *range(len(good) - 300, len(good))]:
        data = bytearray(good)
        data[at] ^= 0x10
        path.write_bytes(data)
        assert not verify_shard(path, sidecar, info=store.info, finite=False).ok, at


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        ("aux", [ProblemKind.ROW_HASH]),
        ("last", [ProblemKind.ROW_HASH]),
        ("tokens", [ProblemKind.INDEX_HASH, ProblemKind.ROW_HASH, ProblemKind.IDENTITY]),
        ("loss_mask", [ProblemKind.INDEX_HASH, ProblemKind.ROW_HASH, ProblemKind.IDENTITY]),
        ("row_xxh3", [ProblemKind.INDEX_HASH, ProblemKind.ROW_HASH]),
    ],
)
def test_damage_is_named_with_its_row(store, field, kind):
    shard = store.plan.shards[0]
    start = store.info.layout(shard).tensors[field].start
    edit(store.paths(shard).final, lambda data: data.__setitem__(start, data[start] ^ 1))
    row = {ProblemKind.INDEX_HASH: None}
    assert kinds(store.root) == [(k, shard.name, row.get(k, 0)) for k in kind]


def test_several_problems_are_all_reported(store):
    first, second = store.plan.shards[:2]
    for shard in (first, second):
        info = store.info.layout(shard).tensors["aux"]
        edit(store.paths(shard).final, lambda data, at=info.start: data.__setitem__(at, data[at] ^ 1))
    store.paths(store.plan.shards[2]).final.unlink()
    (store.root / "notes.txt").touch()
    found = kinds(store.root)
    assert (ProblemKind.ROW_HASH, first.name, first.start) in found
    assert (ProblemKind.ROW_HASH, second.name, second.start) in found
    assert (ProblemKind.MISSING, store.plan.shards[2].name, None) in found
    assert (ProblemKind.STRAY, "notes.txt", None) in found
    assert (ProblemKind.MANIFEST, "manifest.json", None) in found


def test_truncated_and_foreign_files(store):
    a, b, c = (store.paths(shard).final for shard in store.plan.shards[:3])
    a.write_bytes(a.read_bytes()[:-1])
    b.write_bytes(b"")
    c.write_bytes(b"\xff" * 100)
    assert kinds(store.root) == [(ProblemKind.STRUCTURE, path.name, None) for path in (a, b, c)]


def test_a_shard_of_another_place_or_store(store, tmp_path_factory):
    a, b = (store.paths(shard).final for shard in store.plan.shards[:2])
    b.write_bytes(a.read_bytes())
    assert (ProblemKind.STRUCTURE, b.name, None) in kinds(store.root)
    spec = CaptureSpec(SPEC.layers, "loss", "bf16", 16, 100, 8, "1" * 32)
    other = write_store(tmp_path_factory.mktemp("other"), 12, spec=spec)
    a.write_bytes(other.paths(other.plan.shards[0]).final.read_bytes())
    found = kinds(store.root)
    assert (ProblemKind.STRUCTURE, a.name, None) in found
    assert (ProblemKind.SIDECAR, a.name, None) in found


def test_an_index_that_contradicts_itself(store):
    shard = store.plan.shards[0]
    tensors = store.info.layout(shard).tensors
    good = store.paths(shard).final.read_bytes()
    for name, value in (
        ("row_offsets", struct.pack("<q", 1)),
        ("last_index", struct.pack("<i", -1)),
        ("row_status", b"\3"),
    ):
        data = bytearray(good)
        data[tensors[name].start : tensors[name].start + len(value)] = value
        store.paths(shard).final.write_bytes(data)
        assert kinds(store.root) == [(ProblemKind.STRUCTURE, shard.name, None)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_states_that_are_not_finite(tmp_path, dtype, value):
    spec = CaptureSpec(SPEC.layers, "all", dtype, 16, 100, 8, "0" * 32)
    writer = open_store(tmp_path, 3, spec=spec, shard_bytes=1 << 20)
    shard = writer.plan.shards[0]
    with writer.lease(shard, lambda s: contents(s, spec)) as lease:
        for row in lease.pending:
            aux, last = row_states(row, spec)
            if row == 1:
                single = np.float32(value).reshape(1)
                match dtype:
                    case "bf16":
                        last[-1, -1] = single.view(np.uint32)[0] >> 16
                    case "f16":
                        last[-1, -1] = single.astype(np.float16).view(np.uint16)[0]
                    case "f32":
                        last[-1, -1] = single.view(np.uint32)[0]
                    case _:
                        last[-1, -4:] = single.view(np.uint8)
            lease.put(row, aux, last)
        lease.finish()
    writer.write_manifest()
    report = verify_store(tmp_path)
    assert [(p.kind, p.row) for p in report.problems] == [(ProblemKind.NOT_FINITE, 1)]
    assert verify_store(tmp_path, finite=False).ok


@given(st.lists(st.integers(0, 2**16 - 1), max_size=40), st.sampled_from(["bf16", "f16", "f32"]))
def test_finiteness_is_numpys(items, dtype):
    raw = np.array(items, dtype="<u2")
    match dtype:
        case "bf16":
            values = (raw.astype(np.uint32) << 16).view(np.float32)
        case "f16":
            values = raw.view(np.float16)
        case _:
            raw = (raw.astype(np.uint32) << 16) | 1
            values = raw.view(np.float32)
    spec = replace(SPEC, dtype=dtype)
    assert finite_check(spec)(memoryview(raw.tobytes())) == bool(np.isfinite(values).all())


@settings(deadline=None)
@given(
    scales=st.lists(
        st.sampled_from([0, 1, 0x7F7F_FFFF, 0x7F80_0000, 0x7FC0_0000, 0xFF80_0001, 0x3F80_0000, 0x807F_FFFF])
    ),
    hidden_size=st.integers(1, 9),
    code=st.sampled_from([0x00, 0x7E, 0x7F, 0x80, 0xFF]),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_finiteness_of_quantised_states_is_that_of_their_scales(scales, hidden_size, code, cuts):
    """However the bytes come in pieces: a scale may lie across two, and codes may look like the exponent of one."""
    spec = replace(SPEC, dtype="fp8_e4m3", hidden_size=hidden_size)
    data = b"".join(bytes([code]) * hidden_size + struct.pack("<I", scale) for scale in scales)
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    finite = finite_check(spec)
    found = [finite(memoryview(data)[start:stop]) for start, stop in itertools.pairwise(edges)]
    assert all(found) == bool(np.isfinite(np.array(scales, "<u4").view("<f4")).all())


def test_a_failed_row_that_holds_states_and_a_pending_one(store):
    shard = next(s for s in store.plan.shards if s.start <= FAILED_ROW < s.stop)
    tensors = store.info.layout(shard).tensors
    before = sum(len(row_contents(row)[0]) for row in range(shard.start, FAILED_ROW))
    edit(
        store.paths(shard).final,
        lambda data: data.__setitem__(tensors["aux"].start + before * SPEC.aux_bytes_per_token, 1),
    )
    assert kinds(store.root) == [(ProblemKind.ROW_STATUS, shard.name, FAILED_ROW)]
    at = tensors["row_status"].start
    edit(store.paths(shard).final, lambda data: data.__setitem__(at, 0))
    found = kinds(store.root)
    assert (ProblemKind.ROW_STATUS, shard.name, shard.start) in found


def test_sidecars_that_lie_are_damaged_or_gone(store):
    a, b, c = store.plan.shards[:3]
    text = store.paths(a).sidecar.read_text()
    store.paths(a).sidecar.write_text(text.replace(f'"tokens": {a.tokens}', '"tokens": 1'))
    store.paths(b).sidecar.write_text("{}")
    store.paths(c).sidecar.unlink()
    found = kinds(store.root)
    assert found[:3] == [
        (ProblemKind.SIDECAR, a.name, None),
        (ProblemKind.SIDECAR, b.name, None),
        (ProblemKind.UNFINISHED, c.name, None),
    ]


def test_sidecar_and_row_status_disagree_on_what_failed(store):
    shard = next(s for s in store.plan.shards if s.start <= FAILED_ROW < s.stop)
    path = store.paths(shard).sidecar
    sidecar = Sidecar.from_json(path.read_text())
    path.write_text(sidecar.to_json().replace(f'"{FAILED_ROW}": "retracted"', ""))
    write_manifest(store.root)
    assert kinds(store.root) == [(ProblemKind.SIDECAR, shard.name, None)]


def test_open_and_stray_parts(store):
    a, b = store.plan.shards[:2]
    store.paths(a).part.touch()
    store.paths(a).journal.touch()
    store.paths(b).final.rename(store.paths(b).part)
    found = kinds(store.root)
    assert found[:3] == [
        (ProblemKind.STRAY, a.name, None),
        (ProblemKind.STRAY, a.name, None),
        (ProblemKind.UNFINISHED, b.name, None),
    ]


def test_another_corpus_is_an_identity_problem_of_its_rows(store):
    def other(shard):
        for row, (tokens, mask, positions) in enumerate(contents(shard), shard.start):
            yield (tokens + (row == 7), mask, positions)

    report = verify_store(store.root, other)
    assert [(p.kind, p.row) for p in report.problems] == [(ProblemKind.IDENTITY, 7)]

    def shorter(shard):
        return list(contents(shard))[:-1]

    report = verify_store(store.root, shorter)
    assert [p.kind for p in report.problems] == [ProblemKind.IDENTITY] * len(store.plan.shards)


def test_two_rows_of_equal_length_swapped_consistently_are_found_against_the_corpus(tmp_path):
    """The classic accident: every checksum is right, the sample is another's."""
    writer = StoreWriter.open(
        tmp_path,
        spec=SPEC,
        corpus={"digest": "c"},
        tokens_N=[2, 2],
        positions_N=[1, 1],
        shard_bytes=1 << 20,
        provenance={},
    )
    rows = [([1, 2], [1, 1], [0]), ([3, 4], [1, 1], [0])]
    with writer.lease(writer.plan.shards[0], lambda shard: rows[::-1]) as lease:
        for row in (0, 1):
            lease.put(row, bytes(2 * SPEC.aux_bytes_per_token), bytes(SPEC.last_bytes_per_position))
        lease.finish()
    writer.write_manifest()
    assert verify_store(tmp_path).ok
    report = verify_store(tmp_path, lambda shard: rows)
    assert [(p.kind, p.row) for p in report.problems] == [(ProblemKind.IDENTITY, 0), (ProblemKind.IDENTITY, 1)]


def test_a_complete_store_without_its_manifest(store):
    (store.root / "manifest.json").unlink()
    assert kinds(store.root) == [(ProblemKind.MANIFEST, "manifest.json", None)]
    store.paths(store.plan.shards[0]).sidecar.unlink()  # an unfinished one has none yet
    assert [kind for kind, _, _ in kinds(store.root)] == [ProblemKind.UNFINISHED]


def test_a_volume_that_is_gone_and_no_store(store, tmp_path_factory):
    path = store.paths(store.plan.shards[0]).final
    path.unlink()
    path.symlink_to("/nowhere/at/all")
    assert kinds(store.root) == [(ProblemKind.UNREADABLE, path.name, None)]
    with pytest.raises(StoreError, match="no store here"):
        verify_store(tmp_path_factory.mktemp("empty"))


def test_problems_print_where_and_what(store):
    path = store.paths(store.plan.shards[0]).final
    path.unlink()
    text = str(verify_store(store.root).problems[0])
    assert text.startswith("missing at shard-00000.safetensors: rows 0 to")
    assert field_hash(b"") != 0  # so a failed row's zero is never a hash of nothing
