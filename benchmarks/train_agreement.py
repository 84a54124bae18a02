"""Our loss beside SpecForge's and speculators' own, from the same weights on the same batch, each in its conventions.

    python benchmarks/train_agreement.py --out agreement.json

                 rows that count     teacher's choice outside   loss      a step's sum is      weight of
                                     the draft vocabulary                 divided by           step k
    specforge    m[t+k]              dropped                    cross     B * T                0.8 ** k
                                                                entropy
    speculators  m[t+1+k]            kept                       KL        rows that count      1

Cross entropy is KL and the teacher's entropy, which is added to ours for SpecForge. Everything is float32 but for what
the peers compute otherwise. A row is one document, since SpecForge knows no others; the options of speculators that
plain EAGLE-3 lacks are off. Exits with 1 if the losses differ by more than one part in a thousand.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from peers.standins import prepare_peers
from peers.training import specforge_parts, speculators_parts
from torch import Tensor
from training_batch import SHAPES, Made, make

from eyas.train.batch import Batch, MaskRule, Sample, pack
from eyas.train.draft import Eagle3Draft
from eyas.train.loss import TeacherHead, teach
from eyas.train.objective import Objective, ObjectiveOptions, normaliser_of

STEPS, TOLERANCE = 7, 1e-3
CONFIG = SHAPES["tiny"].draft


def whole_rows(made: Made) -> list[Sample]:
    """Each row one document, with the states of all its positions."""
    every = torch.arange(made.tokens.shape[1])
    rows = zip(made.tokens, made.trained, made.aux.float(), made.last.float(), strict=True)
    return [Sample(i, *parts, every) for i, parts in enumerate(rows)]


def ours(
    draft: Eagle3Draft, made: Made, rule: MaskRule, device: str, *, drop: bool, decay: float
) -> tuple[float, float]:
    """Loss, and the part of it that the teacher's entropy would add."""
    outside = torch.ones(CONFIG.vocab_size, dtype=torch.bool)
    outside[made.draft_ids] = False
    head = TeacherHead(made.head[made.draft_ids].float(), outside=made.head[outside].float() if drop else None)
    options = ObjectiveOptions(step_decay=decay, oov="drop" if drop else "keep")
    batch = pack(whole_rows(made), steps=STEPS, mask=rule)
    normaliser = normaliser_of([batch], "classic" if rule == "classic" else "valid")
    report = Objective(draft, head, made.draft_ids, options).to(device)(batch.to(device), normaliser)
    return report.loss.item(), _entropy(batch, head, normaliser, decay) if drop else 0.0


def _entropy(batch: Batch, head: TeacherHead, normaliser: list[int], decay: float) -> float:
    teacher = teach(batch.last, head)
    assert teacher.kept is not None
    total = 0.0
    for k, n in enumerate(batch.counts):
        rows = batch.rows[:n] if batch.scored is None else batch.rows[:n][batch.scored[k, :n]]
        at = batch.teacher_at[rows + 1 + k]
        total -= decay**k / normaliser[k] * (teacher.plogp[at] * teacher.kept[at]).sum().item()
    return total


def load(model: torch.nn.Module, draft: Eagle3Draft, layer: str) -> None:
    """Our weights into a peer's model; every one of them has to have its place."""
    known = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            known[name.replace("midlayer.", layer)].copy_(parameter)


def with_specforge(draft: Eagle3Draft, made: Made, device: str) -> dict[str, float]:
    core, model, batch = specforge_parts(made, CONFIG, STEPS, device, torch.float32)
    load(model, draft, "midlayer.")
    with torch.no_grad():
        theirs = float(core.strategy.forward_loss(batch).loss)
    made.trained[:, -1] = False  # as its data preparation does
    loss, entropy = ours(draft, made, "classic", device, drop=True, decay=0.8)
    return {"theirs": theirs, "ours": loss + entropy, "kl": loss, "entropy": entropy}


def with_speculators(draft: Eagle3Draft, made: Made, device: str) -> dict[str, float]:
    model, batch, options = speculators_parts(made, CONFIG, STEPS, device, norms=False)
    load(model, draft, "layers.0.")
    floats: dict[str, Any] = {
        k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()
    }
    with torch.no_grad():
        _, theirs, _ = model(**floats, **options)
        # Its stores hold the state before the target's final norm, which it applies itself; ours hold the one after.
        normed = dataclasses.replace(made, last=model.verifier_norm(made.last.float().to(device)).cpu())
    loss, _ = ours(draft, normed, "shifted", device, drop=False, decay=1.0)
    return {"theirs": float(theirs), "ours": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peers", nargs="+", default=["specforge", "speculators"])
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("highest")
    prepare_peers(device)
    results: dict[str, dict[str, float]] = {}
    for peer in args.peers:
        made = make(CONFIG, 1, 128, 0.6, one=True)
        draft = Eagle3Draft(CONFIG, made.embeddings.float(), torch.Generator().manual_seed(3))
        found = (with_specforge if peer == "specforge" else with_speculators)(draft, made, device)
        results[peer] = found | {"relative": found["ours"] / found["theirs"] - 1}
        print(peer, results[peer], flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(any(abs(found["relative"]) > TOLERANCE for found in results.values()))


if __name__ == "__main__":
    main()
