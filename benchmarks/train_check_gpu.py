"""Is the training step on this GPU the step that the tests prove on a CPU? Exits with 1 if it is not.

    python benchmarks/train_check_gpu.py --out train-check.json       (a GPU; on a CPU it rehearses, uncompiled)

The tests compare the SDPA path with a plain float64 reference, loss and all gradients. Here that path, in float64 and
uncompiled, is what the compiled flex path is compared with, on batches of many blocks and of other sizes:

    float32   loss within 1e-5, every gradient within 1e-3 of its largest entry
    bf16      every gradient no further away (2-norm) than 1.5 times as far as the uncompiled SDPA path in bf16 is
    counts    what agrees, is right and is accepted: the same in float32, but for one row in a hundred
    graphs    no new one for another batch;   sync   no step waits for the device;   twice   the same bits again
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention
from training_batch import SHAPES, make

from eyas.train.batch import Batch, pack
from eyas.train.draft import Eagle3Draft
from eyas.train.loss import TeacherHead
from eyas.train.objective import Objective, ObjectiveOptions, StepReport, normaliser_of

_LLAMA_HEADS = replace(SHAPES["tiny"].draft, hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=128)
DRAFTS = {
    "grouped, 128 wide": _LLAMA_HEADS,
    "64 wide, one key a head": replace(_LLAMA_HEADS, num_kv_heads=8, head_dim=64),
    "fc_norm and norm_output": replace(_LLAMA_HEADS, fc_norm=True, norm_output=True, head_dim=64),
}
STEPS = 7
PARTS = ("float32", "bf16")


class Check:
    """One kind of draft over some batches."""

    def __init__(self, name: str, device: str) -> None:
        self.config, self.device = DRAFTS[name], device
        made = [make(self.config, 1, size, share, seed=s) for s, (size, share) in enumerate(((1024, 0.6), (1024, 0.9)))]
        self.made = made[0]
        self.batches = [pack(m.samples(), steps=STEPS, budget=1152) for m in made]
        self.batches.append(pack(made[0].samples()[1:], steps=STEPS, budget=1152))
        self.draft = Eagle3Draft(self.config, self.made.embeddings.float(), torch.Generator().manual_seed(0))

    def objective(self, dtype: torch.dtype, *, flex: bool) -> Objective:
        """The draft is the same one: cast it first."""
        options = ObjectiveOptions(
            attention="flex" if flex else "sdpa", dtype=dtype, compile=flex and self.device == "cuda"
        )
        head = TeacherHead(self.made.head[self.made.draft_ids])
        return Objective(self.draft, head, self.made.draft_ids, options).to(self.device)

    def step(self, objective: Objective, batch: Batch) -> tuple[StepReport, dict[str, Tensor]]:
        self.draft.zero_grad(set_to_none=True)
        moved = batch.to(self.device)
        report = objective(moved, normaliser_of([batch]))
        report.loss.backward()
        return report, {n: p.grad.double().cpu() for n, p in self.draft.named_parameters() if p.grad is not None}

    def run(self, parts: list[str]) -> dict[str, Any]:
        self.draft.double()
        exact = self.objective(torch.float64, flex=False)
        wanted = [self.step(exact, batch) for batch in self.batches]
        self.draft.float()
        found: dict[str, Any] = {"rows": [batch.counts for batch in self.batches]}
        if "float32" in parts:
            found |= self._float32(wanted)
        if "bf16" in parts:
            found |= self._bf16(wanted)
        return found

    def _float32(self, wanted: list[tuple[StepReport, dict[str, Tensor]]]) -> dict[str, Any]:
        objective = self.objective(torch.float32, flex=True)
        loss, gradient, miscounted = 0.0, 0.0, 0.0
        for batch, (report, gradients) in zip(self.batches, wanted, strict=True):
            got, mine = self.step(objective, batch)
            assert mine.keys() == gradients.keys()
            loss = max(loss, abs(got.loss.item() / report.loss.item() - 1))
            gradient = max(gradient, *(_largest(mine[n], g) for n, g in gradients.items()))
            pairs = ((got.agreed, report.agreed), (got.right, report.right), (got.accepted, report.accepted))
            miscounted = max(miscounted, *(_share(a, b, got.counted) for a, b in pairs))
        return {
            "float32_loss": loss,
            "float32_gradient": gradient,
            "float32_miscounted": miscounted,
            "float32_passed": loss < 1e-5 and gradient < 1e-3 and miscounted <= 0.01,
        }

    def _bf16(self, wanted: list[tuple[StepReport, dict[str, Tensor]]]) -> dict[str, Any]:
        plain, compiled = (self.objective(torch.bfloat16, flex=flex) for flex in (False, True))
        worst, far = 0.0, 0.0
        counters.clear()
        graphs = []
        for batch, (_, gradients) in zip(self.batches, wanted, strict=True):
            _, by_plain = self.step(plain, batch)
            _, mine = self.step(compiled, batch)
            graphs.append(counters["stats"]["unique_graphs"])
            for name, gradient in gradients.items():
                error, theirs = _distance(mine[name], gradient), _distance(by_plain[name], gradient)
                worst, far = max(worst, error / max(theirs, 1e-4)), max(far, error)
        once, twice = (self.step(compiled, self.batches[0])[1] for _ in range(2))
        same = all(torch.equal(once[name], twice[name]) for name in once)
        return {
            "bf16_gradient": far,
            "bf16_gradient_to_plain": worst,
            "bf16_passed": worst < 1.5,
            "graphs": graphs,
            "graphs_passed": graphs[0] == graphs[-1],
            "twice_passed": same,
            "sync_passed": self._no_sync(compiled),
        }

    def _no_sync(self, objective: Objective) -> bool:
        """Whether forward and backward never wait for the device."""
        if self.device != "cuda":
            return True
        batch, normaliser = self.batches[1].to(self.device), normaliser_of([self.batches[1]])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            objective(batch, normaliser).loss.backward()
        except RuntimeError as error:
            print(f"waits for the device: {error}")
            return False
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return True


def _largest(mine: Tensor, wanted: Tensor) -> float:
    return ((mine - wanted).abs().max() / wanted.abs().max()).item()


def _distance(mine: Tensor, wanted: Tensor) -> float:
    return ((mine - wanted).norm() / wanted.norm()).item()


def _share(mine: Tensor, wanted: Tensor, of: Tensor) -> float:
    return ((mine - wanted.to(mine.device)).abs() / of.clamp(min=1)).max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--drafts", nargs="+", default=list(DRAFTS), choices=list(DRAFTS))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("highest")
    if device == "cpu":  # refuses gradients by this check alone; its uncompiled mathematics has them
        flex_attention._validate_device = lambda *_: None
        flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    results: dict[str, Any] = {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu, uncompiled"}
    results["torch"] = torch.__version__
    failed = False
    for name in args.drafts:
        torch._dynamo.reset()
        results[name] = Check(name, device).run(args.parts)
        failed |= not all(value for key, value in results[name].items() if key.endswith("passed"))
        print(name, json.dumps(results[name]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    print("FAILED" if failed else "passed")
    sys.exit(failed)


if __name__ == "__main__":
    main()
