"""Reading and writing a store's JSON documents."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from eyas.errors import IntegrityError, StoreError
from eyas.store.files import ShardPaths, disk_errors, write_atomic
from eyas.store.format import MANIFEST_FILE, STORE_FILE, Sidecar, StoreInfo, manifest_json


def read_store_info(root: str | Path) -> StoreInfo:
    """What the store at `root` is for.

    Raises:
        StoreError: `root` is not a store, or of another format version.
    """
    path = Path(root) / STORE_FILE
    try:
        return StoreInfo.from_json(path.read_bytes())
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
    """
    try:
        return Sidecar.from_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        hint = f"{error}; remove it and run again to have it rebuilt from the shard"
        raise IntegrityError("damaged sidecar", path, hint) from error


def write_manifest(root: str | Path) -> None:
    """Write `manifest.json` from the sidecars of complete shards. Any number of processes may do so.

    Raises:
        StoreError: not a store, or the disk. IntegrityError: a damaged sidecar.
    """
    folder, info = Path(root), read_store_info(root)
    with disk_errors(folder):
        lock = os.open(folder / STORE_FILE, os.O_RDWR | os.O_CLOEXEC)
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
