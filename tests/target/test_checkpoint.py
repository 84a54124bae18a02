from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from eyas.capture.contract import default_layers
from eyas.capture.fingerprint import architecture_of, model_fingerprint
from eyas.errors import ConfigError
from eyas.target.checkpoint import Target, norm_bytes
from tiny_models import MODELS, deepseek_v3, llama, qwen3

Make = Callable[[], PreTrainedModel]


def live_fingerprint(model: PreTrainedModel) -> str:
    """As a server sees it: from live parameters, not from a file."""
    architecture = architecture_of(model.config.get_text_config(decoder=True))
    return model_fingerprint(architecture, norm_bytes(model.named_parameters(), architecture["num_hidden_layers"]))


def with_random_norms(model: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return model


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_checkpoint_and_live_model_have_one_fingerprint(make: Make, tmp_path: Path) -> None:
    model = with_random_norms(make())
    model.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path))
    assert target.fingerprint() == live_fingerprint(model)
    # A server that runs in bf16 rounds the checkpoint's float32 itself.
    assert target.fingerprint() == live_fingerprint(model.to(torch.bfloat16))
    assert (target.hidden_size, target.num_layers, target.vocab_size) == (
        model.config.get_text_config().hidden_size,
        model.config.get_text_config().num_hidden_layers,
        model.config.get_text_config().vocab_size,
    )


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fingerprint_survives_sharding_and_dtype(make: Make, dtype: torch.dtype, tmp_path: Path) -> None:
    model = with_random_norms(make()).to(torch.bfloat16)
    expected = live_fingerprint(model)
    model.to(dtype).save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert Target.load(str(tmp_path)).fingerprint() == expected


@pytest.mark.parametrize("make", [llama, qwen3, deepseek_v3])
def test_wrapped_decoder_has_the_fingerprint_of_the_bare_one(make: Make, tmp_path: Path) -> None:
    # Kimi-K2.5's layout: the decoder under text_config and language_model., towers beside it.
    model = with_random_norms(make())
    model.save_pretrained(tmp_path / "bare")
    wrapped = tmp_path / "wrapped"
    wrapped.mkdir()
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    (wrapped / "config.json").write_text(
        json.dumps({"model_type": "some_wrapper", "hidden_size": 7, "text_config": config})
    )
    tensors = {
        f"language_model.{name}": tensor for name, tensor in load_file(tmp_path / "bare/model.safetensors").items()
    }
    tensors["vision_tower.encoder.final_layernorm.weight"] = torch.zeros(3)
    tensors["multi_modal_projector.norm.weight"] = torch.zeros(3)
    save_file(tensors, wrapped / "model.safetensors")
    assert Target.load(str(wrapped)).fingerprint() == Target.load(str(tmp_path / "bare")).fingerprint()


def test_draft_layers_beyond_the_target_do_not_count(tmp_path: Path) -> None:
    model = with_random_norms(deepseek_v3())
    model.save_pretrained(tmp_path)
    expected = Target.load(str(tmp_path)).fingerprint()
    tensors = load_file(tmp_path / "model.safetensors")
    last = model.config.num_hidden_layers
    for name in ("input_layernorm", "enorm", "shared_head.norm"):
        tensors[f"model.layers.{last}.{name}.weight"] = torch.ones(model.config.hidden_size)
    save_file(tensors, tmp_path / "model.safetensors")
    assert Target.load(str(tmp_path)).fingerprint() == expected


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_any_changed_norm_changes_the_fingerprint(make: Make, tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layers = model.config.get_text_config().num_hidden_layers
    seen = {Target.load(str(tmp_path)).fingerprint()}
    counted = [name for name in tensors if norm_bytes([(name, tensors[name])], layers)]
    assert len(counted) >= 2 * layers + 1
    for name in counted:
        changed = {**tensors, name: tensors[name] + torch.nn.functional.one_hot(torch.tensor(1), len(tensors[name]))}
        save_file(changed, tmp_path / "model.safetensors")
        seen.add(Target.load(str(tmp_path)).fingerprint())
    assert len(seen) == len(counted) + 1


def test_norm_bytes_round_to_nearest_even() -> None:
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1.0, -2.5])
    assert norm_bytes([("norm.weight", ties)], 1)["norm"] == bytes.fromhex("803f823f803f20c0")


def test_norm_bytes_refuses_two_of_one_name() -> None:
    weight = torch.ones(2)
    with pytest.raises(ValueError, match="two norms"):
        norm_bytes([("model.norm.weight", weight), ("other.norm.weight", weight)], 1)


def test_config_alone_has_no_fingerprint_and_an_open_spec(tmp_path: Path) -> None:
    llama().config.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path))
    assert target.fingerprint() is None
    assert target.spec((0, 2)).model == ""


def test_config_that_leaves_out_class_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "hidden_size": 48, "num_hidden_layers": 9})
    )
    reference = AutoConfig.from_pretrained(tmp_path)
    target = Target.load(str(tmp_path))
    assert target.architecture == architecture_of(reference)
    assert target.vocab_size == reference.vocab_size > 0


def test_spec_defaults_follow_the_contract(tmp_path: Path) -> None:
    model = llama(num_hidden_layers=8)
    model.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path))
    spec = target.spec()
    assert spec.layers == default_layers(8) == (1, 3, 4)
    assert (spec.last, spec.dtype) == ("loss", "bf16")
    assert spec.model == target.fingerprint()
    assert target.spec([0, 7], "all", "f32").layers == (0, 7)


@pytest.mark.parametrize("layers", [None, (0, 4), (2, 1), ()])
def test_impossible_layers_name_the_setting(layers: tuple[int, ...] | None, tmp_path: Path) -> None:
    llama().config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as error:
        Target.load(str(tmp_path)).spec(layers)
    assert "layers" in error.value.what
    assert "capture.layers" in error.value.hint


def test_missing_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder or hub model") as error:
        Target.load(str(tmp_path / "nowhere"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (None, "no config.json"),
        ("{", "unreadable config.json"),
        ("[]", "does not hold an object"),
        ('{"model_type": "no-such-type"}', "cannot read the config"),
        ('{"hidden_size": 0, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 9}', "no hidden_size"),
    ],
)
def test_bad_config_is_named(text: str | None, what: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=what) as error:
        Target.load(str(tmp_path))
    assert "\n" not in str(error.value)


def sharded(folder: Path) -> dict[str, str]:
    llama().save_pretrained(folder, max_shard_size="50KB")
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def test_incomplete_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / sharded(tmp_path)["model.norm.weight"]).unlink()
    with pytest.raises(ConfigError, match="incomplete"):
        Target.load(str(tmp_path)).fingerprint()


def test_index_without_any_shard_counts_as_no_weights(tmp_path: Path) -> None:
    for file in set(sharded(tmp_path).values()):
        (tmp_path / file).unlink()
    assert Target.load(str(tmp_path)).fingerprint() is None


@pytest.mark.parametrize("damage", ["cut", "garbage", "index"])
def test_damaged_weights_are_named(damage: str, tmp_path: Path) -> None:
    if damage == "index":
        sharded(tmp_path)
        (tmp_path / "model.safetensors.index.json").write_text("{}")
    else:
        llama().save_pretrained(tmp_path)
        path = tmp_path / "model.safetensors"
        if damage == "cut":
            os.truncate(path, path.stat().st_size // 2)
        else:
            path.write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="unreadable") as error:
        Target.load(str(tmp_path)).fingerprint()
    assert "\n" not in str(error.value)


def test_loaded_again_by_transformers(tmp_path: Path) -> None:
    with_random_norms(qwen3()).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert live_fingerprint(again) == Target.load(str(tmp_path)).fingerprint()
