"""An export in SGLang's own loader: our rules say what it finds and misses. And our flags in its own parser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from export_heads import Tensors, changed
from safetensors.torch import load_file

from eyas.export.engines import loads
from eyas.export.launch import Drafting
from eyas.serve import draft_command
from servers import CPU_ENV, PYTHON, STAND_INS, require_sglang

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

CASES: dict[str, Callable[[str], str | None]] = {
    "as exported": lambda name: name,
    "unrenamed": lambda name: name.replace("midlayer.", "mid_layer."),
    "layers.0": lambda name: name.replace("midlayer.", "layers.0."),
    "under model": lambda name: f"model.{name}" if name.startswith("midlayer") else name,
    "no map": lambda name: None if name == "d2t" else name,
    "no norm": lambda name: None if name == "norm.weight" else name,
    "half a layer": lambda name: name.replace("midlayer.mlp.", "midlayer.ffn."),
}


@pytest.fixture(scope="module")
def heads(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("named")
    folders = []
    for number, rename in enumerate(CASES.values()):

        def other(held: Tensors, rename: Callable[[str], str | None] = rename) -> Tensors:
            return {new: tensor for name, tensor in held.items() if (new := rename(name)) is not None}

        folders.append(changed(shutil.copytree(exported, root / str(number)), tensors=other))
    return folders


@pytest.fixture(scope="module")
def sglang(target: Path, exported: Path, heads: list[Path]) -> dict[str, Any]:
    require_sglang()
    words = draft_command(str(target), exported, drafting=Drafting(4, 2, 9), port=31000).argv
    done = subprocess.run(
        [str(PYTHON), str(STAND_INS / "load_names.py"), str(target), json.dumps(words[3:]), *map(str, heads)],
        env={**os.environ, **CPU_ENV, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_our_rules_are_those_of_its_loader(sglang: dict[str, Any], heads: list[Path]) -> None:
    for case, folder, unfilled in zip(CASES, heads, sglang["unfilled"], strict=True):
        config = json.loads((folder / "config.json").read_text())
        found = loads("sglang", config, load_file(folder / "model.safetensors"))
        # It keeps q, k and v as one parameter, gate and up likewise, and takes the embeddings from the target.
        merged = {
            name.replace("q_proj", "qkv_proj").replace("gate_proj", "gate_up_proj")
            for name in found.missing
            if not name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight"))
        }
        expected = {f"model.{name}" if name not in ("d2t", "lm_head.weight") else name for name in merged}
        assert set(unfilled) - {"model.embed_tokens.weight"} == expected, case
        assert (case in ("as exported", "layers.0", "under model")) == (not expected)


def test_its_parser_takes_our_flags(sglang: dict[str, Any], target: Path, exported: Path) -> None:
    assert sglang["parsed"] == {
        "model_path": str(target.resolve()),
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(exported.resolve()),
        "speculative_num_steps": 4,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 9,
        "host": "127.0.0.1",
        "port": 31000,
    }
