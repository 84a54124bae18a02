"""The probe: a few texts with the target's states and what the drafter drafted on them, which go with an export.

    eyas/probe.safetensors     in a folder of its own: servers take every *.safetensors beside config.json for weights

    tokens [T] i32, loss_mask [T] u8, aux [T, A * Ht], best [T] i32     of D documents one after another
    starts [D + 1] i32                                                  where each begins
    embed_ids [U] i32, embed [U, H]                                     input embeddings of all tokens in them
    drafts [K, R] i32, logits [K, R] f32, margins [K, R] f32            of the rows that draft, in order

Two things can be checked by it. The weights, without the target: run on the recorded states they must give the
recorded drafts; RoPE, norms, layer order in `fc`, `norm_output` and the vocabulary map all change these. And the
target, without trust in any number of config.json: its outputs at the layers *that a server would read* must be the
recorded states.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from eyas.capture.contract import DTYPES
from eyas.errors import ConfigError, IntegrityError, first_line
from eyas.export.documents import Texts
from eyas.export.evidence import STEPS, Drafter
from eyas.export.replay import Document, Embed, Replay, drafting_rows

PROBE: Final = "eyas/probe.safetensors"
FORMAT: Final = 1
_KEY: Final = "eyas"
_SHAPES: Final = {"tokens": 1, "loss_mask": 1, "aux": 2, "best": 1, "starts": 1, "embed_ids": 1, "embed": 2,
                  "drafts": 2, "logits": 2, "margins": 2}  # fmt: skip
#: Logits of float32 by other kernels, in other orders: relative to the largest of them.
TOLERANCE: Final = 2e-3


@dataclass(frozen=True, slots=True)
class Probe:
    """Texts, states and drafts.

    Attributes:
        documents: the texts; nothing is known of states before the final norm.
        embed_ids, embed: [U] ascending token ids and their input embeddings [U, H].
        drafts, logits, margins: [K, R] of all documents' rows, in order.
        dtype: that the states were stored in.
        held_out: whether the drafter was never trained on the texts.
    """

    documents: tuple[Document, ...]
    embed_ids: Tensor
    embed: Tensor
    drafts: Tensor
    logits: Tensor
    margins: Tensor
    dtype: str
    held_out: bool

    @classmethod
    def make(
        cls, texts: Texts, drafter: Drafter, known_ids: Tensor, embeddings: Tensor, *, tokens: int, nbytes: int
    ) -> Self:
        """Choose documents, the shortest first, and draft on them.

        Args:
            texts: to choose from.
            drafter: what is exported, as servers will have it.
            known_ids, embeddings: [U] ascending ids of all tokens in the texts, and their embeddings [U, H].
            tokens, nbytes: most tokens, and bytes of states; a single document may exceed them.
        """
        chosen, used = list[Document](), 0
        width = texts.documents[0].aux[0].nbytes
        for document in sorted(texts.documents, key=lambda document: len(document.tokens)):
            used += len(document.tokens)
            if chosen and (used > tokens or used * width > nbytes):
                break
            chosen.append(document)
        ids = torch.cat([document.tokens for document in chosen]).unique()
        found = drafter.run(chosen)
        return cls(
            tuple(chosen), ids, embeddings[torch.searchsorted(known_ids, ids)].clone(),
            torch.cat([one.drafts for one in found], 1), torch.cat([one.logits for one in found], 1),
            torch.cat([one.margins for one in found], 1), texts.dtype, texts.held_out,
        )  # fmt: skip

    def to_bytes(self) -> bytes:
        """The file; the same bytes for the same probe."""
        parts = self.documents
        lengths = [0, *(len(part.tokens) for part in parts)]
        tensors = {
            "tokens": torch.cat([part.tokens for part in parts]).int(),
            "loss_mask": torch.cat([part.loss_mask for part in parts]).to(torch.uint8),
            "aux": torch.cat([part.aux for part in parts]).contiguous(),
            "best": torch.cat([part.best for part in parts]).int(),
            "starts": torch.tensor(lengths).cumsum(0).int(),
            "embed_ids": self.embed_ids.int(),
            "embed": self.embed.contiguous(),
            "drafts": self.drafts.int().contiguous(),
            "logits": self.logits.contiguous(),
            "margins": self.margins.contiguous(),
        }
        about = {"format": FORMAT, "dtype": self.dtype, "held_out": self.held_out}
        return save(tensors, {_KEY: json.dumps(about, sort_keys=True)})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `to_bytes` made.

        Raises:
            IntegrityError: another file, or a damaged one.
        """
        try:
            with safe_open(path, "pt") as file:
                about = json.loads((file.metadata() or {}).get(_KEY, "{}"))
                held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
            if about.get("format") != FORMAT:
                raise ValueError(f"format {about.get('format')}, this is {FORMAT}")
            return cls._of(held, about)
        except (OSError, SafetensorError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise IntegrityError("the probe cannot be read", path, f"{first_line(error)}; export anew") from error

    @classmethod
    def _of(cls, held: Mapping[str, Tensor], about: Mapping[str, Any]) -> Self:
        if {name: tensor.ndim for name, tensor in held.items()} != _SHAPES or about.get("dtype") not in DTYPES:
            raise ValueError("other tensors than a probe has")
        starts, count = held["starts"].tolist(), len(held["tokens"])
        if (
            starts[0] != 0
            or starts[-1] != count
            or sorted(set(starts)) != starts
            or any(len(held[name]) != count for name in ("loss_mask", "aux", "best"))
        ):
            raise ValueError("its documents do not fit its tokens")
        none = torch.empty(0, 1)
        best, unknown = held["best"].long(), torch.full((count,), -1)
        whole = Document(held["tokens"].long(), held["loss_mask"].bool(), held["aux"], none, best, unknown)
        documents = tuple(_part(whole, start, stop) for start, stop in itertools.pairwise(starts))
        rows = sum(int(drafting_rows(document.loss_mask, 1).sum()) for document in documents)
        if any(tuple(held[name].shape) != (STEPS, rows) for name in ("drafts", "logits", "margins")):
            raise ValueError("its drafts do not fit its documents")
        ids = held["embed_ids"].long()
        if not torch.equal(whole.tokens.unique(), ids) or len(held["embed"]) != len(ids):
            raise ValueError("its embeddings do not fit its tokens")
        return cls(
            documents, ids, held["embed"], held["drafts"].long(), held["logits"], held["margins"],
            str(about["dtype"]), about.get("held_out") is True,
        )  # fmt: skip

    def embedding(self) -> Embed:
        """Lookups in the recorded rows."""
        return embedding_of_rows(self.embed_ids, self.embed)

    def differences(self, found: Sequence[Replay]) -> tuple[int, float]:
        """Drafts that differ beyond what rounding explains, and the largest error of a logit, relative.

        Args:
            found: of `Drafter.run` on the documents.
        """
        drafts, logits = (torch.cat([getattr(one, name) for one in found], 1) for name in ("drafts", "logits"))
        scale = float(self.logits.abs().max().clamp_min(1e-6)) if self.logits.numel() else 1.0
        error = (logits - self.logits).abs() / scale
        error = error.nan_to_num(nan=torch.inf)
        near_tie = self.margins <= 2 * TOLERANCE * scale
        other = ((drafts != self.drafts) & ~near_tie) | (error > TOLERANCE)
        return int(other.sum()), float(error.max()) if error.numel() else 0.0

    @property
    def rows(self) -> int:
        """R."""
        return self.drafts.shape[1]


def _part(whole: Document, start: int, stop: int) -> Document:
    cut = slice(start, stop)
    return Document(
        whole.tokens[cut],
        whole.loss_mask[cut],
        whole.aux[cut],
        whole.last,
        whole.best[cut],
        whole.best_before_norm[cut],
    )


def embedding_of_rows(ids: Tensor, rows: Tensor) -> Embed:
    """Lookups of tokens among ascending ids [U] with their embeddings [U, H]."""

    def embed(tokens: Tensor) -> Tensor:
        at = torch.searchsorted(ids, tokens)
        if bool((at >= len(ids)).any()) or not torch.equal(ids[at.clamp(max=len(ids) - 1)], tokens):
            raise ConfigError("a token without an embedding", "the probe")
        return rows[at].float()

    return embed
