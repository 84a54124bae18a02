"""Does a drafter do better on other inputs than the ones a server would give it? Then these are the wrong ones.

Names and shapes cannot show ids that are off by one, layers in another order, `norm_output` set wrongly, or a
vocabulary map of another run. A drafter shows them: it comes nearest to the target's distribution on the inputs it was
trained on, for that is what training made small. So it is run on the same texts with each alternative in turn, and its
divergence from the target is compared, document by document. That tells more than accepted drafts do: neighbouring
layers are alike, and so are most drafts. An alternative that is better by more than chance and by more than a trifle is
what the drafter was trained on.

The comparison is a paired t test over documents (rows of one text are alike). An alternative that is as good as the
right one passes t = 3 once in some hundred checks of 24 texts, and is then most likely within the trifle, too; where a
head is right, all of them lie far below zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from eyas.acceptance import Acceptance
from eyas.export.replay import Document, Embed, Replay, Teach, acceptance_of, replay
from eyas.train.draft import Eagle3Draft

STEPS: Final = 3
#: Name of an alternative -> what is added to every layer in it.
SHIFTS: Final = {"its ids are one too high": -1, "its ids are one too low": 1}
BOUND_T: Final = 3.0
TRIFLE: Final = 0.03  # of the divergence as served
FEWEST: Final = 8  # documents
_MAP: Final = "its vocabulary map is another run's"
_COMMONEST: Final = 1.1  # ids off by one are named first where they explain nearly as much as another fault
_FEWEST_SEEN: Final = 2  # drafts of one draft token, for a map to be read off them
_MANY_LAYERS: Final = 4  # from here on only neighbours change places, and all of them at once


@dataclass(frozen=True, slots=True)
class Drafter:
    """What is put to the test: float32 weights, and where draft tokens and embeddings come from.

    Attributes:
        model: the weights. Its own `embed_tokens` are not used.
        ids: [Vd] the target's id of each draft token.
        embed: input embeddings.
        teach: the target's logits of the draft vocabulary, where drafts are to be judged.
    """

    model: Eagle3Draft
    ids: Tensor
    embed: Embed
    teach: Teach | None = None

    def run(self, documents: Sequence[Document]) -> list[Replay]:
        """Its drafts."""
        return [replay(self.model, self.ids, document, self.embed, STEPS, self.teach) for document in documents]


@dataclass(frozen=True, slots=True)
class Alternative:
    """Other inputs.

    Attributes:
        name: what would be the case if these were the right ones: "its ids are one too high".
        acceptance: of the drafter on them.
        t: of the paired test against the inputs as served; positive where these are better.
        gain: share of the divergence from the target that is gone with it.
    """

    name: str
    acceptance: Acceptance
    t: float
    gain: float

    @property
    def is_better(self) -> bool:
        return self.t > BOUND_T and self.gain > TRIFLE


@dataclass(frozen=True, slots=True)
class Measured:
    """The drafter as a server would run it, and on everything else.

    Attributes:
        documents, rows: in number.
        served: acceptance as served.
        alternatives: all that were tried, the largest gain first.
        before_norm: drafts at positions where the final norm decides the target's token: those that are the token
            with the norm, and those that are the one without it.
    """

    documents: int
    rows: int
    served: Acceptance
    alternatives: tuple[Alternative, ...]
    before_norm: tuple[int, int]

    @property
    def unclear(self) -> list[str]:
        """Alternatives that are neither better nor clearly worse: this drafter, on these texts, cannot tell them."""
        return [other.name for other in self.alternatives if not other.is_better and other.t > -BOUND_T]

    @property
    def faults(self) -> list[str]:
        """What is wrong, in words; empty where nothing is."""
        better = [other for other in self.alternatives if other.is_better]
        weight = dict.fromkeys(SHIFTS, _COMMONEST)
        # A map read off the drafts mends a little of every fault: it is one only where nothing else is.
        better.sort(key=lambda other: (other.name == _MAP, -other.gain * weight.get(other.name, 1.0)))
        found = [
            f"{other.name}: {other.acceptance.length:.2f} tokens a cycle so, {self.served.length:.2f} as served "
            f"(t = {other.t:.1f} over {self.documents} texts)"
            for other in better
        ]
        with_norm, without = self.before_norm
        if without > with_norm and (without - with_norm) > BOUND_T * math.sqrt(with_norm + without):
            what = f"of {with_norm + without} drafts on which the final norm decides, {without} are what it is without"
            # First: a drafter of another teacher often does a little better on other inputs, too.
            found.insert(0, f"it was trained on states before the final norm: {what}")
        return found


def measure(
    drafter: Drafter, documents: Sequence[Document], others: Mapping[str, Sequence[Document]] | None = None
) -> Measured:
    """Run a drafter as served and on every alternative.

    Args:
        drafter: as served.
        documents: with states of the layers that a server gives it.
        others: name -> the same documents with states of other layers.
    """
    served = drafter.run(documents)
    found = [_compared(name, served, drafter.run(texts)) for name, texts in (others or {}).items()]
    for name, change in _orders(drafter.model.config.num_aux):
        found.append(_compared(name, served, drafter.run([change(document) for document in documents])))
    flipped = replace(drafter, model=_with_norm_output(drafter.model, not drafter.model.config.norm_output))
    said = "true" if drafter.model.config.norm_output else "false"
    found.append(_compared(f"it was trained otherwise than norm_output = {said}", served, flipped.run(documents)))
    rows = sum(len(found.rows) for found in served)
    ranked = sorted(found, key=lambda other: -other.gain)
    if (other := _other_map(served, documents)) is not None:
        ranked.append(other)
    return Measured(len(documents), rows, acceptance_of(served), tuple(ranked), _before_norm(served, documents))


def _compared(name: str, served: Sequence[Replay], other: Sequence[Replay]) -> Alternative:
    pairs = [(after.scores - before.scores).nanmean() for before, after in zip(served, other, strict=True)]
    gains = torch.stack([gain for gain in pairs if not bool(gain.isnan())] or [torch.zeros(())])
    served_so = torch.cat([found.scores.flatten() for found in served]).nanmean().abs().clamp_min(1e-9)
    return Alternative(name, acceptance_of(other), _t_of(gains), float(gains.mean() / served_so))


def _t_of(gains: Tensor) -> float:
    if len(gains) < FEWEST or not bool(gains.any()):
        return 0.0
    spread = float(gains.std()) / math.sqrt(len(gains))
    mean = float(gains.mean())
    return mean / spread if spread else math.copysign(math.inf, mean)


# --- alternatives -----------------------------------------------------------------------------------------------------


def _orders(num_aux: int) -> Iterator[tuple[str, Callable[[Document], Document]]]:
    """The same layers in every other order."""
    natural = tuple(range(num_aux))
    if num_aux < _MANY_LAYERS:
        orders = [order for order in itertools.permutations(natural) if order != natural]
    else:
        swaps = [(*natural[:i], i + 1, i, *natural[i + 2 :]) for i in range(num_aux - 1)]
        orders = [*swaps, natural[::-1]]
    for order in orders:

        def change(document: Document, order: Sequence[int] = order) -> Document:
            parts = document.aux.chunk(num_aux, dim=-1)
            return replace(document, aux=torch.cat([parts[i] for i in order], dim=-1))

        yield f"it takes its layers in the order {[i + 1 for i in order]}", change


def _with_norm_output(model: Eagle3Draft, norm_output: bool) -> Eagle3Draft:
    """The same weights under the other setting."""
    other = Eagle3Draft.__new__(Eagle3Draft)
    other.__dict__.update(model.__dict__)
    other.config = replace(model.config, norm_output=norm_output)
    return other


def _other_map(served: Sequence[Replay], documents: Sequence[Document]) -> Alternative | None:
    """A map read off one half of the documents, tried on the other half, and the other way round.

    Each draft token stands for what the text most often has where it is drafted. A map that is right leaves nothing to
    learn; one of another run is beaten at once. First drafts only.
    """
    halves = [list(range(start, len(served), 2)) for start in (0, 1)]
    if len(served) < 2 * FEWEST:
        return None
    pairs = [
        (found.drafts[0], document.tokens[found.rows + 2]) for found, document in zip(served, documents, strict=True)
    ]
    before, after = torch.zeros(len(served)), torch.zeros(len(served))
    changed: list[Replay] = list(served)
    for learn, test in (halves, halves[::-1]):
        meant = _meanings([pairs[i] for i in learn])
        for i in test:
            drafts, texts = pairs[i]
            # Only drafts that the other half knows say anything.
            known = torch.tensor([int(draft) in meant for draft in drafts.tolist()], dtype=torch.bool)
            other = torch.tensor([meant.get(draft, draft) for draft in drafts.tolist()], dtype=torch.int64)
            before[i] = float((drafts == texts)[known].sum())
            after[i] = float((other == texts)[known].sum())
            changed[i] = replace(
                served[i],
                drafts=torch.cat([other[None], served[i].drafts[1:]]),
                right=torch.cat([(other == texts)[None], served[i].right[1:]]),
            )
    total, gains = float(before.sum()), after - before
    if after.sum() < 2 * total:  # a frequent confusion of two tokens is a weakness, not another map
        return None
    gain = float(gains.sum()) / total if total else math.inf
    return Alternative(_MAP, acceptance_of(changed), _t_of(gains), gain)


def _meanings(pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[int, int]:
    """Draft token -> the token of the text that it stands for most often."""
    counts: dict[int, dict[int, int]] = {}
    for drafts, texts in pairs:
        for draft, text in zip(drafts.tolist(), texts.tolist(), strict=True):
            of_draft = counts.setdefault(draft, {})
            of_draft[text] = of_draft.get(text, 0) + 1
    return {
        draft: max(seen, key=lambda text: (seen[text], -text))
        for draft, seen in counts.items()
        if sum(seen.values()) >= _FEWEST_SEEN
    }


def _before_norm(served: Sequence[Replay], documents: Sequence[Document]) -> tuple[int, int]:
    """First drafts where lm_head gives other tokens with and without the final norm: (with it, without it)."""
    with_norm = without = 0
    for found, document in zip(served, documents, strict=True):
        best, before = document.best[found.rows + 1], document.best_before_norm[found.rows + 1]
        decided = (best >= 0) & (before >= 0) & (best != before)
        with_norm += int((found.drafts[0] == best)[decided].sum())
        without += int((found.drafts[0] == before)[decided].sum())
    return with_norm, without
