"""`eyas verify`: what can be known about a store, cheapest first.

structure, checksums, finiteness      from the store alone
identity                              tokens and masks against the corpus
values                                sampled rows recomputed by transformers, every captured layer and `last`,
                                      with controls (neighbouring layers, shifted rows) that must NOT match
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from eyas.capture.contract import CaptureSpec
from eyas.compare import Distance, Tolerance, distance, is_informative, rejects, tolerance_for
from eyas.config import ExtractConfig
from eyas.data.corpus import Corpus
from eyas.errors import ConfigError, IntegrityError
from eyas.extract.hf import hidden_states, load_model
from eyas.positions import kept_positions
from eyas.store.check import Problem, ProblemKind, verify_store
from eyas.store.documents import read_store_info
from eyas.store.format import Contents, RowContents, StoreInfo
from eyas.store.plan import Shard
from eyas.store.reader import StoreReader, StoreRow
from eyas.target.checkpoint import Target

LAST = "last"
_BROKEN = {ProblemKind.SIDECAR, ProblemKind.STRUCTURE, ProblemKind.UNREADABLE, ProblemKind.INDEX_HASH}
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")  # config keys of models with a router
_TORCH_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@dataclass(slots=True)
class Comparison:
    """Rows recomputed with transformers.

    Attributes:
        rows: how many were.
        worst: for every captured state (a layer's number, or `last`) its largest distance of any row.
        nearest: for every control (`3 as 2`: layer 3 where 2 is stored) its smallest distance of any row in which it
            could be told apart at all.
        told_apart, alike: for every control, rows in which it was, and rows in which it is too close to say.
        mismatches: states that are not what they should be, and controls that could not be told apart.
    """

    rows: int = 0
    worst: dict[str, Distance] = field(default_factory=dict)
    nearest: dict[str, Distance] = field(default_factory=dict)
    told_apart: Counter[str] = field(default_factory=Counter)
    alike: Counter[str] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)


@dataclass(slots=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        store: its folder.
        rows, failed: good rows, and rows recorded as failed.
        problems: what is wrong with the bytes.
        comparison: against the model, where asked for.
        corpus: what identity was compared with, where asked for.
        notes: what was not checked.
    """

    store: Path
    rows: int
    failed: int
    problems: tuple[Problem, ...]
    comparison: Comparison | None = None
    corpus: Path | None = None
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[tuple[str, str]]:
        """The closing table, name and text."""
        lines = [("rows", f"{self.rows:,} good, {self.failed:,} recorded as failed")]
        kinds = Counter(problem.kind for problem in self.problems)
        lines.append(
            ("bytes", ", ".join(f"{n} x {kind}" for kind, n in kinds.most_common()) or "all as they should be")
        )
        if self.corpus:
            lines.append(("identity", f"compared with {self.corpus}"))
        lines += [("problem", str(problem)) for problem in self.problems[:5]]
        if self.comparison:
            done = self.comparison
            lines.append(("against", f"{done.rows} rows recomputed, {len(done.mismatches)} mismatches"))
            for name, right in done.worst.items():
                near = [d.median for key, d in done.nearest.items() if key.endswith(f" as {name}")]
                text = f"error median {right.median:.1e} worst {right.worst:.1e}, cosine at least {right.cosine:.5f}"
                text += f"; nearest control {min(near):.1e}" if near else "; no control could be told apart"
                lines.append(("  last" if name == LAST else f"  layer {name}", text))
            if alike := done.alike.total():
                total = alike + done.told_apart.total()
                lines.append(
                    ("controls", f"{alike:,} of {total:,} are too close to say in this dtype (very short rows)")
                )
            lines += [("mismatch", text) for text in done.mismatches[:5]]
        return lines + [("not checked", note) for note in self.notes]

    def check(self) -> None:
        """Raises IntegrityError when anything is wrong."""
        mismatches = self.comparison.mismatches if self.comparison else []
        if found := len(self.problems) + len(mismatches):
            first = str(self.problems[0]) if self.problems else mismatches[0]
            unfinished = {ProblemKind.UNFINISHED, ProblemKind.MISSING, ProblemKind.MANIFEST}
            if not mismatches and {problem.kind for problem in self.problems} <= unfinished:
                hint = "the same extract command resumes"
                raise IntegrityError(f"the store is not finished: {first}", self.store, hint)
            raise IntegrityError(
                f"{found} problems, the first: {first}", self.store, "remove the shards named and run extract again"
            )


def verify(
    store: Path,
    *,
    corpus: Path | None = None,
    against: str | None = None,
    sample: int = 16,
    cfg: ExtractConfig | None = None,
    console: Console | None = None,
) -> VerifyReport:
    """Check a store.

    Args:
        store: its folder.
        corpus: compare tokens, masks and positions with this corpus, which must be the one the store was made from.
        against: a model's folder or hub id; sampled rows are recomputed with transformers in float32.
        sample: how many rows, spread evenly over the store; 0 is all.
        cfg: device and trust_remote_code for `against`.
        console: where progress goes.

    Raises:
        StoreError, ConfigError: the store, corpus or model cannot be read, or belong to another run.
    """
    console = console or Console(stderr=True)
    cfg = cfg or ExtractConfig()
    info = read_store_info(store)
    checked = verify_store(store, _contents(info, corpus) if corpus else None)
    report = VerifyReport(store, checked.rows, checked.failed, checked.problems, corpus=corpus)
    if corpus is None:
        report.notes.append("identity: name the --corpus")
    broken = {problem.kind for problem in checked.problems} & _BROKEN
    if against is not None and not broken:
        report.comparison = compare_with_model(StoreReader(store), against, sample, cfg, console)
    elif against is not None:
        report.notes.append("values: the bytes are not as they should be")
    else:
        report.notes.append("values: name the model with --against")
    return report


def _contents(info: StoreInfo, path: Path) -> Contents:
    """What the corpus says the rows are; refused when the store was made from another."""
    corpus, made_from = Corpus.open(path), info.corpus["digest"]
    if corpus.digest != made_from:
        raise ConfigError("the store was made from another corpus", path, f"digest {corpus.digest}, not {made_from}")

    def contents(shard: Shard) -> Iterator[RowContents]:
        for row in corpus.rows(shard.start, shard.stop):
            yield RowContents(row.tokens, row.loss_mask, kept_positions(row.loss_mask, info.spec.last))

    return contents


def compare_with_model(
    reader: StoreReader, model: str, sample: int, cfg: ExtractConfig, console: Console
) -> Comparison:
    """Recompute rows with transformers in float32 and compare every state, and every control.

    Raises:
        ConfigError: the model is not the one the store was captured from.
    """
    target = Target.load(model, trust_remote_code=cfg.trust_remote_code)
    spec = reader.spec
    theirs = target.spec(spec.layers, spec.last, spec.dtype)
    if theirs.model and theirs.model != spec.model:
        raise ConfigError("the store was captured from another model", model, f"fingerprint {spec.model} in the store")
    network = load_model(target, device=cfg.device, dtype="f32")
    tolerance = tolerance_for(coarsest_dtype(reader), any(target.config.get(key) for key in _EXPERTS))
    rows = sample_rows(len(reader), sample)
    result = Comparison()
    for index in track(rows, "recomputing", console=console, disable=not console.is_terminal):
        row = reader[index]
        layers = sorted(
            {near for layer in spec.layers for near in (layer - 1, layer, layer + 1)} | {spec.num_layers - 1}
        )
        states, last = hidden_states(network, row.tokens.tolist(), [n for n in layers if n < spec.num_layers])
        compare_row(row, spec, tolerance, states, last, result)
    return result


def coarsest_dtype(reader: StoreReader) -> str:
    """The dtype that bounds what can be asked of the states: stored in, or computed in by any engine that wrote."""
    ran = {_TORCH_NAMES.get(provenance.get("dtype", "")) for provenance in reader.provenance}
    return next(dtype for dtype in ("bf16", "f16", "f32") if dtype in ran or dtype == reader.spec.dtype)


def compare_row(
    row: StoreRow,
    spec: CaptureSpec,
    tolerance: Tolerance,
    states: Mapping[int, torch.Tensor],
    last: torch.Tensor,
    result: Comparison,
) -> None:
    """Compare one stored row with recomputed states and add to `result`.

    Args:
        row: as stored.
        spec: the store's.
        tolerance: what counts as equal.
        states: recomputed outputs [T, H] of the captured layers, of their neighbours (-1 is the embedding's output),
            and of the last layer.
        last: recomputed state after the final norm, [T, H].
        result: is added to.
    """
    result.rows += 1
    for column, layer in enumerate(spec.layers):
        stored = row.aux[:, column]
        controls = {str(near): states[near] for near in (layer - 1, layer + 1) if near in states and near != layer}
        _compare(result, row, str(layer), stored, states[layer], controls, tolerance)
    kept = row.last_index.long()
    if len(kept):
        controls = {"pre-norm": states[spec.num_layers - 1][kept]}
        _compare(result, row, LAST, row.last, last[kept], controls, tolerance)


def _compare(
    result: Comparison,
    row: StoreRow,
    name: str,
    stored: torch.Tensor,
    reference: torch.Tensor,
    controls: Mapping[str, torch.Tensor],
    tolerance: Tolerance,
) -> None:
    right = distance(stored, reference, tolerance.strays)
    if not right.within(tolerance):
        result.mismatches.append(
            f"row {row.row}, {name}: error median {right.median:.1e}, worst {right.worst:.1e} of {tolerance}"
        )
    known = result.worst.get(name)
    result.worst[name] = right if known is None else _larger(known, right)
    shifted = {"shifted by one": reference.roll(1, 0)} if len(reference) > 1 else {}
    for control, states in {**controls, **shifted}.items():
        key = f"{control} as {name}"
        if not is_informative(states, reference, tolerance):
            result.alike[key] += 1
            continue
        away = distance(stored, states)
        result.told_apart[key] += 1
        if key not in result.nearest or away.median < result.nearest[key].median:
            result.nearest[key] = away
        if not rejects(away, right, tolerance):
            result.mismatches.append(f"row {row.row}: {control} cannot be told from {name} (error {away.median:.1e})")


def _larger(one: Distance, other: Distance) -> Distance:
    return Distance(
        max(one.median, other.median),
        max(one.worst, other.worst),
        max(one.bounded, other.bounded),
        min(one.cosine, other.cosine),
    )


def sample_rows(rows: int, sample: int) -> list[int]:
    """`sample` row numbers spread evenly over `rows`; all of them for 0."""
    if sample in (0, rows) or sample > rows:
        return list(range(rows))
    return sorted(set(np.linspace(0, rows - 1, sample).round().astype(int).tolist()))
