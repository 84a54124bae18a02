"""The exported folder: whole or not at all, the same bytes every time, from heads of any layout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from export_heads import Raw, Tensors, changed, foreign, make_store
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig

from eyas.config import ExportConfig
from eyas.errors import ConfigError, IntegrityError, StoreError
from eyas.export.check import check_draft
from eyas.export.probe import PROBE, Probe
from eyas.export.run import export_draft
from eyas.train.layer_ids import KEY

Copy = Callable[[], Path]
FEW = ExportConfig(documents=8)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_twice_the_same_bytes(run: Path, tmp_path: Path) -> None:
    """Whether the run or its draft is named, and wherever it goes."""
    first = export_draft(run, tmp_path / "a" / "first", FEW)
    second = export_draft(run / "draft", tmp_path / "second", FEW)
    assert contents(first.folder) == contents(second.folder)
    assert contents(first.folder).keys() == {
        *("README.md", "config.json", "generation_config.json", "model.safetensors", PROBE)
    }
    assert first.bytes == sum(map(len, contents(first.folder).values()))
    # safetensors writes for the owner alone, and a server may run as another user.
    before = os.umask(0)
    os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in first.folder.rglob("*") if path.is_file()}
    assert modes == {0o666 & ~before}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "second"]


def test_what_servers_find(exported: Path, run: Path, target: Path) -> None:
    config = AutoConfig.from_pretrained(exported)
    assert isinstance(config, LlamaConfig)
    assert config.architectures == ["LlamaForCausalLMEagle3"]
    assert json.loads((exported / "generation_config.json").read_text()) == json.loads(
        (target / "generation_config.json").read_text()
    )
    held, trained = load_file(exported / "model.safetensors"), load_file(run / "draft" / "model.safetensors")
    assert held.keys() == trained.keys()
    assert {tensor.dtype for tensor in held.values()} == {torch.float32, torch.int64, torch.bool}
    assert all(torch.equal(held[name], trained[name].to(held[name].dtype)) for name in held)
    # Every *.safetensors beside config.json would be loaded as weights: the probe is not among them.
    assert [path.name for path in exported.glob("*.safetensors")] == ["model.safetensors"]


def test_the_probe_is_of_rows_held_out(exported: Path) -> None:
    probe = Probe.load(exported / PROBE)
    assert probe.held_out
    assert sum(len(document.tokens) for document in probe.documents) <= 512
    assert probe.rows > 100
    assert probe.to_bytes() == (exported / PROBE).read_bytes()


def test_the_model_card(exported: Path, run: Path, target: Path, tmp_path: Path) -> None:
    text = (exported / "README.md").read_text()
    assert "to be stated by the publisher" in text
    assert "--speculative-algorithm EAGLE3 --speculative-draft-model-path path/to/this/folder" in text
    assert """vllm serve target --speculative-config '{"method": "eagle3", "model": "path/to/this/folder",""" in text
    assert "| corpus | 360 rows, 10,800 tokens, digest `" in text
    assert "| held-out rows | all | in training | 3 |" in text
    assert f"| eyas | {version('eyas')} |" in text
    assert str(target) not in text  # nobody's business
    evaluation: Raw = {
        "head": "x", "engine": "transformers", "mode": "offline-decoded", "benchmark": "mt_bench", "depth": 3,
        "results": [
            {"category": "writing", "accept_length": 1.75, "ci95": [1.5, 2.0], "accept_by_position": [0.5, 0.4, 0.3]},
            {"category": "math", "accept_length": None, "ci95": None, "accept_by_position": []},
        ],
    }  # fmt: skip
    again = tmp_path / "run"
    again.mkdir()
    for part in ("draft", "events"):
        shutil.copytree(run / part, again / part)
    for path in (again / "events").iterdir():  # of a version that logged less
        path.write_text(path.read_text().replace("accept_length_low", "lower").replace('"acceptance"', '"a"'))
    (again / "evaluation-1.json").write_text(json.dumps(evaluation))
    (again / "evaluation-2.json").write_text("no json")
    export_draft(again, tmp_path / "out", FEW)
    row = "| mt_bench | writing | offline-decoded, transformers | 3 | 1.75 | 1.50 to 2.00 | 0.50 0.40 0.30 |"
    text = (tmp_path / "out" / "README.md").read_text()
    assert row in text
    assert re.search(r"\| held-out rows \| all \| in training \|  \| \d\.\d\d \|  \|  \|", text)


# --- what is in the way -----------------------------------------------------------------------------------------------


def test_a_folder_that_is_there_stays(run: Path, exported: Path, tmp_path: Path) -> None:
    out = shutil.copytree(exported, tmp_path / "out")
    (out / "mine.txt").write_text("x")
    before = contents(out)
    with pytest.raises(ConfigError, match="--force replaces it"):
        export_draft(run, out)
    assert contents(out) == before
    export_draft(run, out, FEW, force=True)
    assert "mine.txt" not in contents(out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_no_draft_is_never_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("thesis", "file"):
        with pytest.raises(ConfigError, match="something else is in the way"):
            export_draft(run, tmp_path / name, force=True)
    with pytest.raises(ConfigError, match="over itself"):
        export_draft(run, run / "draft", force=True)
    (tmp_path / "empty").mkdir()
    assert export_draft(run, tmp_path / "empty", FEW).folder.is_dir()


def test_what_a_killed_export_left(run: Path, exported: Path, tmp_path: Path) -> None:
    """Killed while it was written, and between the two renames of --force; another process's own stays."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    shutil.copytree(exported, tmp_path / f".out.{gone.pid}.old")
    for name in (f".out.{gone.pid}.tmp", f".out.{os.getppid()}.tmp", ".out.mine.tmp"):
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match="--force replaces it"):
        export_draft(run, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(exported)
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.mine.tmp", f".out.{os.getppid()}.tmp"}


def test_a_disk_that_takes_nothing(run: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        (tmp_path / "file").write_text("x")
        with pytest.raises(StoreError, match="file"):
            export_draft(run, tmp_path / "file" / "out")
        return
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="no permission"):
        export_draft(run, tmp_path / "out")


def test_what_the_check_refuses_gets_no_name(run: Path, tmp_path: Path) -> None:
    """A head whose layers lie in another order: it does better on others than servers would give it."""

    def swapped(held: Tensors) -> Tensors:
        return held | {"fc.weight": torch.cat(held["fc.weight"].chunk(3, 1)[::-1], 1).contiguous()}

    spoilt = tmp_path / "run"
    shutil.copytree(run / "draft", spoilt / "draft")
    shutil.copytree(run / "events", spoilt / "events")
    changed(spoilt / "draft", tensors=swapped)
    with pytest.raises(IntegrityError, match=r"in the order \[3, 2, 1\]"):
        export_draft(spoilt, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(("value", "dtype"), [(torch.nan, "bf16"), (1e6, "f16")])
def test_values_that_are_no_numbers(value: float, dtype: Any, run: Path, tmp_path: Path) -> None:
    """Or are none in the dtype of the export."""

    def spoilt(held: Tensors) -> Tensors:
        held["fc.weight"] = held["fc.weight"].float()
        held["fc.weight"][0, 0] = value
        return {name: t.float() if t.is_floating_point() else t for name, t in held.items()}

    head = changed(shutil.copytree(run / "draft", tmp_path / "draft"), tensors=spoilt)
    name = json.loads((next((run / "events").glob("*.jsonl"))).read_text().splitlines()[0])["settings"]["target"]
    with pytest.raises(ConfigError, match="no numbers"):
        export_draft(head, tmp_path / "out", ExportConfig(target=name, dtype=dtype))


# --- heads of others --------------------------------------------------------------------------------------------------


def speculators(raw: Raw) -> Raw:
    layer = {key: value for key, value in raw.items() if key not in ("draft_vocab_size", "eagle_config", KEY, "eyas")}
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "norm_before_residual": False,
        "draft_vocab_size": raw["draft_vocab_size"],
        KEY: [2, 4, 5],
        "transformer_layer_config": layer,
    }


def specforge(raw: Raw) -> Raw:
    """Only what a peer must say, ids where SGLang reads them."""
    keys = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
        *("draft_vocab_size", "rms_norm_eps", "max_position_embeddings"),
    )
    return {key: raw[key] for key in keys} | {"eagle_config": {KEY: [1, 3, 4]}}


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("config", "old", "new"),
    [(speculators, "midlayer.", "layers.0."), (specforge, "midlayer.", "midlayer."), (specforge, "", "")],
    ids=["speculators", "SpecForge", "EAGLE"],
)
def test_heads_of_others(
    config: Callable[[Raw], Raw], old: str, new: str, exported: Path, target: Path, store: Path, tmp_path: Path
) -> None:
    head = shutil.copytree(exported, tmp_path / "head")
    foreign(head)
    changed(head, config, lambda held: {name.replace(old, new): tensor for name, tensor in held.items()})
    if not old:
        pickled(head)
    with pytest.raises(IntegrityError):
        check_draft(head, ExportConfig(target=str(target))).check()  # as it is, not both servers load it rightly
    cfg = ExportConfig(target=str(target), store=store, dtype="f32", documents=8)
    report = export_draft(head, tmp_path / "out", cfg).report
    report.check()
    assert {name: data for name, data in contents(tmp_path / "out").items() if name == "model.safetensors"} == {
        "model.safetensors": (exported / "model.safetensors").read_bytes()
    }
    check_draft(tmp_path / "out", ExportConfig(target=str(target))).check()
    assert "the weights were imported" in (tmp_path / "out" / "README.md").read_text()


def test_a_head_whose_ids_are_wrong_is_mended_by_naming_its_layers(
    exported: Path, target: Path, store: Path, tmp_path: Path
) -> None:
    head = foreign(shutil.copytree(exported, tmp_path / "head"))
    changed(head, lambda raw: raw | {"eagle_config": {KEY: [2, 4, 5]}, KEY: [3, 5, 6]})
    cfg = ExportConfig(target=str(target), store=store, documents=8)
    with pytest.raises(ConfigError, match=r"the store holds layers \[1, 3, 4\], the draft reads \[2, 4, 5\]"):
        export_draft(head, tmp_path / "out", cfg)
    export_draft(head, tmp_path / "out", cfg.model_copy(update={"aux_layers": (1, 3, 4)}))
    check_draft(tmp_path / "out", ExportConfig(target=str(target))).check()


def test_without_anything_to_try_it_on(exported: Path, target: Path, tmp_path: Path) -> None:
    """It goes without a probe, and says so, now and when it is checked."""
    head = foreign(shutil.copytree(exported, tmp_path / "head"))
    with pytest.raises(ConfigError, match="whose draft is this"):
        export_draft(head, tmp_path / "out")
    summary = export_draft(head, tmp_path / "out", ExportConfig(target=str(target)))
    assert [finding.name for finding in summary.report.unproven] == ["probe"]
    assert not (tmp_path / "out" / PROBE).exists()
    report = check_draft(tmp_path / "out", ExportConfig(target=str(target)))
    report.check()
    assert [finding.name for finding in report.unproven] == ["weights", "acceptance"]


def test_a_store_of_another_target(run: Path, target: Path, corpus: Path, tmp_path: Path) -> None:
    other = shutil.copytree(target, tmp_path / "other")
    held = load_file(other / "model.safetensors")
    held["model.norm.weight"] *= 2
    save_file(held, other / "model.safetensors", {"format": "pt"})
    store = make_store(corpus, tmp_path / "store", other)
    with pytest.raises(ConfigError, match="captured from another model"):
        export_draft(run, tmp_path / "out", ExportConfig(store=store))
