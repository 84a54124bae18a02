"""Rows of a corpus packed into one training batch, and which of its rows draft at which step. Pure, on the CPU.

A batch is N = `budget` tokens long: documents one after another, then padding. Row t *drafts* at step k when its
prediction of token t + 2 + k counts; it then reads the embedding of token t + 1 + k and is taught by the target's state
at t + 1 + k. By the rule of serving (`eyas.positions`) it does iff tokens t+1 .. t+2+k are all trained and of one
document, so that a row that drafts at step k drafted at every step before. Rows are sorted by how long they live:
step k works on the prefix `rows[:counts[k]]`, and no step gathers what it needs by a mask.

Two other rules are for comparisons with other trainers; their rows may skip a step, `scored` says which count:

    serving   m[t+1] & ... & m[t+2+k]
    classic   m[t+k],   t + 1 + k within the document: EAGLE's, SpecForge's; normaliser N (`Batch.tokens_used`)
    shifted   m[t+1+k], t + 1 + k within the document: speculators'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.errors import ConfigError
from eyas.train.blocks import BLOCK
from eyas.train.step_index import StepIndex, TextIndex

MaskRule = Literal["serving", "classic", "shifted"]

_Bools = npt.NDArray[np.bool_]
_Ints = npt.NDArray[np.int64]


class Sample(NamedTuple):
    """One corpus row for training: T tokens, L kept positions. CPU tensors.

    Attributes:
        row: corpus row number.
        tokens: [T] int64. loss_mask: [T] bool, tokens that are trained.
        aux: [T, A * H] float, layer outputs side by side, shallow to deep.
        last: [L, H] float, states after the target's final norm at `last_index`.
        last_index: [L] int64, ascending.
    """

    row: int
    tokens: Tensor
    loss_mask: Tensor
    aux: Tensor
    last: Tensor
    last_index: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """N packed tokens, M teacher states, R rows that draft, K steps.

    Attributes:
        tokens: [N] int64; 0 in the padding.
        positions: [N] int64, within the document; 0 in the padding.
        document: [N] int32, number within the batch; -1 in the padding.
        aux: [N, A * H] as stored; 0 in the padding.
        last: [M, H] as stored: the states that some row is taught by, in order of position.
        teacher_at: [N] int64, position -> row of `last`; -1 where it is not needed.
        rows: [R] int64, positions that draft at step 0 or later, those that live longest first, then ascending.
        scored: [K, R] bool, which rows count at which step; None where all of `rows[:counts[k]]` do.
        counts: rows step k works on, never rising.
        valid_counts: rows that count at step k; differs from `counts` where `scored` is given.
        index: where the rows of each step are and what they read; None where no row drafts.
        key_spans: for each `BLOCK` of rows the positions [low, high) it can attend to.
        samples: corpus row numbers, in order of `document`.
    """

    tokens: Tensor
    positions: Tensor
    document: Tensor
    aux: Tensor
    last: Tensor
    teacher_at: Tensor
    rows: Tensor
    scored: Tensor | None
    counts: tuple[int, ...]
    valid_counts: tuple[int, ...]
    index: StepIndex | None
    key_spans: tuple[tuple[int, int], ...]
    samples: tuple[int, ...]
    tokens_used: int

    @property
    def steps(self) -> int:
        """K."""
        return len(self.counts)

    def to(self, device: str | torch.device, *, non_blocking: bool = False) -> Self:
        """The batch with its tensors on a device."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The batch in page-locked memory, from which a copy to a GPU does not hold up the host."""
        return self._with(lambda tensor: tensor.pin_memory())

    def _with(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed: dict[str, Any] = {}
        for field in fields(self):
            match getattr(self, field.name):
                case Tensor() as tensor:
                    changed[field.name] = change(tensor)
                case StepIndex() as index:
                    changed[field.name] = index.map(change)
        return replace(self, **changed)


def pack(samples: Sequence[Sample], *, steps: int, budget: int | None = None, mask: MaskRule = "serving") -> Batch:
    """Lay samples side by side and find the rows that draft.

    Args:
        samples: at least one; their lengths must fit in `budget` together.
        steps: K, steps of the training-time test.
        budget: N; None for the sum of the lengths, without padding.
        mask: which rows count.

    Raises:
        ValueError: no sample, no step, or more tokens than the budget.
        ConfigError: a sample has no state at a position that teaches: its store keeps `last` where the serving rule
            reads it, and another rule was asked for.
    """
    lengths = [len(sample.tokens) for sample in samples]
    used = sum(lengths)
    size = used if budget is None else budget
    if not samples or steps < 1 or used > size:
        raise ValueError(f"{len(samples)} samples of {used} tokens, {steps} steps, a budget of {budget}")
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    trained = np.zeros(size, dtype=np.bool_)
    for sample, start, stop in zip(samples, starts, starts[1:], strict=False):
        trained[start:stop] = sample.loss_mask.numpy()
    ends = np.full(size, 0, dtype=np.int64)
    ends[:used] = np.repeat(starts[1:], lengths)
    positions = np.zeros(size, dtype=np.int64)
    positions[:used] = np.arange(used) - np.repeat(starts[:-1], lengths)
    document = np.full(size, -1, dtype=np.int32)
    document[:used] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)

    valid = valid_steps(trained, ends, steps, mask)
    lifetime = np.where(valid.any(0), steps - valid[::-1].argmax(0), 0)
    order = np.argsort(-lifetime, kind="stable")
    rows = order[: int((lifetime > 0).sum())]
    counts = tuple(int((lifetime > k).sum()) for k in range(steps))
    scored = valid[:, rows]
    valid_counts = tuple(int(n) for n in scored.sum(1))
    teachers = np.zeros(size, dtype=np.bool_)
    for k in range(steps):
        teachers[rows[scored[k]] + 1 + k] = True
    teacher_at, last = _teachers(samples, starts, teachers)
    tokens = _side_by_side([sample.tokens for sample in samples], size)
    nested = counts == valid_counts
    text = TextIndex(tokens.numpy(), positions, document, teacher_at)
    return Batch(
        tokens=tokens,
        positions=torch.from_numpy(positions),
        document=torch.from_numpy(document),
        aux=_side_by_side([sample.aux for sample in samples], size),
        last=last,
        teacher_at=torch.from_numpy(teacher_at),
        rows=torch.from_numpy(rows),
        scored=None if nested else torch.from_numpy(scored),
        counts=counts,
        valid_counts=valid_counts,
        index=StepIndex.of(rows, counts, None if nested else scored, text),
        key_spans=_key_spans(rows, rows - positions[rows]),
        samples=tuple(sample.row for sample in samples),
        tokens_used=used,
    )


def valid_steps(trained: _Bools, ends: _Ints, steps: int, mask: MaskRule = "serving") -> _Bools:
    """valid[k, t]: whether row t counts at step k.

    Args:
        trained: [N] tokens that are trained; False in the padding.
        ends: [N] end of each position's document, exclusive; 0 in the padding.
        steps: K.
        mask: the rule.

    Returns:
        [K, N].
    """
    here = np.arange(len(trained))
    if mask == "serving":
        # A run of trained tokens ends before the first untrained one or at its document's end.
        stops = np.append(np.flatnonzero(~trained), len(trained))
        run = np.minimum(stops[np.searchsorted(stops, here)], ends) - here  # of trained tokens from `here` on
        lifetime = np.zeros(len(trained), dtype=np.int64)
        lifetime[:-1] = np.where(here[1:] < ends[:-1], run[1:] - 1, 0)  # t + 1 is the first token that must be trained
        return lifetime[None] > np.arange(steps)[:, None]
    first = 1 if mask == "shifted" else 0
    valid = np.zeros((steps, len(trained)), dtype=np.bool_)
    for k in range(steps):
        ahead = k + first
        shifted = np.zeros(len(trained), dtype=np.bool_)
        shifted[: max(0, len(trained) - ahead)] = trained[ahead:]
        valid[k] = shifted & (here + 1 + k < ends)
    return valid


def _teachers(samples: Sequence[Sample], starts: _Ints, teachers: _Bools) -> tuple[_Ints, Tensor]:
    """Where each teaching position's state lies among those that are kept: ([N], [M, H])."""
    teacher_at = np.full(len(teachers), -1, dtype=np.int64)
    teacher_at[teachers] = np.arange(int(teachers.sum()))
    last = samples[0].last.new_empty((int(teachers.sum()), samples[0].last.shape[1]))
    done = 0
    for sample, start, stop in zip(samples, starts, starts[1:], strict=False):
        needed = np.flatnonzero(teachers[start:stop])
        kept = sample.last_index.numpy()
        at = np.searchsorted(kept, needed)
        if len(needed) and (at[-1] >= len(kept) or not np.array_equal(kept[at], needed)):
            hint = "this mask needs a store with `last: all`; the serving rule does not"
            raise ConfigError("no state of the target at a position that teaches", f"row {sample.row}", hint)
        _take_rows(sample.last, at, last[done : done + len(at)])
        done += len(at)
    return teacher_at, last


def _take_rows(states: Tensor, at: _Ints, out: Tensor) -> None:
    """out[i] = states[at[i]] by this thread alone: torch would wake a team of threads for each reader."""
    states_LB, out_MB = (rows.view(torch.uint8).numpy() for rows in (states.contiguous(), out))
    np.take(states_LB, at, axis=0, out=out_MB, mode="clip")  # any other mode copies to a buffer first


def _side_by_side(parts: Sequence[Tensor], size: int) -> Tensor:
    """Tensors [T, ...] one after another in one of [size, ...], zeros after them."""
    shape = (size, *parts[0].shape[1:])
    if (out := _lie_side_by_side(parts, shape)) is None:
        out = torch.empty(shape, dtype=parts[0].dtype)
        torch.cat(list(parts), out=out[: sum(len(part) for part in parts)])
    out[sum(len(part) for part in parts) :] = 0
    return out


def _lie_side_by_side(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor | None:
    """The tensor of this shape that begins with `parts`, where a reader has put them into one: nothing is copied."""
    first, at = parts[0], parts[0].data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != at:
            return None
        at += part.nbytes
    memory, nbytes = first.untyped_storage(), int(np.prod(shape, dtype=np.int64)) * first.element_size()
    if first.data_ptr() + nbytes > memory.data_ptr() + len(memory):
        return None  # no room for the padding, or neighbours by chance
    return first.as_strided(shape, torch.empty(shape, device="meta").stride())


def _key_spans(rows: _Ints, document_starts: _Ints) -> tuple[tuple[int, int], ...]:
    edges = np.arange(0, len(rows), BLOCK)
    if not len(edges):
        return ()
    lows, highs = np.minimum.reduceat(document_starts, edges), np.maximum.reduceat(rows, edges) + 1
    return tuple(zip(lows.tolist(), highs.tolist(), strict=True))
