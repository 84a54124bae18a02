"""Where an export is made: what is replaced, what never is, links and dots, and what a process before us left."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from eyas.config import ExportConfig
from eyas.errors import ConfigError
from eyas.export.run import export_draft

FEW = ExportConfig(documents=8, engines=("sglang",))
MADE = {"README.md", "config.json", "generation_config.json", "model.safetensors", "eyas"}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


CONFIGS = {
    "another model": '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}',
    "another architecture's text": '{"architectures": "LlamaForCausalLMEagle3"}',
    "no architectures": '{"model_type": "llama"}',
    "no object": "[]",
    "torn": '{"eyas": ',
    "no text": "\xff",
}


@pytest.mark.parametrize("config", CONFIGS)
def test_a_folder_with_a_config_is_not_yet_a_draft(config: str, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text(CONFIGS[config], encoding="latin-1")
    (out / "model.safetensors").write_text("weights")
    for force in (False, True):
        with pytest.raises(ConfigError, match="something else is in the way"):
            export_draft(run, out, FEW, force=force)
    assert (out / "model.safetensors").read_text() == "weights"


def test_the_target_is_never_replaced(run: Path, target: Path, tmp_path: Path) -> None:
    model = shutil.copytree(target, tmp_path / "model")
    with pytest.raises(ConfigError, match="something else is in the way"):
        export_draft(run, model, FEW, force=True)
    assert names(model) == names(target)


@pytest.mark.parametrize(
    "config", [{"architectures": ["LlamaForCausalLMEagle3"]}, {"eyas": {}}, {"speculators_model_type": "eagle3"}]
)
def test_a_draft_of_any_make_is_replaced_by_force(config: object, run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="--force replaces it"):
        export_draft(run, tmp_path / "out", FEW)
    assert names(export_draft(run, tmp_path / "out", FEW, force=True).folder) == MADE


def test_a_link_stays_and_what_it_leads_to_is_replaced(run: Path, exported: Path, tmp_path: Path) -> None:
    place = shutil.copytree(exported, tmp_path / "disk" / "draft")
    (tmp_path / "here").mkdir()
    link = tmp_path / "here" / "link"
    link.symlink_to(place)
    assert export_draft(run, link, FEW, force=True).folder == link
    assert link.readlink() == place
    assert "bfloat16" in (place / "config.json").read_text()  # the one before was of float32
    assert (names(tmp_path / "here"), names(tmp_path / "disk")) == ({"link"}, {"draft"})
    dangling = tmp_path / "here" / "dangling"
    dangling.symlink_to(tmp_path / "disk" / "new")
    export_draft(run, dangling, FEW)
    assert names(tmp_path / "disk" / "new") == MADE


def test_places_by_dots(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    with pytest.raises(ConfigError, match="something else is in the way"):
        export_draft(run, Path(".."), FEW)
    export_draft(run, Path(), FEW)
    assert names(tmp_path / "a" / "b") == MADE
    assert names(tmp_path / "a") == {"b"}


def test_places_that_cannot_be(run: Path, tmp_path: Path) -> None:
    """Refused before anything is tried."""
    (tmp_path / "round").symlink_to(tmp_path / "round")
    for out in (tmp_path / "round", tmp_path / ("n" * 300), Path("/")):
        said: list[str] = []
        with pytest.raises(ConfigError):
            export_draft(run, out, FEW, force=True, say=said.append)
        assert not said
    assert names(tmp_path) == {"round"}


@pytest.mark.parametrize("name", ["out", "out[1]*"])
def test_what_a_process_of_our_own_number_left(name: str, run: Path, exported: Path, tmp_path: Path) -> None:
    """In a container every export is process 1, and all that it left is from before."""
    left = shutil.copytree(exported, tmp_path / f".{name}.{os.getpid()}.tmp")
    (left / "eyas" / "more").mkdir()
    assert names(export_draft(run, tmp_path / name, FEW).folder) == MADE
    # Killed between the two renames of --force: what was there comes back.
    (tmp_path / name).rename(tmp_path / f".{name}.{os.getpid()}.old")
    with pytest.raises(ConfigError, match="--force replaces it"):
        export_draft(run, tmp_path / name, FEW)
    assert names(tmp_path) == {name}
