"""Do stored states give the log-probabilities that the server gives? Pure: one row's numbers in, its verdict out.

The error of a position s is |log p(token[s + 1] | stored last[s]) - log p(token[s + 1]) of the server|, in nats. As in
`eyas.compare`, the row's median, its worst position but for strays and its worst stretch are bounded, and states that
must not match (controls) have to be told apart, or the row proves nothing and is counted as such.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

import torch

from eyas.compare import SEPARATION, Tolerance, worst_stretch
from eyas.store.reader import StoreRow

#: In nats. docs/verification.md has the measured values behind them.
TOLERANCE: Final = {
    "f32": Tolerance(median=5e-4, worst=5e-3),
    "f16": Tolerance(median=3e-2, worst=0.2, strays=0.02),
    "bf16": Tolerance(median=0.15, worst=0.6, strays=0.02),
    "fp8_e4m3": Tolerance(median=0.2, worst=1.2, strays=0.02),
}
#: Strays where a router picks experts: the server's own two runs pick other ones near ties.
ROUTED_STRAYS: Final = 0.1
SHORT: Final = 8  # with fewer positions a median is one or two single values, and is bounded like them
POSITIONS: Final = 2048  # of a row, spread evenly
CONTROL_POSITIONS: Final = 256
_UNEXPLAINED: Final = 0.1  # share of positions that the name of a fault need not explain
PRE_NORM_CONTROLS: Final = ("normed twice", "pre-norm")

LogProbs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`Head.log_probs`: states [L, H] and ids [L] -> [L] float32."""


class AuditKind(StrEnum):
    """What is wrong with a row's `last`, by name."""

    SHIFTED = "shifted-by-one"
    PRE_NORM = "pre-norm"
    ANOTHER_ROW = "another-row"
    LOGITS_DIFFER = "logits-differ"
    CONTROL_FITS = "control-fits"


@dataclass(frozen=True, slots=True)
class AuditProblem:
    """One finding: what, in which corpus row, in words."""

    kind: AuditKind
    row: int
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}, row {self.row}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Gap:
    """Error over a row's positions, in nats: the median, the worst but for the strays allowed, the worst stretch."""

    median: float
    bounded: float
    stretch: float

    @classmethod
    def of(cls, mine_P: torch.Tensor, served_P: torch.Tensor, strays: float) -> Gap:
        """P is at least 1. NaN is the worst of all."""
        error = (mine_P.double() - served_P.double()).abs()
        ranked = torch.where(error.isnan(), torch.inf, error).sort().values
        bounded = ranked[-1 - int(strays * len(ranked))]
        return cls(ranked[(len(ranked) - 1) // 2].item(), bounded.item(), worst_stretch(error))

    def within(self, tolerance: Tolerance) -> bool:
        """Whether most positions are right: what a control, or the name of a fault, is asked for."""
        return self.median <= tolerance.median and self.bounded <= tolerance.worst

    def within_everywhere(self, tolerance: Tolerance) -> bool:
        """Whether those that stray are scattered besides."""
        return self.within(tolerance) and self.stretch <= tolerance.worst


@dataclass(frozen=True, slots=True)
class ServedRow:
    """A stored row and what the server said of its tokens.

    Attributes:
        row: as stored; T tokens.
        log_probs: [T] float64: entry t is log p(token[t] | the tokens before it), entry 0 is NaN.
    """

    row: StoreRow
    log_probs: torch.Tensor

    def positions(self, most: int = POSITIONS) -> torch.Tensor:
        """Indices into `last` whose position has a next token: [P] ascending, at most `most`, spread evenly."""
        known = torch.nonzero(self.row.last_index < len(self.row.tokens) - 1)[:, 0]
        if len(known) <= most:
            return known
        return known[torch.linspace(0, len(known) - 1, most).round().long()]

    def gap(self, states_PH: torch.Tensor, at_P: torch.Tensor, head: LogProbs, strays: float) -> Gap:
        """Error of states that are to predict the tokens at positions `at_P`, each at least 1."""
        return Gap.of(head(states_PH, self.row.tokens.long()[at_P]).cpu(), self.log_probs[at_P], strays)


@dataclass(slots=True)
class Audit:
    """What the comparison with a server's log-probabilities found.

    Attributes:
        server: its URL.
        dtype: whose tolerance counts: the coarsest of store, engine and server.
        rows: corpus row numbers compared.
        positions: how many log-probabilities.
        median, worst: largest of any row, in nats; `worst` leaves out the strays the tolerance allows.
        nearest: for every control its smallest median of any row in which it could be told apart.
        told_apart, alike: for every control, rows in which it was, and rows in which it is too close to say.
        unjudged: rows that no control could be told from, or that keep no position with a next token.
        refused: corpus row -> why the server would not take it.
        problems: rows that are not what they should be.
        notes: what was not checked.
    """

    server: str
    dtype: str
    rows: list[int] = field(default_factory=list)
    positions: int = 0
    median: float = 0.0
    worst: float = 0.0
    nearest: dict[str, float] = field(default_factory=dict)
    told_apart: Counter[str] = field(default_factory=Counter)
    alike: Counter[str] = field(default_factory=Counter)
    unjudged: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    problems: list[AuditProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Auditor:
    """Judges rows one by one.

    Args:
        head: gives log-probabilities of states after the final norm.
        tolerance: what counts as equal, in nats.
        num_layers: of the target.
        layers: captured ones; where the last is among them the pre-norm state itself is a control.
        norm: the target's final norm; None leaves the controls of it out.
    """

    head: LogProbs
    tolerance: Tolerance
    num_layers: int
    layers: Sequence[int]
    norm: Callable[[torch.Tensor], torch.Tensor] | None = None

    def judge(self, served: ServedRow, others: Sequence[ServedRow], result: Audit) -> None:
        """Compare one row, with the other sampled rows as controls, and add to `result`."""
        row, chosen = served.row, served.positions()
        if not len(chosen):
            result.unjudged.append(row.row)
            return
        tolerance = self._bounds(len(chosen))
        at = row.last_index[chosen].long() + 1
        mine = self.head(row.last[chosen], row.tokens.long()[at]).cpu()
        right = Gap.of(mine, served.log_probs[at], tolerance.strays)
        result.rows.append(row.row)
        result.positions += len(chosen)
        result.median, result.worst = max(result.median, right.median), max(result.worst, right.bounded)
        if not right.within_everywhere(tolerance):
            result.problems.append(self._explained(served, others, right, (mine, at)))
            return
        informative = False
        for name, (places, states) in self._controls(served, others).items():
            tokens_at = row.last_index[places].long() + 1
            ids = row.tokens.long()[tokens_at]
            theirs = self.head(states, ids).cpu()
            bounds = self._bounds(len(places))
            # Judged by the stored states alone: can these two be told apart at all? One more, as they stray themselves.
            apart = Gap.of(theirs, self.head(row.last[places], ids).cpu(), bounds.strays)
            if apart.median <= (SEPARATION + 1) * bounds.median:
                result.alike[name] += 1
                continue
            informative |= name not in PRE_NORM_CONTROLS
            away = Gap.of(theirs, served.log_probs[tokens_at], bounds.strays)
            result.told_apart[name] += 1
            result.nearest[name] = min(result.nearest.get(name, torch.inf), away.median)
            if away.within(bounds) or away.median <= SEPARATION * right.median:
                text = f"{name} fits as well as what is stored (median {away.median:.1e} nats)"
                result.problems.append(AuditProblem(AuditKind.CONTROL_FITS, row.row, text))
        if not informative:
            result.unjudged.append(row.row)

    def _bounds(self, positions: int) -> Tolerance:
        known = self.tolerance
        return known if positions >= SHORT else replace(known, median=known.worst)

    def _controls(
        self, served: ServedRow, others: Sequence[ServedRow]
    ) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """States that must not match: name -> the places in `last` they are put at [C], and the states [C, H]."""
        row, places = served.row, served.positions(CONTROL_POSITIONS)
        found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, step in (("the position before", -1), ("the position after", 1)):
            neighbour = (places + step).clamp(0, len(row.last_index) - 1)
            beside = row.last_index[neighbour] == row.last_index[places] + step
            if beside.any():
                found[name] = (places[beside], row.last[neighbour[beside]])
        if (other := _nearest_in_length(served, others)) is not None:
            shared = places[places < len(other.row.last)]
            if len(shared):
                found["another row"] = (shared, other.row.last[shared])
        if self.norm is not None:
            found["normed twice"] = (places, self.norm(row.last[places]))
        if self.num_layers - 1 in self.layers:
            column = list(self.layers).index(self.num_layers - 1)
            found["pre-norm"] = (places, row.aux[row.last_index[places].long(), column])
        return found

    def _explained(
        self,
        served: ServedRow,
        others: Sequence[ServedRow],
        right: Gap,
        measured: tuple[torch.Tensor, torch.Tensor],
    ) -> AuditProblem:
        """A mismatch, by the name of the fault that would explain it."""
        row, strays = served.row, self.tolerance.strays
        for step, word in ((-1, "before"), (1, "after")):
            places = served.positions()
            at = row.last_index[places].long() + 1 + step
            inside = (at >= 1) & (at < len(row.tokens))
            if self._fits(served, row.last[places[inside]], at[inside]):
                return AuditProblem(AuditKind.SHIFTED, row.row, f"the states are those of the position {word}")
        places = served.positions()
        at = row.last_index[places].long() + 1
        if self.norm is not None and self._fits(served, self.norm(row.last[places]), at):
            return AuditProblem(AuditKind.PRE_NORM, row.row, "`last` is the state before the final norm")
        for other in others:
            inside = at < len(other.row.tokens)
            if other.row.row != row.row and self._fits(other, row.last[places[inside]], at[inside]):
                return AuditProblem(AuditKind.ANOTHER_ROW, row.row, f"the states are those of row {other.row.row}")
        mine, at = measured
        error = (mine.double() - served.log_probs[at]).abs()
        beyond = ~(error <= self.tolerance.worst)
        first = int(at[beyond][0]) - 1 if beyond.any() else int(at[0]) - 1
        text = (
            f"error median {right.median:.1e}, worst {right.bounded:.1e} nats of {self.tolerance.median:g} and "
            f"{self.tolerance.worst:g} (strays {strays:.0%}), worst stretch {right.stretch:.1e}; "
            f"{int(beyond.sum())} of {len(at)} positions beyond, the first is {first}"
        )
        return AuditProblem(AuditKind.LOGITS_DIFFER, row.row, text)

    def _fits(self, served: ServedRow, states_PH: torch.Tensor, at_P: torch.Tensor) -> bool:
        """Whether states would be right as predictions of the tokens at these positions; one alone may be by chance."""
        if len(at_P) < 2:
            return False
        # A shifted row has a state too many at one end, and a fault may cover but the most of it.
        strays = max(_UNEXPLAINED, self.tolerance.strays)
        return served.gap(states_PH, at_P, self.head, strays).within(self._bounds(len(at_P)))


def log_tolerance(dtype: str, routed: bool) -> Tolerance:
    """The bounds for the coarsest dtype involved, of a model with routed experts or without."""
    known = TOLERANCE[dtype]
    return replace(known, strays=ROUTED_STRAYS) if routed and known.strays else known


def _nearest_in_length(served: ServedRow, others: Sequence[ServedRow]) -> ServedRow | None:
    """Another sampled row to be mistaken for this one: of other tokens, and of the same length if there is one."""
    tokens = served.row.tokens
    candidates = [other for other in others if not torch.equal(other.row.tokens, tokens) and len(other.row.last)]
    return min(candidates, key=lambda other: abs(len(other.row.tokens) - len(tokens)), default=None)
