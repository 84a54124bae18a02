"""In a finished store: shards, sidecars, manifest, store.json."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import numpy as np

from eyas.capture.contract import field_hash
from eyas.capture.tensorfile import TensorInfo
from eyas.store.format import RowStatus, Sidecar
from eyas.store.shardfile import read_index, sidecar_of
from mutations.mutation import Check, Mutation, Shards, Stage, edit_json, flip, swap_files

_Inject = Callable[[Shards], None]


def _seen(name: str, error: str, inject: _Inject, rows: int = 1, check: Check = Check.VERIFY) -> Mutation:
    return Mutation(name, Stage.STORE, inject, check, error, rows=rows)


def _valued(name: str, error: str, inject: _Inject, *, logits: str = "") -> Mutation:
    return Mutation(name, Stage.STORE, inject, Check.AGAINST, error, logits)


# --- raw damage -------------------------------------------------------------------------------------------------------


def _bit(tensor: str, offset: int = 0, mask: int = 1) -> _Inject:
    """A bit of a tensor flipped, `offset` bytes from its beginning."""

    def inject(shards: Shards) -> None:
        shard = shards.info.plan.shards[int(shards.stems[0][-5:])]
        flip(shards.file(), shards.info.layout(shard).tensors[tensor].start + offset, mask)

    return inject


def _cut(shards: Shards) -> None:
    os.truncate(shards.file(), shards.file().stat().st_size - 100)


def _of_other_store(shards: Shards) -> None:
    for path in (shards.file(), shards.sidecar()):
        shutil.copy(shards.other / path.name, path)


def _dangling(shards: Shards) -> None:
    shards.file().rename(shards.root.parent / f"lost-{shards.file().name}")
    shards.file().symlink_to(shards.root.parent / "no-volume" / shards.file().name)


def _beside(suffix: str) -> _Inject:
    return lambda shards: shards.file().with_name(shards.stems[0] + suffix).write_bytes(b"left behind")


# --- honest hashes over wrong contents --------------------------------------------------------------------------------


_KINDS = {"I64": "<i8", "U64": "<u8", "I32": "<i4", "BF16": "<u2", "U8": "u1"}


def _array(data: bytearray, info: TensorInfo) -> np.ndarray:
    kind = np.dtype(_KINDS[info.dtype])
    return np.frombuffer(data, kind, (info.stop - info.start) // kind.itemsize, info.start).reshape(info.shape)


def rewritten(shards: Shards, change: Callable[[dict[str, np.ndarray], np.ndarray], None]) -> None:
    """Change a shard's tensors and make every hash over them fit: rows, index and sidecar.

    `change` gets the writable tensors by name, states as raw numbers, and `row_offsets`.
    """
    path = shards.file()
    shard = shards.info.plan.shards[int(shards.stems[0][-5:])]
    layout = shards.info.layout(shard)
    data = bytearray(path.read_bytes())
    tensors = {name: _array(data, info) for name, info in layout.tensors.items()}
    change(tensors, tensors["row_offsets"])
    offsets = tensors["row_offsets"]
    kept = np.searchsorted(tensors["last_index"], offsets)
    for row in range(shard.rows):
        tokens, last = slice(*offsets[row : row + 2]), slice(*kept[row : row + 2])
        fields = (
            tensors["tokens"][tokens],
            tensors["loss_mask"][tokens],
            tensors["aux"][tokens],
            tensors["last"][last],
        )
        hashes = [field_hash(np.ascontiguousarray(field)) for field in fields]
        if tensors["row_status"][row] == RowStatus.FAILED:
            hashes[2:] = [0, 0]
        tensors["row_xxh3"][row] = hashes
    path.write_bytes(data)
    describe(shards)


def describe(shards: Shards) -> None:
    """A sidecar that fits the shard, with the provenance it had."""
    path, old = shards.file(), shards.sidecar().read_text()
    fd = os.open(path, os.O_RDONLY)
    try:
        index = read_index(fd, path)
    finally:
        os.close(fd)
    fresh = sidecar_of(index, [])
    fresh.provenance.extend(Sidecar.from_json(old).provenance)
    shards.sidecar().write_text(fresh.to_json())


def _rows_swapped(*names: str) -> _Inject:
    """Two rows of equal length exchange what is named."""

    def change(tensors: dict[str, np.ndarray], offsets: np.ndarray) -> None:
        kept = np.searchsorted(tensors["last_index"], offsets)
        for name in names:
            at = kept if name == "last" else offsets
            one, other = (slice(*at[row : row + 2]) for row in (0, 1))
            tensors[name][one], tensors[name][other] = tensors[name][other].copy(), tensors[name][one].copy()

    return lambda shards: rewritten(shards, change)


def _changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> _Inject:
    """The first row's part of a tensor, changed."""

    def inject(tensors: dict[str, np.ndarray], offsets: np.ndarray) -> None:
        at = np.searchsorted(tensors["last_index"], offsets) if name in ("last", "last_index") else offsets
        part = slice(*at[:2])
        tensors[name][part] = change(tensors[name][part].copy())

    return lambda shards: rewritten(shards, inject)


def _nan(states: np.ndarray) -> np.ndarray:
    states.reshape(-1)[17] = 0x7FC0
    return states


def _as_failed(shards: Shards) -> None:
    rewritten(shards, lambda tensors, _: tensors["row_status"].__setitem__(0, RowStatus.FAILED))


def _row_hashes_swapped(shards: Shards) -> None:
    """States of two rows and their checksums exchanged in the file; the sidecar is as it was."""
    text = shards.sidecar().read_bytes()
    _rows_swapped("aux", "last")(shards)
    shards.sidecar().write_bytes(text)


def _swap_raw(shards: Shards) -> None:
    """The bytes of two rows' `aux` exchanged, nothing else touched."""
    shard = shards.info.plan.shards[int(shards.stems[0][-5:])]
    start = shards.info.layout(shard).tensors["aux"].start
    size = shard.tokens // shard.rows * shards.info.spec.aux_bytes_per_token
    data = bytearray(shards.file().read_bytes())
    one, other = slice(start, start + size), slice(start + size, start + 2 * size)
    data[one], data[other] = data[other], data[one]
    shards.file().write_bytes(data)


def _zeroed(shards: Shards) -> None:
    def change(tensors: dict[str, np.ndarray], offsets: np.ndarray) -> None:
        kept = np.searchsorted(tensors["last_index"], offsets)
        tensors["aux"][: offsets[1]] = 0
        tensors["last"][: kept[1]] = 0

    rewritten(shards, change)


def _more(key: str) -> Callable[[dict], None]:
    return lambda data: data.__setitem__(key, data[key] + 1)


def _other_hash(data: dict) -> None:
    data["index_xxh3"] = f"{int(data['index_xxh3'], 16) ^ 1:016x}"


def _calls_failed(data: dict) -> None:
    data["failed"] = {str(data["rows"][0]): "retracted"}


#: One shard each, in one store; documents that belong to no shard are in DOCUMENTS.
SHARDS = (
    _seen("bit flipped in a shard's header", "structure", lambda s: flip(s.file(), 40)),
    _seen("bit flipped in row_offsets", "structure", _bit("row_offsets", 8, 64)),
    _seen("bit flipped in row_xxh3", "index-hash", _bit("row_xxh3", 16)),
    _seen("bit flipped in last_index", "index-hash", _bit("last_index", 0, 2)),
    _seen("bit flipped in tokens", "index-hash", _bit("tokens")),
    _seen("bit flipped in aux", "row-hash", _bit("aux", 501)),
    _seen("bit flipped in last", "row-hash", _bit("last", 7, 128)),
    _seen("bit flipped in loss_mask", "row-hash", _bit("loss_mask")),
    _seen("an ok row marked failed", "row-status", _bit("row_status", 0, RowStatus.OK ^ RowStatus.FAILED)),
    _seen("an ok row marked pending", "row-status", _bit("row_status", 0, RowStatus.OK)),
    _seen("an ok row marked failed, every hash made to fit", "row-status", _as_failed),
    _seen("a shard cut short", "structure", _cut),
    _seen("a shard grown", "structure", lambda s: s.file().write_bytes(s.file().read_bytes() + b"\0")),
    _seen("an empty shard", "structure", lambda s: s.file().write_bytes(b"")),
    _seen("a shard that is gone", "missing", lambda s: (s.file().unlink(), s.sidecar().unlink())),
    _seen("a shard behind a link to nowhere", "unreadable", _dangling),
    _seen("a shard of another store of the same shape, with its sidecar", "structure", _of_other_store),
    _seen("two shards exchange their names", "structure", lambda s: swap_files(s.file(0), s.file(1)), rows=2),
    _seen(
        "two shards exchange names, sidecars too",
        "structure",
        lambda s: (swap_files(s.file(0), s.file(1)), swap_files(s.sidecar(0), s.sidecar(1))),
        rows=2,
    ),
    _seen("two rows' states exchanged", "row-hash", _swap_raw),
    _seen("two rows' states exchanged, checksums too", "index-hash", _row_hashes_swapped),
    _seen("NaN, every hash made to fit", "not-finite", _changed("aux", _nan)),
    _seen("a sidecar that is gone", "unfinished", lambda s: s.sidecar().unlink()),
    _seen("bit flipped in a sidecar's structure", "sidecar", lambda s: flip(s.sidecar(), 0)),
    _seen("a sidecar that counts other tokens", "sidecar", lambda s: edit_json(s.sidecar(), _more("tokens"))),
    _seen("a sidecar with another checksum", "index-hash", lambda s: edit_json(s.sidecar(), _other_hash)),
    _seen("a sidecar that calls an ok row failed", "sidecar", lambda s: edit_json(s.sidecar(), _calls_failed)),
    _seen("another shard's sidecar", "sidecar", lambda s: shutil.copy(s.sidecar(1), s.sidecar(0)), rows=2),
    _seen("a part beside the finished shard", "stray", _beside(".safetensors.part")),
    _seen("a journal beside the finished shard", "stray", _beside(".journal")),
    _seen(
        "tokens of another tokenizer, every hash made to fit",
        "identity",
        _changed("tokens", lambda tokens: (tokens + 1) % 1000),
        check=Check.CORPUS,
    ),
    _seen(
        "a loss mask that trains the prompt, every hash made to fit",
        "identity",
        _changed("loss_mask", np.ones_like),
        check=Check.CORPUS,
    ),
    _seen(
        "last at other positions, every hash made to fit",
        "identity",
        _changed("last_index", lambda index: index - 1),
        check=Check.CORPUS,
    ),
    _seen(
        "two whole rows exchanged, every hash made to fit",
        "identity",
        _rows_swapped("tokens", "loss_mask", "aux", "last"),
        check=Check.CORPUS,
    ),
    _valued(
        "two rows' states exchanged, every hash made to fit", "last", _rows_swapped("aux", "last"), logits="another-row"
    ),
    _valued("rows shifted by one, every hash made to fit", "layer 1", _changed("aux", lambda aux: np.roll(aux, 1, 0))),
    _valued("layers permuted, every hash made to fit", "layer 1", _changed("aux", lambda aux: aux[:, ::-1])),
    _valued("a row that was never written, marked ok", "last", _zeroed, logits="logits-differ"),
)


def _bit_of(name: str, text: bytes) -> _Inject:
    """The last bit of the byte after `text` flipped."""

    def inject(shards: Shards) -> None:
        path = shards.root / name
        flip(path, path.read_bytes().index(text) + len(text))

    return inject


_UNREADABLE = "not a store this version can read"
_ELSE = "the store was made for something else"

#: A store each.
DOCUMENTS = (
    _seen("bit flipped in the manifest's totals", "manifest", _bit_of("manifest.json", b'"tokens": ')),
    _seen("bit flipped in a shard's line of the manifest", "manifest", _bit_of("manifest.json", b'"index_xxh3": "')),
    _seen("the manifest of another store", "manifest", lambda s: shutil.copy(s.other / "manifest.json", s.root)),
    _seen("the manifest of a complete store is gone", "manifest", lambda s: (s.root / "manifest.json").unlink()),
    _seen("a file that belongs to nothing", "stray", lambda s: (s.root / "shard-99999.safetensors").write_bytes(b"?")),
    _seen(
        "bit flipped in store.json's spec",
        _UNREADABLE,
        _bit_of("store.json", b'"layers": [\n   '),
    ),
    _seen("bit flipped in store.json's corpus digest", "structure", _bit_of("store.json", b'"digest": "')),
    _seen("bit flipped in store.json's plan digest", "structure", _bit_of("store.json", b'"plan": "')),
    _seen(
        "bit flipped in store.json's line of a shard",
        _UNREADABLE,
        _bit_of("store.json", b'"shards": [\n  [0, '),
    ),
    _seen(
        "bit flipped in store.json's total",
        _UNREADABLE,
        _bit_of("store.json", b'"total_bytes": '),
    ),
    _seen(
        "bit flipped in store.json's shard size",
        "the store was made for something else",
        _bit_of("store.json", b'"shard_bytes": '),
        check=Check.RESUME,
    ),
    _seen("the store.json of another store", "structure", lambda s: shutil.copy(s.other / "store.json", s.root)),
    _seen("store.json cut short", _UNREADABLE, lambda s: os.truncate(s.root / "store.json", 300)),
)
