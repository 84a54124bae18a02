"""Reading and writing a store's JSON documents."""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from eyas.capture.folder import read_limited
from eyas.errors import IntegrityError, StoreError
from eyas.store.files import (
    MAX_DOCUMENT_BYTES,
    MAX_SIDECAR_BYTES,
    ShardPaths,
    disk_errors,
    open_regular,
    read_journal,
    write_atomic,
)
from eyas.store.format import MANIFEST_FILE, STORE_FILE, Sidecar, StoreInfo, manifest_json
from eyas.store.journal import RowOk, decode_journal


def read_store_info(root: str | Path) -> StoreInfo:
    """What the store at `root` is for.

    Raises:
        StoreError: `root` is not a store, or of another format version.
    """
    path = Path(root) / STORE_FILE
    try:
        return StoreInfo.from_json(read_limited(path, MAX_DOCUMENT_BYTES)[0])
    except FileNotFoundError as error:
        raise StoreError("no store here", root, f"no {STORE_FILE} in it; is the path right?") from error
    except NotADirectoryError as error:
        raise StoreError("not a store folder", root) from error
    except ValueError as error:
        raise StoreError("not a store this version can read", path, str(error)) from error
    except OSError as error:
        raise StoreError(error.strerror or "cannot read", path) from error


def read_sidecar(path: Path) -> Sidecar | None:
    """The sidecar at `path`, None where there is none.

    Raises:
        IntegrityError: damaged.
        StoreError: the disk.
    """
    try:
        return Sidecar.from_json(read_limited(path, MAX_SIDECAR_BYTES)[0])
    except FileNotFoundError:
        return None
    except ValueError as error:
        hint = f"{error}; remove it and run again to have it rebuilt from the shard"
        raise IntegrityError("damaged sidecar", path, hint) from error
    except OSError as error:
        raise StoreError(error.strerror or "cannot read", path) from error


def read_complete(paths: ShardPaths) -> Sidecar | None:
    """The sidecar of a shard whose file is there at its full size; None where there is no sidecar. Reads no states.

    Raises:
        IntegrityError: a damaged sidecar, or a file of another size.
        StoreError: the volume of a moved shard is not there.
    """
    sidecar = read_sidecar(paths.sidecar)
    if sidecar is None:
        return None
    paths.check_volume()
    try:
        size = paths.final.stat().st_size
    except FileNotFoundError:
        return None
    if size != sidecar.bytes:
        raise IntegrityError(
            f"shard has {size} bytes, not {sidecar.bytes}", paths.final, "remove it and run extract again"
        )
    return sidecar


def journalled_rows(paths: ShardPaths) -> list[int]:
    """Corpus rows that an open shard's journal says are stored; read only, so a writer may go on meanwhile."""
    with disk_errors(paths.journal):
        sessions = decode_journal(read_journal(paths.journal)).sessions
    return sorted(row for session in sessions for row, entry in session.rows.items() if isinstance(entry, RowOk))


def write_manifest(root: str | Path) -> None:
    """Write `manifest.json` from the sidecars of complete shards. Any number of processes may do so.

    Raises:
        StoreError: not a store, or the disk. IntegrityError: a damaged sidecar.
    """
    folder, info = Path(root), read_store_info(root)
    with disk_errors(folder):
        lock = open_regular(folder / STORE_FILE, os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            names = set(os.listdir(folder))  # noqa: PTH208
            found = (
                read_sidecar(ShardPaths(folder, shard.stem).sidecar)
                for shard in info.plan.shards
                if shard.name in names and f"{shard.stem}.json" in names
            )
            text = manifest_json(info, [sidecar for sidecar in found if sidecar is not None])
            write_atomic(folder / MANIFEST_FILE, text.encode())
        finally:
            os.close(lock)


def describe_store(root: str | Path) -> list[tuple[str, str]]:
    """What a store is for and how far it is, name and text; from its documents alone.

    Raises:
        StoreError: not a store. IntegrityError: as `read_complete`.
    """
    folder, info = Path(root), read_store_info(root)
    spec, shards = info.spec, info.plan.shards
    done = [sidecar for shard in shards if (sidecar := read_complete(ShardPaths(folder, shard.stem))) is not None]
    opened = sum(len(journalled_rows(ShardPaths(folder, shard.stem))) for shard in shards)
    reasons = Counter(reason for sidecar in done for reason in sidecar.failed.values())
    failed = ", ".join(f"{count:,} x {reason}" for reason, count in reasons.most_common()) or "none"
    gone = sum(ShardPaths(folder, shard.stem).consumed.exists() for shard in shards)
    removed = f", {gone:,} trained on and removed" if gone else ""
    return [
        ("model", f"{spec.model}: {spec.num_layers} layers, H {spec.hidden_size}, V {spec.vocab_size}"),
        ("states", f"layers {', '.join(map(str, spec.layers))} and last ({spec.last}), {spec.dtype}"),
        ("spec", spec.spec_id),
        ("corpus", ", ".join(f"{key} {value}" for key, value in info.corpus.items())),
        ("shards", f"{len(done):,} of {len(shards):,} complete{removed}, {sum(s.bytes for s in done):,} bytes"),
        ("rows", f"{sum(s.ok_rows for s in done) + opened:,} good of {shards[-1].stop:,}, {opened:,} in open shards"),
        ("failed", failed),
        ("written by", "; ".join(sorted({_engine(p) for s in done for p in s.provenance})) or "nobody yet"),
    ]


def _engine(provenance: Mapping[str, str]) -> str:
    """`sglang 0.5.23, bfloat16, on host`; a rehearsal shows as `fake`."""
    name = provenance.get("engine", "unknown")
    version = provenance.get("sglang") or provenance.get("transformers") or ""
    host = provenance.get("host")
    return ", ".join(filter(None, (f"{name} {version}".strip(), provenance.get("dtype"), f"on {host}" if host else "")))
