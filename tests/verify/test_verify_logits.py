"""The audit by log-probabilities against a server in process: right states pass, each fault is caught by its name."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import stamina
import torch
from audit_samples import LENGTHS, TruthfulServer, captured, damaged, make_corpus, write_store
from rich.console import Console
from safetensors.torch import load_file, save_file

from eyas.capture.contract import CaptureSpec
from eyas.compare import STRETCH
from eyas.config import load
from eyas.data.corpus import Corpus
from eyas.errors import ConfigError, EngineError, IntegrityError
from eyas.extract.hf import hidden_states
from eyas.store.reader import StoreReader
from eyas.target.checkpoint import Target
from eyas.verify import Audit, AuditKind, VerifyReport, verify
from eyas.verify.audit import Gap, log_tolerance
from eyas.verify.logits import audit_by_logits
from servers import free_port
from sglang_cpu.models import tiny_llama

RID_PREFIX = "eyas."


class World:
    """One tiny target, its server, a corpus and the right states."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = tiny_llama(folder / "model", layers=4, hidden_size=128)
        self.server = TruthfulServer(self.model)
        self.target = Target.load(str(self.model))
        self.corpus = make_corpus(folder / "corpus.parquet", self.model, self.target.vocab_size, LENGTHS)
        self.specs: dict[str, CaptureSpec] = {
            f"{last} {dtype}": self.target.spec((0, 2), last, dtype)
            for last in ("loss", "all")
            for dtype in ("f32", "bf16", "fp8_e4m3")
        }
        self.specs["with the last layer"] = self.target.spec((0, 3), "loss", "f32")
        self.counter = 0

    def store(self, change: str = "nothing", kind: str = "loss f32") -> Path:
        spec = self.specs[kind]
        dtype = torch.float32 if spec.dtype == "f32" else torch.bfloat16
        states = captured(self.server.network, self.corpus, spec, dtype)
        self.counter += 1
        path = self.folder / f"store-{self.counter}"
        return write_store(path, self.corpus, spec, damaged(states, change, self.pre_norm(spec)))

    def pre_norm(self, spec: CaptureSpec) -> Any:
        opened = Corpus.open(self.corpus)

        def of(row: int) -> torch.Tensor:
            tokens = next(iter(opened.rows(row, row + 1))).tokens.tolist()
            before, after = hidden_states(self.server.network, tokens, [spec.num_layers - 1])
            assert before[spec.num_layers - 1].shape == after.shape
            kept = StoreReader(self.right)[row].last_index.long() if spec.last == "loss" else slice(None)
            return before[spec.num_layers - 1][kept]

        return of

    @property
    def right(self) -> Path:
        path = self.folder / "right"
        if not path.exists():
            spec = self.specs["loss f32"]
            write_store(path, self.corpus, spec, captured(self.server.network, self.corpus, spec))
        return path

    def audit(self, store: Path, server: TruthfulServer | None = None, **options: Any) -> Audit:
        server = server or self.server
        model, sample = options.get("model", str(self.model)), options.get("sample", 0)
        cfg = load(overrides=options.get("overrides", []))
        console = Console(file=io.StringIO())
        return audit_by_logits(StoreReader(store), server.url, model, sample, cfg, console, server.transport)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def kinds(audit: Audit) -> dict[int, AuditKind]:
    return {problem.row: problem.kind for problem in audit.problems}


@pytest.mark.parametrize(
    "kind", ["loss f32", "all f32", "loss bf16", "all bf16", "loss fp8_e4m3", "with the last layer"]
)
def test_right_states_pass_and_every_control_is_told_apart(world: World, kind: str) -> None:
    audit = world.audit(world.store(kind=kind))
    assert audit.problems == []
    trained = {0: 37, 1: 61, 2: 61, 3: 61, 4: 87, 6: 127}  # of the row of 3 tokens none has a next one
    with_next = {0: 39, 1: 63, 2: 63, 3: 63, 4: 89, 5: 2, 6: 129}
    expected = with_next if "all" in kind else trained
    assert (audit.rows, audit.positions) == (list(expected), sum(expected.values()))
    # To a random target of this width the shifts are nearer than fp8 can tell: another row alone is a control.
    assert audit.unjudged == ([] if kind == "all f32" else [1, 5, 6] if "fp8" in kind else [5])
    names = {"another row"} if "fp8" in kind else {"the position before", "the position after", "another row"}
    # The norm's weights are near one in this target: twice is too near once for anything but f32.
    if world.specs[kind].dtype == "f32":
        names |= {"normed twice"}
    if kind == "with the last layer":
        names |= {"pre-norm"}
    assert set(audit.nearest) == names
    assert audit.dtype == world.specs[kind].dtype


@pytest.mark.parametrize("kind", ["loss f32", "all f32", "loss bf16", "loss fp8_e4m3"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("swapped", {1: AuditKind.ANOTHER_ROW, 2: AuditKind.ANOTHER_ROW}),
        ("shifted late", {3: AuditKind.SHIFTED}),
        ("shifted early", {3: AuditKind.SHIFTED}),
        ("pre-norm", dict.fromkeys([0, 1, 2, 3, 4, 6], AuditKind.PRE_NORM)),
        ("last chunk doubled", {4: AuditKind.LOGITS_DIFFER}),
        ("one chunk of another row", {4: AuditKind.LOGITS_DIFFER}),
        ("zeros", {0: AuditKind.LOGITS_DIFFER}),
    ],
)
def test_each_fault_behind_honest_checksums_is_caught_by_name(
    world: World, kind: str, change: str, expected: dict[int, AuditKind]
) -> None:
    store = world.store(change, kind)
    report = verify(store, corpus=world.corpus, console=Console(file=io.StringIO()))
    assert report.problems == (), "the bytes and the identity are as they should be"
    report.audit = world.audit(store)
    found = kinds(report.audit)
    found.pop(5, None)  # two positions, kept by `all` alone
    if "chunk" in change and "fp8" in kind:  # most positions are right, and normed twice they still are, for fp8
        expected = dict.fromkeys(expected, found[4])
    assert found == expected
    with pytest.raises(IntegrityError, match=str(next(iter(expected.values())))):
        report.check()


@pytest.mark.parametrize("length", [64, 400, 3000])
@pytest.mark.parametrize(("dtype", "routed"), [("bf16", False), ("bf16", True), ("f16", True)])
def test_strays_are_scattered_and_a_wrong_chunk_is_not_one_of_them(length: int, dtype: str, routed: bool) -> None:
    """As many wrong positions as may stray: here and there they pass, in one stretch they do not."""
    tolerance = log_tolerance(dtype, routed)
    served = -3 * torch.rand(length, generator=torch.Generator().manual_seed(0)).double()
    count = int(tolerance.strays * length)
    scattered, stretch = served.clone(), served.clone()
    scattered[torch.linspace(0, length - 1, count).long()] -= 4
    stretch[-count:] -= 4
    assert Gap.of(scattered, served, tolerance.strays).within_everywhere(tolerance)
    gap = Gap.of(stretch, served, tolerance.strays)
    assert gap.within(tolerance)
    assert gap.within_everywhere(tolerance) is (count <= STRETCH // 2)


def test_a_fault_of_the_captured_layers_alone_is_not_seen(world: World) -> None:
    """The limit that the documentation states."""
    store = world.store("aux only")
    assert world.audit(store).problems == []
    report = verify(store, against=str(world.model), sample=0, console=Console(file=io.StringIO()))
    assert report.comparison is not None
    assert report.comparison.mismatches


def test_the_server_is_asked_as_a_stranger_and_once_a_row(world: World) -> None:
    server = TruthfulServer(world.model)
    world.audit(world.right, server)
    rids = [body["rid"] for body in server.asked]
    assert len(set(rids)) == len(LENGTHS)
    assert not any(rid.startswith(RID_PREFIX) for rid in rids)
    assert "custom_params" not in server.asked[0]["sampling_params"]


def test_a_sample_is_spread_over_the_store(world: World) -> None:
    assert world.audit(world.right, sample=2).rows == [0, 6]


def test_another_model_of_the_same_shape_differs_in_every_row(world: World, tmp_path: Path) -> None:
    other = TruthfulServer(tiny_llama(tmp_path / "other", layers=4, hidden_size=128, seed=5))
    audit = world.audit(world.right, other)
    assert set(kinds(audit).values()) == {AuditKind.LOGITS_DIFFER}
    report = VerifyReport(world.right, 7, 0, (), audit=audit)
    with pytest.raises(IntegrityError, match="the very model"):
        report.check()


def test_a_server_that_halves_precision_is_measured_by_its_own_measure(world: World) -> None:
    for settings in ({"dtype": "bfloat16"}, {"dtype": "auto"}, {"dtype": "float32", "quantization": "fp8"}, None):
        assert world.audit(world.right, TruthfulServer(world.model, settings=settings)).dtype == "bf16"
    assert world.audit(world.right, TruthfulServer(world.model, settings={"dtype": "half"})).dtype == "f16"


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_no_number_is_never_right(world: World, value: float) -> None:
    def entries(given: list[Any]) -> list[Any]:
        return given if len(given) != 90 else [given[0], *([value, *entry[1:]] for entry in given[1:])]

    audit = world.audit(world.right, TruthfulServer(world.model, entries=entries))
    assert kinds(audit) == {4: AuditKind.LOGITS_DIFFER}


def test_a_row_too_long_for_the_server_is_told_and_the_rest_is_compared(world: World) -> None:
    def answers(body: dict[str, Any]) -> httpx.Response | None:
        text = "The input (130 tokens) is longer than the model's context length (100 tokens)."
        return httpx.Response(400, json={"error": {"message": text}}) if len(body["input_ids"]) > 100 else None

    audit = world.audit(world.right, TruthfulServer(world.model, answers=answers))
    assert list(audit.refused) == [6]
    assert "row-too-long" in audit.refused[6]
    assert (audit.rows, audit.problems) == ([0, 1, 2, 3, 4], [])
    assert "row 6, row-too-long" in text_of(VerifyReport(world.right, 7, 0, (), audit=audit))


def test_a_sample_that_proves_nothing_says_so(world: World, tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "short.parquet", world.model, world.target.vocab_size, [3, 3])
    spec = world.specs["loss f32"]
    store = write_store(tmp_path / "store", corpus, spec, captured(world.server.network, corpus, spec))
    audit = world.audit(store)
    assert (audit.rows, audit.unjudged) == ([], [0, 1])
    assert "no sampled row can be told" in text_of(VerifyReport(store, 2, 0, (), audit=audit))


def text_of(report: VerifyReport) -> str:
    return "\n".join(f"{name} {line}" for name, line in report.lines())


def test_a_busy_server_is_asked_again(world: World) -> None:
    seen: set[int] = set()

    def answers(body: dict[str, Any]) -> httpx.Response | None:
        first = len(body["input_ids"]) not in seen
        seen.add(len(body["input_ids"]))
        return httpx.Response(429, json={"error": "The request queue is full."}) if first else None

    with stamina.set_testing(True, attempts=5, cap=True):
        audit = world.audit(world.right, TruthfulServer(world.model, answers=answers))
    assert (len(audit.rows), audit.problems) == (6, [])


def lost(_: dict[str, Any]) -> httpx.Response:
    raise httpx.ReadError("gone")


def small_vocabulary(body: dict[str, Any]) -> Any:
    """SGLang's words where its vocabulary lacks the target's last id."""
    (token,) = body["sampling_params"]["logit_bias"]
    return {"error": {"message": f"logit_bias must has keys in [0, {int(token) - 1}], got {token}."}}


TOO_LONG = {"error": {"message": "is longer than the model's context length"}}
ABORTED = {"meta_info": {"finish_reason": {"type": "abort", "message": "Out of memory"}}}


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ({"entries": lambda _: None}, "gives no prompt log-probabilities"),
        ({"entries": lambda _: []}, "gives no prompt log-probabilities"),
        ({"entries": lambda _: [None, 3]}, "cannot be read"),
        ({"entries": lambda given: [[None, *entry[1:]] for entry in given]}, "cannot be read"),
        ({"entries": lambda given: given[:-1]}, "are of other tokens"),
        ({"entries": lambda given: [[entry[0], 7] for entry in given]}, "are of other tokens"),
        ({"answers": lambda _: httpx.Response(200, json=[1])}, "gives no prompt log-probabilities"),
        ({"answers": lambda _: httpx.Response(200, text="<html>")}, "gives no prompt log-probabilities"),
        ({"answers": lambda _: httpx.Response(400, json={"error": "bad input"})}, "refuses a row"),
        ({"answers": lambda body: httpx.Response(400, json=small_vocabulary(body))}, "runs another model"),
        ({"answers": lambda _: httpx.Response(400, json=TOO_LONG)}, "none of the sampled rows"),
        ({"answers": lambda _: httpx.Response(503, text="no")}, "gave no log-probabilities"),
        ({"answers": lambda _: httpx.Response(200, json=ABORTED)}, "gave no log-probabilities"),
        ({"answers": lost}, "gave no log-probabilities"),
        ({"info": {"architectures": ["Qwen3ForCausalLM"]}}, "runs another model"),
        ({"info": {"is_generation": False}}, "generates nothing"),
        ({"api_key": "secret"}, "refuses us"),
    ],
)
def test_a_server_that_cannot_be_used_is_one_clear_error(world: World, fault: dict[str, Any], what: str) -> None:
    with stamina.set_testing(True, attempts=3), pytest.raises(EngineError, match=what) as error:
        world.audit(world.right, TruthfulServer(world.model, **fault))
    assert "\n" not in str(error.value)


def test_no_server_is_one_clear_error(world: World) -> None:
    console = Console(file=io.StringIO())
    with pytest.raises(EngineError, match="no server"):
        verify(world.right, logits=f"http://127.0.0.1:{free_port()}", model=str(world.model), console=console)


def test_the_key_goes_along(world: World) -> None:
    server = TruthfulServer(world.model, api_key="secret")
    assert world.audit(world.right, server, overrides=["server.api_key=secret"]).problems == []


def checkpoint(world: World, out: Path, **tensors: torch.Tensor | None) -> Path:
    """The target's folder with other tensors; None removes one."""
    shutil.copytree(world.model, out)
    held = {**load_file(out / "model.safetensors"), **{name.replace("__", "."): t for name, t in tensors.items()}}
    save_file({name: t for name, t in held.items() if t is not None}, out / "model.safetensors", {"format": "pt"})
    return out


def test_a_checkpoint_without_lm_head_is_one_clear_error(world: World, tmp_path: Path) -> None:
    bare = checkpoint(world, tmp_path / "bare", lm_head__weight=None)
    with pytest.raises(ConfigError, match="no lm_head") as error:
        world.audit(world.right, model=str(bare))
    assert "--target" in error.value.hint


def test_a_checkpoint_of_another_model_is_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"another model.*layers 5, in the store 4"):
        world.audit(world.right, model=str(tiny_llama(tmp_path / "deeper", layers=5, hidden_size=128)))
    tuned = checkpoint(world, tmp_path / "tuned", model__norm__weight=torch.full((128,), 2.0))
    with pytest.raises(ConfigError, match=r"another model.*fingerprint"):
        world.audit(world.right, model=str(tuned))


def test_one_shard_of_the_checkpoint_is_enough(world: World, tmp_path: Path) -> None:
    model = world.server.network
    model.save_pretrained(tmp_path / "part", max_shard_size="200KB")
    files = json.loads((tmp_path / "part" / "model.safetensors.index.json").read_text())["weight_map"]
    for file in set(files.values()) - {files["lm_head.weight"]}:
        (tmp_path / "part" / file).unlink()
    audit = world.audit(world.right, model=str(tmp_path / "part"))
    assert (len(audit.rows), audit.problems) == (6, [])
    assert any("fingerprint" in note for note in audit.notes)
    assert any("final norm" in note for note in audit.notes)


def test_a_hub_model_that_is_not_here_is_one_clear_error(world: World) -> None:
    with pytest.raises(ConfigError, match="no such folder or hub model"):
        world.audit(world.right, model="nobody/nothing")


def test_without_a_model_the_flag_is_named(world: World) -> None:
    with pytest.raises(ConfigError, match="lm_head") as error:
        verify(world.right, logits="http://127.0.0.1:1")
    assert "--target" in error.value.hint


def test_rows_that_say_nothing_are_counted(world: World, tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "short.parquet", world.model, world.target.vocab_size, [3, 4, 5])
    spec = world.specs["loss f32"]
    store = write_store(tmp_path / "store", corpus, spec, captured(world.server.network, corpus, spec))
    audit = world.audit(store)
    assert audit.problems == []
    assert audit.unjudged == [0]  # of 3 tokens, one trained: no position has a trained next token
    assert "unjudged 1 rows" in text_of(VerifyReport(store, 3, 0, (), audit=audit))
