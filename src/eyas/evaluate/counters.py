"""What servers count of their drafting, brought to one form. Pure.

    SGLang   a histogram in each reply: `meta_info.spec_correct_drafts_histogram`, cycles that accepted 0, 1, 2 ..
             tokens (`spec_accept_histogram` in older releases), beside `spec_verify_ct`, the cycles.
    vLLM     Prometheus counters of the whole server at /metrics: `vllm:spec_decode_num_drafts` (cycles) and
             `vllm:spec_decode_num_accepted_tokens_per_pos{position}`. With --per-request-spec-decode-metrics each
             reply brings a histogram too: `metrics.speculative_decoding.acceptance_histogram`.

A reply's own figures are the reply's alone. Counters of a whole server are everybody's: they are believed only where
the tokens and requests counted beside them are exactly those that were sent and received.
Sources: SGLang 0.5.17 and 0.5.23 tokenizer_manager.py (`_calculate_spec_decoding_metrics`); vLLM 0.32
v1/spec_decode/metrics.py, v1/metrics/loggers.py and stats.py (`RequestSpecDecodeMetrics`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from eyas.acceptance import counter_counts, histogram_counts

_SAMPLE: Final = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([^\s]+)(?:\s+\d+)?")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_DRAFTS: Final = "vllm:spec_decode_num_drafts_total"
_DRAFT_TOKENS: Final = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED: Final = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_GENERATED: Final = "vllm:generation_tokens_total"
_PROMPTED: Final = "vllm:prompt_tokens_total"
_FINISHED: Final = "vllm:request_success_total"
_RUNNING: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_HISTOGRAMS: Final = ("spec_correct_drafts_histogram", "spec_accept_histogram")


@dataclass(frozen=True, slots=True)
class Cycles:
    """Cycles of drafting and verifying, counted by a server.

    Attributes:
        reached: [K] cycles in which all steps before k were right.
        right: [K] those in which step k was right too.
    """

    reached: tuple[int, ...]
    right: tuple[int, ...]

    @property
    def number(self) -> int:
        """Cycles in all."""
        return self.reached[0] if self.reached else 0

    @property
    def accepted(self) -> int:
        """Drafted tokens that were accepted."""
        return sum(self.right)

    @classmethod
    def of_histogram(cls, by_accepted: Sequence[int], depth: int) -> Self:
        """From the number of cycles that accepted 0, 1, 2 .. tokens.

        Raises:
            ValueError: a cycle accepted more than `depth`, or a count is negative.
        """
        reached, right = histogram_counts(by_accepted, depth)
        return cls(tuple(reached.tolist()), tuple(right.tolist()))

    def fit(self, requests: int, tokens: int) -> bool:
        """Whether so many answers of so many tokens can have come of these cycles.

        Each answer has one token of the prefill, and one of each cycle besides those accepted, less what the last
        cycle brought beyond its end.
        """
        beyond = requests + self.number + self.accepted - tokens
        return 0 <= beyond <= (len(self.right) + 1) * requests

    @classmethod
    def total(cls, parts: Iterable[Cycles]) -> Cycles | None:
        """All of them together; None where there are none.

        Raises:
            ValueError: of different depths.
        """
        found = list(parts)
        if not found:
            return None
        reached = (sum(column) for column in zip(*(part.reached for part in found), strict=True))
        return cls(tuple(reached), tuple(map(sum, zip(*(part.right for part in found), strict=True))))


@dataclass(frozen=True, slots=True)
class VllmCounters:
    """A vLLM server's counters at one moment, over all its engines, or what was added between two.

    Attributes:
        drafts: cycles in which tokens were drafted; None where the server does not speculate.
        draft_tokens: tokens drafted.
        accepted: [K] cycles whose draft at position k was accepted.
        generated, prompted: tokens of answers and of prompts.
        finished: requests.
        running: requests at work or waiting at the moment; not a counter.
    """

    drafts: int | None
    draft_tokens: int
    accepted: tuple[int, ...]
    generated: int
    prompted: int
    finished: int
    running: int

    @classmethod
    def read(cls, text: str) -> Self | None:
        """From the text of /metrics; None where it holds no counters of tokens (--disable-log-stats)."""
        samples = parse_metrics(text)
        if _GENERATED not in samples or _FINISHED not in samples:
            return None
        accepted: dict[int, float] = {}
        for labels, value in samples.get(_ACCEPTED, ()):
            position = int(labels.get("position", "-1"))
            accepted[position] = accepted.get(position, 0.0) + value
        if sorted(accepted) != list(range(len(accepted))):
            return None
        return cls(
            drafts=_sum(samples, _DRAFTS) if _DRAFTS in samples else None,
            draft_tokens=_sum(samples, _DRAFT_TOKENS),
            accepted=tuple(round(accepted[position]) for position in range(len(accepted))),
            generated=_sum(samples, _GENERATED),
            prompted=_sum(samples, _PROMPTED),
            finished=_sum(samples, _FINISHED),
            running=sum(_sum(samples, name) for name in _RUNNING),
        )

    def since(self, before: VllmCounters) -> VllmCounters:
        """What was added since; negative after a restart of the server.

        Raises:
            ValueError: it drafts to another depth since: it was restarted.
        """
        theirs = before.accepted or (0,) * len(self.accepted)
        if len(theirs) != len(self.accepted):
            raise ValueError(f"drafts of {len(self.accepted)} tokens, {len(theirs)} before")
        return VllmCounters(
            drafts=None if self.drafts is None else self.drafts - (before.drafts or 0),
            draft_tokens=self.draft_tokens - before.draft_tokens,
            accepted=tuple(now - then for now, then in zip(self.accepted, theirs, strict=True)),
            generated=self.generated - before.generated,
            prompted=self.prompted - before.prompted,
            finished=self.finished - before.finished,
            running=self.running,
        )

    def cycles(self) -> Cycles:
        """What was counted of drafting.

        Raises:
            ValueError: counts that rise with the position.
        """
        reached, right = counter_counts(self.drafts or 0, self.accepted)
        return Cycles(tuple(reached.tolist()), tuple(right.tolist()))


def parse_metrics(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Prometheus' text format: name -> (labels, value) of each sample. What is none is left out."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        if line.startswith("#") or (match := _SAMPLE.fullmatch(line.strip())) is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        labels = {name: text.replace(r"\"", '"') for name, text in _LABEL.findall(match[2] or "")}
        found.setdefault(match[1], []).append((labels, value))
    return found


def vllm_reply(metrics: object) -> Cycles | None:
    """The cycles that a vLLM reply tells of in `metrics`; None where it tells of none.

    Raises:
        ValueError: figures that contradict each other.
    """
    told = metrics.get("speculative_decoding") if isinstance(metrics, Mapping) else None
    if not isinstance(told, Mapping):
        return None
    histogram, depth = _counts(told.get("acceptance_histogram")), told.get("num_spec_tokens")
    if not isinstance(depth, int) or depth < 1:
        raise ValueError(f"no number of drafted tokens: {depth!r}")
    found = Cycles.of_histogram(histogram, depth)
    if (steps := told.get("num_spec_steps")) is not None and steps != found.number:
        raise ValueError(f"a histogram of {found.number} cycles, {steps} were made")
    return found


def sglang_reply(meta: Mapping[str, Any], depth: int) -> Cycles | None:
    """The cycles that an SGLang reply tells of in `meta_info`; None where it tells of none.

    Args:
        meta: meta_info.
        depth: the server's --speculative-num-steps.

    Raises:
        ValueError: figures that contradict each other, or no histogram beside the number of cycles.
    """
    cycles = meta.get("spec_verify_ct")
    if not cycles:
        return None
    histogram = next((meta[name] for name in _HISTOGRAMS if name in meta), None)
    if histogram is None:
        raise ValueError("no histogram of accepted tokens; SGLang 0.5.17 or newer is needed")
    found = Cycles.of_histogram(_counts(histogram), depth)
    if found.number != cycles:
        raise ValueError(f"a histogram of {found.number} cycles, {cycles} were made")
    return found


def _counts(value: object) -> list[int]:
    if not (isinstance(value, list) and value and all(type(count) is int and count >= 0 for count in value)):
        raise ValueError(f"not a histogram: {str(value)[:100]}")
    return value


def _sum(samples: Mapping[str, list[tuple[dict[str, str], float]]], name: str) -> int:
    return round(sum(value for _, value in samples.get(name, ())))
