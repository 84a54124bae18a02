"""Is it still the same model? The states that a server's probe brought the first time, kept with the store.

A fingerprint knows a model's shape and norms. Weights that differ elsewhere (another seed's, a merged adapter's) have
the same one; but the same few tokens become other states.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from eyas.errors import EngineError, StoreError
from eyas.store.files import write_new

PROOF_FILE: Final = "probe.safetensors"
#: Largest median distance of one model from itself, relative to its states: noise is hundredths, another model is one.
SAME_MODEL: Final = 0.3
_STATES: Final = "states"
_SPEC: Final = "spec_id"


class Proof:
    """The first probe's states of a run, and of the runs into the same store before it.

    Servers that share a run share it too, and may be probed at once.

    Args:
        path: where they are kept once its folder exists; None keeps them for this run only.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._first: torch.Tensor | None = None
        self._whose = ""
        self._lock = threading.Lock()

    def check(self, states: torch.Tensor, spec_id: str, where: object) -> None:
        """Compare a probe's states [T, A + 1, H] with the first one's, or keep them where they are the first.

        States of another spec are not compared: whoever opens the store says what differs.

        Raises:
            EngineError: another model's.
            StoreError: what was kept cannot be read, or these not be kept.
        """
        with self._lock:
            self._check(states.float().contiguous(), spec_id, where)

    def _check(self, states: torch.Tensor, spec_id: str, where: object) -> None:
        if self._first is None:
            self._first = self._kept(spec_id)
        if self._first is None:
            self._first, self._whose = states, str(where)
        moved = distance(states, self._first) if states.shape == self._first.shape else torch.inf
        if moved > SAME_MODEL:
            told = f"the same tokens' states moved by {moved:.2f} of their size since the first probe"
            if self._whose not in ("", str(where)):
                told += f", {self._whose}'s"
            if self._path is not None and self._path.exists():
                told += f"; should it be the same all the same, remove {self._path}"
            raise EngineError("the server serves another model", where, told)
        self._keep(spec_id)

    def _kept(self, spec_id: str) -> torch.Tensor | None:
        if self._path is None:
            return None
        try:
            with safe_open(self._path, framework="pt") as file:
                if (file.metadata() or {}).get(_SPEC, spec_id) != spec_id:
                    return None
                return file.get_tensor(_STATES).float()
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError) as error:
            hint = "remove it if the server is still the one that the store was begun with"
            raise StoreError("cannot read the first probe", self._path, hint) from error

    def _keep(self, spec_id: str) -> None:
        if self._path is None or self._first is None or not self._path.parent.is_dir() or self._path.exists():
            return
        try:
            write_new(self._path, save({_STATES: self._first}, {_SPEC: spec_id}))
        except OSError as error:
            raise StoreError(error.strerror or "cannot write", self._path) from error


def distance(states: torch.Tensor, before: torch.Tensor) -> float:
    """Median over tokens and layers of the distance between two [T, A, H] states, relative to the size of `before`."""
    sizes = torch.linalg.vector_norm(before, dim=-1).clamp_min(1e-30)
    moved = torch.linalg.vector_norm(states - before, dim=-1) / sizes
    return float(moved.nan_to_num(torch.inf).median())
