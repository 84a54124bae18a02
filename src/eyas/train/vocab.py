"""The draft vocabulary: which of the target's tokens the drafter can draft, and the two maps it is published with.

    vocab = DraftVocab.of_corpus(corpus, target, coverage=0.995)
    vocab.target_ids[i]      # the target's id of draft token i
    vocab.d2t[i]             # the same as an offset, as published: target id - i
    vocab.t2d[id]            # whether the target's token is in it

A map fits one corpus and one tokenizer and knows which. Used with others it would draft wrong or useless tokens without
a word, so `check` refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from eyas.data.corpus import Corpus
from eyas.errors import ConfigError, IntegrityError
from eyas.store.files import disk_errors, write_atomic
from eyas.target.checkpoint import Target
from eyas.target.special_tokens import SpecialTokens

METADATA_KEY: Final = "eyas"
#: A size found by coverage is rounded up to a multiple of this: matrix products of other widths are slower.
ROUND_TO: Final = 64


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """Vd of the target's V tokens.

    Attributes:
        target_ids: [Vd] int64 on the CPU, the target's id of each draft token, all different; ascending where it was
            made here.
        vocab_size: V.
        corpus_digest, tokenizer_hash: what it was made for; empty where that is not known.
        coverage: share of that corpus's trained tokens that are in it; None where that is not known.
    """

    target_ids: torch.Tensor = field(repr=False)
    vocab_size: int
    corpus_digest: str = ""
    tokenizer_hash: str = ""
    coverage: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for ids that are none, or not all different."""
        ids = self.target_ids
        if ids.ndim != 1 or ids.dtype != torch.int64 or not len(ids):
            raise ValueError(f"target_ids must be int64 [Vd], got {ids.dtype} {list(ids.shape)}")
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size:
            raise ValueError(f"ids outside the target's vocabulary of {self.vocab_size}")
        if len(ids.unique()) != len(ids):
            raise ValueError("two draft tokens are the same token of the target")

    # --- making one ---------------------------------------------------------------------------------------------------

    @classmethod
    def full(cls, vocab_size: int, *, corpus_digest: str = "", tokenizer_hash: str = "") -> Self:
        """All of the target's tokens: draft id and target id are the same."""
        return cls(torch.arange(vocab_size), vocab_size, corpus_digest, tokenizer_hash, 1.0)

    @classmethod
    def from_counts(
        cls,
        counts_V: npt.NDArray[np.int64],
        *,
        size: int | None = None,
        coverage: float | None = None,
        keep: Iterable[int] = (),
        corpus_digest: str = "",
        tokenizer_hash: str = "",
    ) -> Self:
        """The most frequent tokens; of equally frequent ones those with smaller ids.

        Args:
            counts_V: [V] how often each token is trained.
            size: Vd. Where fewer tokens were seen, unseen ones fill it up.
            coverage: instead of a size, the share of trained tokens that must be in the vocabulary: the fewest tokens
                that reach it, then as many more as `ROUND_TO` asks for.
            keep: ids that are in it however rare.
            corpus_digest, tokenizer_hash: what the counts are of.

        Raises:
            ConfigError: no tokens were trained, or the size is more than V or less than what must be kept.
            ValueError: neither or both of size and coverage, a coverage outside (0, 1], or ids to keep that are none.
        """
        vocab_size, total, kept = len(counts_V), int(counts_V.sum()), np.array(sorted(set(keep)), dtype=np.int64)
        if (size is None) == (coverage is None):
            raise ValueError("give either a size or a coverage")
        if len(kept) and not 0 <= kept[0] <= kept[-1] < vocab_size:
            raise ValueError(f"ids to keep outside the vocabulary of {vocab_size}")
        if total < 1:
            raise ConfigError("no token of the corpus is trained", corpus_digest and f"corpus {corpus_digest}")
        # Kept ones first, then by frequency; a stable sort leaves equal ones in the order of their ids.
        rank = counts_V.copy()
        rank[kept] = total + 1
        order = np.argsort(-rank, kind="stable")
        if size is None:
            assert coverage is not None
            size = _size_for(counts_V[order], coverage, at_least=len(kept))
        if not max(1, len(kept)) <= size <= vocab_size:
            hint = f"from {max(1, len(kept))} (tokens that must be in it) to {vocab_size} (all of them)"
            raise ConfigError(f"a draft vocabulary of {size} tokens", "train.vocab_size", hint)
        chosen = np.sort(order[:size])
        covered = int(counts_V[chosen].sum()) / total
        return cls(torch.from_numpy(chosen), vocab_size, corpus_digest, tokenizer_hash, covered)

    @classmethod
    def of_corpus(
        cls, corpus: Corpus, target: Target, *, size: int | None = None, coverage: float | None = None
    ) -> Self:
        """`from_counts` of a corpus's trained tokens.

        Always in it are the tokens that the target ends with, and added tokens (ends of turns, calls, thoughts) that
        are trained anywhere: without them a draft could never end a turn.

        Raises:
            ConfigError: the corpus has tokens that the target lacks, or as `from_counts` and `SpecialTokens.of`.
        """
        counts = count_trained(corpus, target.vocab_size)
        special = SpecialTokens.of(target)
        return cls.from_counts(
            counts,
            size=size,
            coverage=coverage,
            keep=special.ends | {i for i in special.added if counts[i]},
            corpus_digest=corpus.digest,
            tokenizer_hash=corpus.meta.tokenizer_hash,
        )

    @classmethod
    def from_maps(
        cls, d2t: torch.Tensor, t2d: torch.Tensor | None, vocab_size: int, where: object = "", **made_for: Any
    ) -> Self:
        """The vocabulary that published maps describe.

        Args:
            d2t: [Vd] integer offsets.
            t2d: [V] bool or 0/1, where it is published too; then the two must agree.
            vocab_size: V.
            where: named in errors.
            **made_for: corpus_digest, tokenizer_hash, coverage where they are known.

        Raises:
            ConfigError: the maps are none, or they disagree: absolute ids in place of offsets show so.
        """
        hint = "d2t[i] is the target's id less i"
        if d2t.ndim != 1 or d2t.is_floating_point() or d2t.dtype == torch.bool:
            raise ConfigError(f"d2t is {d2t.dtype} {list(d2t.shape)}", where, hint)
        ids = d2t.to("cpu", torch.int64) + torch.arange(len(d2t))
        try:
            vocab = cls(ids, vocab_size, **made_for)
        except ValueError as error:
            raise ConfigError(f"d2t is no map: {error}", where, hint) from error
        if t2d is not None and not torch.equal(t2d.to("cpu").bool(), vocab.t2d):
            raise ConfigError("d2t and t2d disagree", where, hint)
        return vocab

    # --- looking things up --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Vd."""
        return len(self.target_ids)

    @property
    def is_full(self) -> bool:
        """Whether draft id and target id are the same for every token of the target."""
        return len(self) == self.vocab_size and torch.equal(self.target_ids, torch.arange(self.vocab_size))

    @property
    def d2t(self) -> torch.Tensor:
        """[Vd] int64, as published: target id less draft id."""
        return self.target_ids - torch.arange(len(self))

    @property
    def t2d(self) -> torch.Tensor:
        """[V] bool, as published: whether the target's token can be drafted."""
        inside = torch.zeros(self.vocab_size, dtype=torch.bool)
        inside[self.target_ids] = True
        return inside

    @property
    def draft_ids(self) -> torch.Tensor:
        """[V] int64: draft id of each of the target's tokens, -1 for one that cannot be drafted."""
        ids = torch.full((self.vocab_size,), -1)
        ids[self.target_ids] = torch.arange(len(self))
        return ids

    def check(self, corpus: Corpus, where: object = "") -> None:
        """Make sure that the map was made for this corpus; what it does not know of itself is not checked.

        Raises:
            ConfigError: it was made for another one, or for another tokenizer.
        """
        self._check_tokenizer(corpus, where)
        if self.corpus_digest and self.corpus_digest != corpus.digest:
            what = f"the draft vocabulary was made for corpus {self.corpus_digest[:8]}, not for {corpus.digest[:8]}"
            hint = "name that corpus, or make the vocabulary and the drafter anew for this one"
            raise ConfigError(what, where or corpus.path, hint)

    def bound_to(self, corpus: Corpus, where: object = "") -> Self:
        """The same tokens for this corpus, whatever it was made for before: a draft that is trained further keeps the
        vocabulary of its head. `coverage` is counted anew.

        Raises:
            ConfigError: it was made for another tokenizer, or the corpus has tokens beyond the vocabulary.
        """
        self._check_tokenizer(corpus, where)
        counts = count_trained(corpus, self.vocab_size)
        covered = int(counts[self.target_ids.numpy()].sum()) / max(1, int(counts.sum()))
        made_for = {"corpus_digest": corpus.digest, "tokenizer_hash": corpus.meta.tokenizer_hash}
        return replace(self, coverage=covered, **made_for)

    def _check_tokenizer(self, corpus: Corpus, where: object) -> None:
        theirs = corpus.meta.tokenizer_hash
        if self.tokenizer_hash and theirs and self.tokenizer_hash != theirs:
            what = f"the draft vocabulary is of tokenizer {self.tokenizer_hash[:8]}, the corpus of another"
            raise ConfigError(what, where or corpus.path, "its ids mean other tokens; make the vocabulary anew")

    # --- files --------------------------------------------------------------------------------------------------------

    @property
    def made_for(self) -> dict[str, Any]:
        """What it was made for, for JSON."""
        return {
            "corpus_digest": self.corpus_digest,
            "tokenizer_hash": self.tokenizer_hash,
            "coverage": self.coverage,
        }

    def save(self, path: Path) -> None:
        """Write the maps and what they were made for to a safetensors file, in place of any before it.

        Raises:
            StoreError: the disk.
        """
        text = json.dumps({"vocab_size": self.vocab_size, **self.made_for}, sort_keys=True)
        with disk_errors(path):
            write_atomic(path, save({"d2t": self.d2t, "t2d": self.t2d}, {METADATA_KEY: text}))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            ConfigError: no such file, or another one.
            IntegrityError: damaged.
        """
        try:
            with safe_open(path, "pt") as file:
                facts = json.loads((file.metadata() or {})[METADATA_KEY])
                d2t, t2d = file.get_tensor("d2t"), file.get_tensor("t2d")
        except FileNotFoundError as error:
            raise ConfigError("no draft vocabulary", path) from error
        except (OSError, SafetensorError, ValueError) as error:
            raise IntegrityError("the draft vocabulary cannot be read", path, str(error)) from error
        except KeyError as error:
            raise ConfigError("not a draft vocabulary", path, f"it has no {error}") from error
        if not isinstance(facts, dict) or not isinstance(facts.get("vocab_size"), int):
            raise ConfigError("not a draft vocabulary", path, "it does not say of how many tokens")
        return cls.from_maps(d2t, t2d, facts["vocab_size"], path, **known_facts(facts))


def known_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What `made_for` wrote, where it is of the right type."""
    text = {key: facts[key] for key in ("corpus_digest", "tokenizer_hash") if isinstance(facts.get(key), str)}
    coverage = facts.get("coverage")
    return {**text, "coverage": float(coverage) if isinstance(coverage, int | float) else None}


def count_trained(corpus: Corpus, vocab_size: int) -> npt.NDArray[np.int64]:
    """How often each token is trained: [V].

    Raises:
        ConfigError: a token outside the vocabulary.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for group in corpus.row_groups():
        found = np.bincount(group.tokens[group.loss_mask != 0], minlength=vocab_size)
        if len(found) > vocab_size:
            hint = "was it prepared for this target?"
            raise ConfigError(f"token {len(found) - 1} of a target that has {vocab_size}", corpus.path, hint)
        counts += found
    return counts


def _size_for(descending_V: npt.NDArray[np.int64], coverage: float, at_least: int) -> int:
    """How many of the tokens, in this order, reach the coverage; rounded up."""
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage must be within (0, 1], got {coverage}")
    reached = np.cumsum(descending_V)
    # Whole counts: the share as a float, times the total, may come out a hair above what all tokens sum up to.
    needed = min(int(np.ceil(coverage * int(reached[-1]) - 1e-9)), int(reached[-1]))
    size = max(int(np.searchsorted(reached, needed)) + 1, at_least)
    return min(-(-size // ROUND_TO) * ROUND_TO, len(descending_V))
