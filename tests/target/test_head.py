"""`Head` against the logits that transformers computes, family by family, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_families import FAMILIES
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from eyas.errors import ConfigError
from eyas.target.checkpoint import Target
from eyas.target.head import Head
from eyas.target.norm import FinalNorm
from tiny_models import llama

Make = Callable[[], PreTrainedModel]
Tensors = dict[str, torch.Tensor | None]


def reference(model: PreTrainedModel, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The state that goes into the output layer [T, H], and the log-probabilities of every token [T, V]."""
    seen: list[torch.Tensor] = []
    output = model.get_output_embeddings()
    assert output is not None
    handle = output.register_forward_pre_hook(lambda _, args: seen.append(args[0][0].detach()))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    handle.remove()
    return seen[0], logits.float().log_softmax(-1)


@pytest.fixture
def tokens() -> list[int]:
    return torch.randint(2, 300, (20,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("shards", ["5GB", "50KB"], ids=["one file", "sharded"])
def test_log_probabilities_are_transformers(make: Make, shards: str, tmp_path: Path, tokens: list[int]) -> None:
    model = make()
    model.save_pretrained(tmp_path, max_shard_size=shards)
    last, expected = reference(model, tokens)
    head = Head.load(Target.load(str(tmp_path)))
    ids = torch.arange(20) * 15
    torch.testing.assert_close(
        head.log_probs(last, ids), expected[torch.arange(20), ids], atol=2e-5, rtol=1e-5, msg=type(model).__name__
    )


def test_blocks_of_rows_and_vocabulary_do_not_show() -> None:
    """More positions and a larger vocabulary than one block of each."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(20_000, 8, generator=generator)
    last = torch.randn(5_000, 8, generator=generator)
    ids = torch.randint(0, 20_000, (5_000,), generator=generator)
    expected = (last.double() @ weight.double().T).log_softmax(-1)[torch.arange(5_000), ids]
    torch.testing.assert_close(Head(weight).log_probs(last, ids).double(), expected, atol=1e-4, rtol=1e-5)
    assert Head(weight).log_probs(last[:0], ids[:0]).shape == (0,)


def test_bf16_states_and_weights_are_computed_in_float32() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, last = torch.randn(300, 32, generator=generator), torch.randn(50, 32, generator=generator)
    weight, last = weight.bfloat16(), last.bfloat16()
    ids = torch.arange(50)
    expected = (last.double() @ weight.double().T).log_softmax(-1)[ids, ids]
    torch.testing.assert_close(Head(weight).log_probs(last, ids).double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("states", "ids"), [((3, 8), [1, 2]), ((2, 7), [1, 2]), ((2, 8), [1, 20]), ((2, 8), [-1, 0])])
def test_what_does_not_fit_is_a_mistake_of_the_caller(states: tuple[int, int], ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"states|outside"):
        Head(torch.zeros(20, 8)).log_probs(torch.zeros(states), torch.tensor(ids))


def changed(
    folder: Path, model: PreTrainedModel, config: dict[str, Any], tensors: dict[str, torch.Tensor | None]
) -> Target:
    """The saved model with other config keys and tensors; None removes one."""
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    held = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, folder / "model.safetensors")
    return Target.load(str(folder))


QUANTISED: Tensors = {"lm_head.weight": None, "lm_head.qweight": torch.zeros(300, 4).int()}


@pytest.mark.parametrize(
    ("config", "tensors", "what"),
    [
        ({}, {"lm_head.weight": None}, "no lm_head"),
        ({"tie_word_embeddings": True}, {}, "but they differ"),
        ({}, QUANTISED, "quantised"),
        ({}, {"lm_head.weight": torch.zeros(300, 32).to(torch.float8_e4m3fn)}, "quantised"),
        ({"vocab_size": 301}, {}, r"is \[300, 32\]"),
        ({}, {"other.lm_head.weight": torch.zeros(300, 32)}, "several"),
        ({"logits_scaling": 8.0}, {}, "unknown change"),
        ({"logit_scale": 0.0625}, {}, "unknown change"),
        ({"lm_head_multiplier": 0.5}, {}, "unknown change"),
        ({"mup_width_multiplier": 8.0}, {}, "unknown change"),
        ({"output_logit_soft_cap": 30.0}, {}, "unknown change"),
    ],
)
def test_what_cannot_be_trusted_is_refused_by_name(
    config: dict[str, Any], tensors: Tensors, what: str, tmp_path: Path
) -> None:
    target = changed(tmp_path, llama(), config, tensors)
    with pytest.raises(ConfigError, match=what) as error:
        Head.load(target)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "config",
    [
        {"logits_scaling": 1.0, "lm_head_multiplier": 1, "output_logit_soft_cap": 0},
        {"attn_logit_softcapping": 50.0, "output_router_logits": True, "moe_router_logit_softcapping": 3.0},
        {"num_logits_to_keep": 1, "logit_scale": None, "mlp_up_softcap": 25.0},
    ],
)
def test_keys_that_change_no_logits_are_no_reason_to_refuse(config: dict[str, Any], tmp_path: Path) -> None:
    head = Head.load(changed(tmp_path, llama(), config, {}))
    assert (head.scale, head.softcap) == (1.0, None)


def test_a_config_that_leaves_out_its_softcap_has_its_class_default(tmp_path: Path) -> None:
    FAMILIES["Gemma2"]().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["final_logit_softcapping"]
    path.write_text(json.dumps(config))
    assert Head.load(Target.load(str(tmp_path))).softcap == 30.0


def test_draft_layers_and_other_towers_have_no_say(tmp_path: Path) -> None:
    others: Tensors = {
        "model.layers.9.embed_tokens.weight": torch.zeros(300, 32),
        "talker.lm_head.weight": torch.zeros(300, 32),
        "vision_tower.embed_tokens.weight": torch.zeros(9, 9),
    }
    model = llama()
    head = Head.load(changed(tmp_path, model, {}, others))
    assert torch.equal(head.weight, model.get_output_embeddings().weight)


def test_a_wrapped_decoder_whose_model_type_nobody_knows(tmp_path: Path, tokens: list[int]) -> None:
    """Kimi-K2.5's layout: code of its own around a decoder that transformers has."""
    model = FAMILIES["deepseek_v3"]()
    model.save_pretrained(tmp_path / "bare")
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    wrapped = tmp_path / "wrapped"
    wrapped.mkdir()
    outer = {"model_type": "kimi_of_its_own", "text_config": config | {"model_type": "kimi_k_something"}}
    (wrapped / "config.json").write_text(json.dumps(outer))
    held = load_file(tmp_path / "bare" / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in held.items()}, wrapped / "model.safetensors")
    target = Target.load(str(wrapped))
    last, expected = reference(model, tokens)
    torch.testing.assert_close(
        Head.load(target).log_probs(last, torch.tensor(tokens)),
        expected[torch.arange(20), tokens],
        atol=2e-5,
        rtol=1e-5,
    )
    assert FinalNorm.load(target)(last).shape == last.shape


def test_only_the_shard_that_holds_it_is_needed(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    for file in set(files.values()) - {files["lm_head.weight"]}:
        (tmp_path / file).unlink()
    assert torch.equal(Head.load(Target.load(str(tmp_path))).weight, model.get_output_embeddings().weight)
    (tmp_path / files["lm_head.weight"]).unlink()
    target = Target.load(str(tmp_path))
    with pytest.raises(ConfigError, match="incomplete"):
        Head.load(target)
    with pytest.raises(ConfigError, match="not downloaded") as error:
        Head.load(dataclasses.replace(target, model="some/hub-id"))
    assert error.value.hint == f"hf download some/hub-id {files['lm_head.weight']}"


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    llama().config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no lm_head"):
        Head.load(Target.load(str(tmp_path)))
