"""Published drafts loaded by SGLang's own model class: every tensor in its place, the same positions, the same ids."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.target.checkpoint import Target
from eyas.target.embeddings import input_embeddings
from eyas.train.checkpoint_format import save_checkpoint
from eyas.train.draft import Eagle3Config, Eagle3Draft
from eyas.train.vocab import DraftVocab
from servers import CPU_ENV, PYTHON, STAND_INS, require_sglang
from tiny_models import llama

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "eagle 3.1": {"fc_norm": True, "norm_output": True, "num_kv_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-4},
    "linear": {"rope": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}},
    "llama3": {
        "rope": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {"rope": YARN},
    "yarn, mscale": {"rope": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16.0, "beta_slow": 2.0}},
    "yarn, attention": {"rope": YARN | {"attention_factor": 1.3, "truncate": False}},
    "full": {"draft_vocab_size": 300},
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Eagle3Draft, DraftVocab, dict[str, Any]]]:
    """Case -> the draft, its vocabulary, and what SGLang made of its checkpoint; all in one process of SGLang's."""
    require_sglang()
    root = tmp_path_factory.mktemp("drafts")
    llama().save_pretrained(root / "target")
    target = Target.load(str(root / "target"))
    made: dict[str, tuple[Eagle3Draft, DraftVocab]] = {}
    for number, (case, overrides) in enumerate(CASES.items()):
        options: dict[str, Any] = {"aux_layers": [0, 1, 3], "draft_vocab_size": 64} | overrides
        shape = Eagle3Config.from_target(target, **options)
        generator = torch.Generator().manual_seed(number)
        draft = Eagle3Draft(shape, input_embeddings(target), generator)
        for parameter in draft.parameters():
            parameter.data.uniform_(-1, 1, generator=generator)
        full = shape.draft_vocab_size == shape.vocab_size
        vocab = DraftVocab.full(300) if full else DraftVocab(torch.arange(3, 259, 4), 300)
        save_checkpoint(root / str(number), shape, draft.state_dict(), vocab, target, dtype=torch.float32)
        made[case] = draft, vocab
    folders = [str(root / str(number)) for number in range(len(made))]
    done = subprocess.run(
        [str(PYTHON), str(STAND_INS / "load_draft.py"), str(target.dir), *folders],
        env={**os.environ, **CPU_ENV, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = (torch.load(Path(folder) / "loaded.pt", weights_only=True) for folder in folders)
    return {case: (*parts, theirs) for (case, parts), theirs in zip(made.items(), found, strict=True)}


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_in_its_place(case: str, loaded: dict[str, Any]) -> None:
    draft, vocab, theirs = loaded[case]
    held = dict(theirs["parameters"])
    assert held.pop("model.embed_tokens.weight").isnan().all()  # SGLang puts the target's there
    head = held.pop("lm_head.weight")
    assert torch.equal(head[: len(vocab)], draft.lm_head.weight)  # behind them is padding
    attention, mlp = draft.midlayer.self_attn, draft.midlayer.mlp
    expected = {
        f"model.{name}".replace("midlayer", "layers.0"): parameter.data
        for name, parameter in draft.named_parameters()
        if not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight"))
    }
    del expected["model.lm_head.weight"]
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    expected["model.layers.0.self_attn.qkv_proj.weight"] = torch.cat([part.weight.data for part in qkv])
    expected["model.layers.0.mlp.gate_up_proj.weight"] = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).data
    assert held.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(held[name], tensor), name


@pytest.mark.parametrize("case", CASES)
def test_settings_positions_and_ids(case: str, loaded: dict[str, Any]) -> None:
    draft, vocab, theirs = loaded[case]
    config = draft.config
    cos, sin = draft.rope(torch.arange(len(theirs["cos_sin"])))
    assert torch.equal(torch.cat((cos, sin), -1), theirs["cos_sin"].float())
    assert theirs["norm_output"] == config.norm_output
    assert theirs["num_aux_hidden_states"] == 3
    assert theirs["draft_vocab_size"] == len(vocab)
    assert theirs["eps"] == config.rms_norm_eps
    ids = theirs["hot_token_id"]
    assert ids is None if vocab.is_full else torch.equal(ids, vocab.target_ids)
