"""Whether a dump's states give the log-probabilities of the reply: what stands in for the identity that is missing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from eyas.compare import SEPARATION
from eyas.extract.dumpdir.matching import Fit
from eyas.extract.sglang_client import is_echo
from eyas.target.head import Head
from eyas.target.norm import FinalNorm

#: Nats that a log-probability may be off, and its share, by the coarsest dtype between states and logits. An engine
#: rounds logits to its dtype: in bf16 by 1/16 for one of 16 to 32, once for the token's and once for the largest one.
TOLERANCE: Final[Mapping[torch.dtype, tuple[float, float]]] = {
    torch.float32: (2e-3, 1e-3),
    torch.float16: (0.05, 2e-3),
    torch.bfloat16: (0.25, 1e-2),
}

#: How many of the likeliest answers have their log-probabilities compared.
ALTERNATIVES: Final = 16


@dataclass(frozen=True, slots=True)
class Evidence:
    """log p(ids[n] | the state at positions[n]) as the server computed it, n of N.

    Attributes:
        positions: 0-based positions of the row's states.
        ids: token ids.
        log_probs: nats.
    """

    positions: list[int]
    ids: list[int]
    log_probs: list[float]


def asked_for(tokens: int, check_tokens: int) -> dict[str, Any]:
    """What a request must hold for the reply to carry evidence."""
    # The entry of the first position asked for is empty: nothing comes before it.
    start = max(0, tokens - 1 - check_tokens) if check_tokens else -1
    return {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": ALTERNATIVES}


def read_evidence(meta: Mapping[str, Any], tokens: Sequence[int], vocab_size: int, check_tokens: int) -> Evidence | str:
    """The log-probabilities of a reply's `meta_info`, or why they are no evidence.

    Args:
        meta: of the reply.
        tokens: the row, T of them.
        vocab_size: of the target.
        check_tokens: how many of the row's last tokens were asked for; fewer of them would prove less.
    """
    prompt = _pairs(meta.get("input_token_logprobs") or [])
    output = _pairs(meta.get("output_token_logprobs"))
    top = _pairs(next(iter(_list(meta.get("output_top_logprobs"))), []) or [])
    if not output or prompt is None or top is None:
        return "the reply holds no log-probabilities"
    answers = [*output[:1], *top]
    if any(not 0 <= token < vocab_size for token, _ in answers):
        return f"the reply names tokens outside the target's vocabulary of {vocab_size}"
    # Prompt entries belong to the last tokens of the row; the state before a token predicts it.
    first = len(tokens) - len(prompt)
    if first < 0 or not is_echo([token for token, _ in prompt], tokens[first:], vocab_size):
        return "the reply's prompt tokens are not the row's"
    known = [(at - 1, tokens[at], number) for at, (_, number) in enumerate(prompt, first) if at and number is not None]
    wanted = min(check_tokens, len(tokens) - 1), min(ALTERNATIVES, vocab_size)
    if len(known) < wanted[0] or len(top) < wanted[1]:
        return (
            f"the reply holds log-probabilities of {len(known)} prompt tokens and {len(top)} answers, "
            f"{wanted[0]} and {wanted[1]} were asked for"
        )
    for token, number in answers:
        if number is None:
            return "the reply's log-probabilities are not numbers"
        known.append((len(tokens) - 1, token, number))
    positions, ids, log_probs = zip(*known, strict=True)
    return Evidence(list(positions), list(ids), list(log_probs))


def alike(tokens: Sequence[int], other: Sequence[int], check_tokens: int) -> bool:
    """Whether two rows of one length agree in half of the tokens compared, or more: too near to be told apart."""
    compared = list(zip(tokens, other, strict=True))[max(0, len(tokens) - check_tokens) :]
    return 2 * sum(one == two for one, two in compared) >= len(compared)


class Judge:
    """Compares dumps with replies.

    Args:
        head: the target's; None where contents cannot be compared.
        norm: the target's final norm; None where the checkpoint's is not known.
        pre_norm: whether dumped states are from before it.
        tolerance: nats, instead of those by dtype.
    """

    def __init__(
        self, head: Head | None, norm: FinalNorm | None, *, pre_norm: bool, tolerance: float | None = None
    ) -> None:
        self._head, self._tolerance = head, tolerance
        self._norm, self._other = (norm, None) if pre_norm else (None, norm)

    def last(self, dumped_TH: torch.Tensor) -> torch.Tensor:
        """States after the final norm, in the dump's dtype: [T, H]."""
        return dumped_TH if self._norm is None else self._norm(dumped_TH)

    def fit(self, last_TH: torch.Tensor, evidence: Evidence) -> tuple[Fit, str]:
        """Whether states after the norm are those that the evidence is from, and how far off they are."""
        if self._head is None:
            return Fit.RIGHT, "not compared"
        excess, worst = self._excess(self._head, last_TH, evidence)
        detail = f"log-probabilities differ by up to {worst:.3g} nats from the reply's"
        if excess <= 1:
            return Fit.RIGHT, detail
        return (Fit.OTHER if excess > SEPARATION else Fit.UNCLEAR), detail

    def explain(self, dumped_TH: torch.Tensor, evidence: Evidence) -> tuple[str, str] | None:
        """Which wrong setting or fault would make a dump fit that does not: its name, and a text.

        Args:
            dumped_TH: the states as dumped.
            evidence: of the reply.
        """
        last_TH = self.last(dumped_TH)
        if self._norm is not None and self.fit(dumped_TH, evidence)[0] is Fit.RIGHT:
            return "last-differs", "its states are from after the final norm: --last post-norm"
        other = self._other
        if other is not None and self.fit(other(dumped_TH), evidence)[0] is Fit.RIGHT:
            return "last-differs", "its states are from before the final norm: --last pre-norm"
        for by, text in ((-1, "one row too many at the start"), (1, "the first row is missing")):
            # A roll moves the outermost state to where it does not belong.
            inner = _within(evidence, 0, len(last_TH) - 1)
            if inner.ids and self.fit(last_TH.roll(by, 0), inner)[0] is Fit.RIGHT:
                return "rows-shifted", f"its states are shifted by one: {text}"
        return None

    def _excess(self, head: Head, last_TH: torch.Tensor, evidence: Evidence) -> tuple[float, float]:
        """The largest difference as a multiple of what is allowed, and in nats; NaN counts as infinite."""
        positions_N = torch.tensor(evidence.positions)
        theirs_N = torch.tensor(evidence.log_probs)
        ours_N = head.log_probs(last_TH[positions_N], torch.tensor(evidence.ids)).cpu()
        coarsest = max((head.weight.dtype, last_TH.dtype), key=lambda dtype: TOLERANCE[dtype])
        absolute, relative = TOLERANCE[coarsest] if self._tolerance is None else (self._tolerance, 0.0)
        apart_N = (ours_N - theirs_N).abs().nan_to_num(nan=math.inf)
        allowed_N = absolute + relative * theirs_N.abs()
        return (apart_N / allowed_N).max().item(), apart_N.max().item()


def _within(evidence: Evidence, start: int, stop: int) -> Evidence:
    kept = [n for n, position in enumerate(evidence.positions) if start < position < stop]
    return Evidence(
        [evidence.positions[n] for n in kept],
        [evidence.ids[n] for n in kept],
        [evidence.log_probs[n] for n in kept],
    )


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _pairs(entries: object) -> list[tuple[int, float | None]] | None:
    """(token, log-probability) of SGLang's [log-probability, token, text] entries; None for anything else."""
    if not isinstance(entries, list):
        return None
    pairs: list[tuple[int, float | None]] = []
    for entry in entries:
        if not (isinstance(entry, list) and len(entry) >= 2 and isinstance(entry[1], int)):
            return None
        number = entry[0]
        if number is None:
            pairs.append((entry[1], None))
        elif isinstance(number, int | float) and math.isfinite(number):
            pairs.append((entry[1], float(number)))
        else:
            return None
    return pairs
