from __future__ import annotations

import pytest

from eyas.capture.fingerprint import architecture_of, model_fingerprint, norm_key


@pytest.mark.parametrize(
    "prefix", ["", "model.", "language_model.model.", "model.language_model.", "thinker.model.", "transformer."]
)
def test_norm_names_are_the_same_in_every_wrapper(prefix: str) -> None:
    assert norm_key(f"{prefix}norm.weight", 8) == "norm"
    for name in ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "norm"):
        assert norm_key(f"{prefix}layers.3.{name}.weight", 8) == f"layers.3.{name}.weight"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.8.input_layernorm.weight",  # draft layers stored behind the target's
        "model.layers.8.enorm.weight",
        "model.layers.8.shared_head.norm.weight",
        "mtp.layers.0.input_layernorm.weight",
        "model.mtp.norm.weight",
        "model.layers.0.self_attn.q_norm.weight",  # may be sharded under tensor parallelism
        "model.layers.0.self_attn.kv_a_layernorm.weight",
        "model.layers.0.mixer.norm.weight",
        "vision_tower.encoder.blocks.0.norm0.weight",
        "visual.merger.norm.weight",
        "model.vision_model.layers.0.input_layernorm.weight",
        "model.audio_tower.layers.0.final_layer_norm.weight",
        "mm_projector.pre_norm.weight",
        "model.multi_modal_projector.norm.weight",
        "model.connector.norm.weight",
        "talker.model.norm.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.input_layernorm.bias",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ],
)
def test_names_that_do_not_count(name: str) -> None:
    assert norm_key(name, 8) is None


def test_fingerprint_sees_values_names_and_architecture() -> None:
    architecture = {"hidden_size": 4, "num_hidden_layers": 1}
    norms = {"norm": b"\x80\x3f" * 4, "layers.0.input_layernorm.weight": b"\0" * 8}
    base = model_fingerprint(architecture, norms)
    assert base == model_fingerprint(dict(reversed(architecture.items())), dict(reversed(norms.items())))
    variants = [
        model_fingerprint(architecture | {"hidden_size": 5}, norms),
        model_fingerprint(architecture, norms | {"norm": b"\x80\x3f" * 3 + b"\x81\x3f"}),
        model_fingerprint(architecture, {"norm": norms["norm"]}),
        model_fingerprint(architecture, {"other": norms["norm"], "layers.0.input_layernorm.weight": b"\0" * 8}),
    ]
    assert len({base, *variants}) == 5


def test_architecture_of_dict_and_object_agree() -> None:
    fields = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "other": "x"}
    assert architecture_of(fields) == architecture_of(type("Config", (), fields)())
    assert architecture_of({}) == dict.fromkeys(architecture_of(fields), 0)
