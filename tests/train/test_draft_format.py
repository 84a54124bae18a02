"""Published draft checkpoints: what servers find in them, and what is accounted for when one is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig

from eyas.errors import ConfigError, StoreError
from eyas.target.checkpoint import Target
from eyas.target.embeddings import input_embeddings
from eyas.train import checkpoint_format
from eyas.train.checkpoint_format import DraftCheckpoint, expected_tensors, save_checkpoint
from eyas.train.draft import Eagle3Config, Eagle3Draft
from eyas.train.rope import RopeConfig
from eyas.train.vocab import DraftVocab
from tiny_models import llama

Tensors = dict[str, torch.Tensor]
Raw = dict[str, Any]
LAYERS = (0, 1, 3)
VOCAB = DraftVocab(torch.arange(0, 300, 7), 300, "c" * 32, "d" * 32, 0.9)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    llama().save_pretrained(folder)
    return Target.load(str(folder))


def draft_of(target: Target, vocab: DraftVocab = VOCAB, **overrides: Any) -> Eagle3Draft:
    shape = Eagle3Config.from_target(target, draft_vocab_size=len(vocab), **({"aux_layers": LAYERS} | overrides))
    generator = torch.Generator().manual_seed(5)
    draft = Eagle3Draft(shape, input_embeddings(target), generator)
    for parameter in draft.parameters():  # norms too
        parameter.data.uniform_(-1, 1, generator=generator)
    return draft


def published(folder: Path, target: Target, vocab: DraftVocab = VOCAB, **overrides: Any) -> Eagle3Draft:
    draft = draft_of(target, vocab, **overrides)
    save_checkpoint(folder, draft.config, draft.state_dict(), vocab, target, dtype=torch.float32)
    return draft


def changed(
    folder: Path,
    config: Callable[[Raw], Raw] = dict,
    tensors: Callable[[Tensors], Tensors] = dict,
) -> None:
    """Another checkpoint of the same draft."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config(raw)))
    save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def same(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


# --- written ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", [{}, {"fc_norm": True, "norm_output": True, "num_kv_heads": 4, "head_dim": 6}])
def test_what_is_saved_is_loaded(overrides: dict[str, Any], tmp_path: Path, target: Target) -> None:
    draft = published(tmp_path, target, **overrides)
    found = DraftCheckpoint.load(tmp_path, target)
    assert found.config == draft.config
    assert same(dict(found.tensors), draft.state_dict())
    assert torch.equal(found.vocab.target_ids, VOCAB.target_ids)
    assert found.vocab.made_for == VOCAB.made_for
    assert found.embed_tokens is None
    built = found.build(target)
    assert same(built.state_dict(), draft.state_dict())
    assert torch.equal(built.embed_tokens, draft.embed_tokens)


def test_tensors_as_servers_look_for_them(tmp_path: Path, target: Target) -> None:
    draft = draft_of(target)
    save_checkpoint(tmp_path, draft.config, draft.state_dict(), VOCAB, target)
    held = load_file(tmp_path / "model.safetensors")
    state = draft.state_dict()
    assert held.keys() == state.keys() | {"d2t", "t2d"}
    assert all(torch.equal(held[name], state[name].bfloat16()) for name in state)
    # SGLang: hot_token_id = d2t + arange; vLLM indexes the target's logits with the same.
    assert held["d2t"].dtype == torch.int64
    assert torch.equal(held["d2t"] + torch.arange(len(VOCAB)), VOCAB.target_ids)
    assert held["t2d"].dtype == torch.bool
    assert held["t2d"].nonzero()[:, 0].tolist() == VOCAB.target_ids.tolist()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_config_as_servers_read_it(tmp_path: Path, target: Target) -> None:
    draft = published(tmp_path, target, num_kv_heads=1, head_dim=10, fc_norm=True, intermediate_size=20)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, LlamaConfig)
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "hidden_act": "silu",
        "rms_norm_eps": draft.config.rms_norm_eps,
        "vocab_size": 300,
        "draft_vocab_size": len(VOCAB),
        "target_hidden_size": 32,
        "num_aux_hidden_states": 3,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "fc_norm": True,
        "norm_output": False,
        "max_position_embeddings": 512,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    }
    assert {key: getattr(config, key) for key in expected} == expected
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 10_000.0
    assert raw["rope_scaling"] is None


def test_a_full_vocabulary_has_no_maps(tmp_path: Path, target: Target) -> None:
    """vLLM has no parameter for d2t where both vocabularies are of one size, and would not load it."""
    full = DraftVocab.full(300, corpus_digest="c" * 32, tokenizer_hash="d" * 32)
    published(tmp_path, target, full)
    assert not load_file(tmp_path / "model.safetensors").keys() & {"d2t", "t2d"}
    found = DraftCheckpoint.load(tmp_path, target)
    assert found.vocab.is_full
    assert found.vocab.made_for == full.made_for


def test_a_permuted_vocabulary_of_all_tokens_keeps_its_map(tmp_path: Path, target: Target) -> None:
    permuted = DraftVocab(torch.arange(300).flip(0), 300)
    published(tmp_path, target, permuted)
    assert torch.equal(DraftCheckpoint.load(tmp_path, target).vocab.target_ids, permuted.target_ids)


def test_half_a_checkpoint_is_never_loadable(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while the new weights stand beside the old config."""
    published(tmp_path, target)
    draft = draft_of(target, fc_norm=True)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_format, "_publish", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, draft.config, draft.state_dict(), VOCAB, target)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        DraftCheckpoint.load(tmp_path, target)
    save_checkpoint(tmp_path, draft.config, draft.state_dict(), VOCAB, target)
    assert DraftCheckpoint.load(tmp_path, target).config.fc_norm
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_files_may_be_read_by_whom_the_umask_lets(tmp_path: Path, target: Target) -> None:
    before = os.umask(0o027)
    try:
        published(tmp_path / "draft", target)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "draft").iterdir()} == {0o640}


def test_a_disk_that_takes_nothing_is_named(tmp_path: Path, target: Target) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "model.safetensors.tmp").mkdir()
    with pytest.raises(StoreError, match=r"model\.safetensors"):
        published(tmp_path / "draft", target)


def test_what_does_not_fit_is_not_written(tmp_path: Path, target: Target) -> None:
    draft = draft_of(target)
    state = draft.state_dict()
    cases: list[tuple[Tensors, DraftVocab, str]] = [
        ({name: t for name, t in state.items() if name != "norm.weight"}, VOCAB, r"has no norm\.weight"),
        (state | {"extra": state["norm.weight"]}, VOCAB, "has extra"),
        (state | {"norm.weight": torch.ones(31)}, VOCAB, r"norm\.weight is \[31\], not \[32\]"),
        (state, DraftVocab(torch.arange(10), 300), "a vocabulary of 10 in 300"),
        (state, DraftVocab(VOCAB.target_ids, 400), "in 400"),
    ]
    for tensors, vocab, what in cases:
        with pytest.raises(ConfigError, match=what):
            save_checkpoint(tmp_path / "draft", draft.config, tensors, vocab, target)
    assert not (tmp_path / "draft").exists()


# --- read: the same draft as others write it --------------------------------------------------------------------------


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda held: {name.replace(old, new, 1): tensor for name, tensor in held.items()}


def older_norms(held: Tensors) -> Tensors:
    names = {f"fc_norm.{i}.weight": f"aux_norm_{at}.weight" for i, at in enumerate(("low", "mid", "high"))}
    return {names.get(name, name): tensor for name, tensor in held.items()}


def bare(raw: Raw) -> Raw:
    """Only what a peer must say."""
    keys = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"),
        *("draft_vocab_size", "rms_norm_eps", "max_position_embeddings", "fc_norm", "eagle_config"),
    )
    return {key: raw[key] for key in keys}


def speculators(raw: Raw) -> Raw:
    """The layout of speculators 0.9: the layer's config inside, ids after k layers."""
    layer = bare(raw)
    del layer["eagle_config"], layer["draft_vocab_size"], layer["fc_norm"]
    outer = {key: raw[key] for key in ("draft_vocab_size", "fc_norm", "norm_output")}
    return outer | {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "transformer_layer_config": layer | {"model_type": "llama", "num_hidden_layers": 1},
    }


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        (dict, renamed("midlayer.", "layers.0.")),
        (dict, lambda held: {f"model.{name}" if name[:6] == "midlay" else name: t for name, t in held.items()}),
        (dict, older_norms),
        (dict, lambda held: held | {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        (dict, lambda held: {name: tensor for name, tensor in held.items() if name != "t2d"}),
        (bare, dict),
        (speculators, renamed("midlayer.", "layers.0.")),
        (lambda raw: raw | {"use_aux_norm": True, "fc_norm": None}, dict),
    ],
    ids=["layers.0", "model.", "older fc_norm", "inv_freq", "no t2d", "bare", "speculators", "use_aux_norm"],
)
def test_a_peers_checkpoint(
    config: Callable[[Raw], Raw], tensors: Callable[[Tensors], Tensors], tmp_path: Path, target: Target
) -> None:
    draft = published(tmp_path, target, fc_norm=True)
    changed(tmp_path, config, tensors)
    found = DraftCheckpoint.load(tmp_path, target)
    assert same(found.build(target).state_dict(), draft.state_dict())
    assert found.config == draft.config
    assert torch.equal(found.vocab.target_ids, VOCAB.target_ids)


def test_sharded_and_pickled_files(tmp_path: Path, target: Target) -> None:
    draft = published(tmp_path, target)
    held = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(held, tmp_path / "pytorch_model.bin")
    assert same(dict(DraftCheckpoint.load(tmp_path, target).tensors), draft.state_dict())
    (tmp_path / "pytorch_model.bin").unlink()
    names = sorted(held)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: held[name] for name in names if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert same(dict(DraftCheckpoint.load(tmp_path, target).tensors), draft.state_dict())


def test_embeddings_of_its_own_must_be_the_targets(tmp_path: Path, target: Target) -> None:
    """Servers disagree on which count: random ones in a checkpoint have served badly, and only on one of them."""
    published(tmp_path, target)
    embeddings = input_embeddings(target)
    changed(tmp_path, tensors=lambda held: held | {"embed_tokens.weight": embeddings.half()})
    built = DraftCheckpoint.load(tmp_path, target).build(target)
    assert torch.equal(built.embed_tokens, embeddings)
    changed(tmp_path, tensors=lambda held: held | {"embed_tokens.weight": torch.randn(300, 32)})
    with pytest.raises(ConfigError, match="embeddings are not the target's"):
        DraftCheckpoint.load(tmp_path, target).build(target)
    changed(tmp_path, tensors=lambda held: held | {"embed_tokens.weight": torch.randn(300, 31)})
    with pytest.raises(ConfigError, match=r"embed_tokens.weight is \[300, 31\]"):
        DraftCheckpoint.load(tmp_path, target).build(target)


def test_a_draft_of_another_width_brings_its_own_embeddings(tmp_path: Path, target: Target) -> None:
    shape = Eagle3Config.from_target(target, aux_layers=LAYERS, hidden_size=16, draft_vocab_size=len(VOCAB))
    embeddings = torch.randn(300, 16)
    draft = Eagle3Draft(shape, embeddings)
    arguments = (tmp_path, shape, draft.state_dict(), VOCAB, target)
    with pytest.raises(ConfigError, match="needs its own embeddings"):
        save_checkpoint(*arguments)
    save_checkpoint(*arguments, dtype=torch.float32, embed_tokens=embeddings)
    found = DraftCheckpoint.load(tmp_path, target)
    assert found.config == shape
    assert torch.equal(found.build(target).embed_tokens, embeddings)
    changed(tmp_path, tensors=lambda held: {name: t for name, t in held.items() if name != "embed_tokens.weight"})
    with pytest.raises(ConfigError, match="needs its own embeddings"):
        DraftCheckpoint.load(tmp_path, target).build(target)


def test_layers_may_be_named_where_a_config_is_wrong(tmp_path: Path, target: Target) -> None:
    published(tmp_path, target)
    changed(tmp_path, lambda raw: {key: value for key, value in raw.items() if key != "eyas"})
    assert DraftCheckpoint.load(tmp_path, target).config.aux_layers == LAYERS
    assert DraftCheckpoint.load(tmp_path, target, aux_layers=(0, 2, 3)).config.aux_layers == (0, 2, 3)
    changed(tmp_path, lambda raw: raw | {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]})
    with pytest.raises(ConfigError, match="SGLang would read layers"):
        DraftCheckpoint.load(tmp_path, target)


# --- read: what is refused --------------------------------------------------------------------------------------------


def without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda held: {name: value for name, value in held.items() if name not in names}


def plus(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda held: held | changes


def also(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda held: held | {name: tensor}


ONES = torch.ones(32)


@pytest.mark.parametrize(
    ("config", "tensors", "what"),
    [
        (dict, without("midlayer.hidden_norm.weight"), r"no midlayer\.hidden_norm\.weight"),
        (dict, without("lm_head.weight"), r"no lm_head\.weight"),
        (dict, also("midlayer.self_attn.q_norm.weight", torch.ones(8)), r"has midlayer\.self_attn\.q_norm\.weight"),
        (dict, also("midlayer.self_attn.q_proj.bias", ONES), r"has midlayer\.self_attn\.q_proj\.bias"),
        (dict, also("layers.1.hidden_norm.weight", ONES), r"has layers\.1\.hidden_norm"),
        (dict, also("input_norm.weight", torch.ones(96)), r"has input_norm\.weight"),
        (dict, also("layers.0.hidden_norm.weight", ONES), r"midlayer\.hidden_norm\.weight twice"),
        (dict, renamed("midlayer.", "mid_layer."), r"has mid_layer\."),  # 0 % acceptance, once
        (dict, also("fc.weight", torch.ones(32, 64)), r"fc\.weight is \[32, 64\], not \[32, 96\]"),
        (dict, also("fc.weight", torch.ones(32, 96).to(torch.float8_e4m3fn)), "bf16, f16 or f32"),
        (dict, also("fc.weight", torch.ones(32, 96).int()), "bf16, f16 or f32"),
        (dict, without("d2t", "t2d"), "no d2t"),
        (dict, also("d2t", VOCAB.target_ids), "d2t"),
        (dict, also("d2t", VOCAB.d2t[:-1].clone()), "maps of other sizes"),
        (dict, also("t2d", ~VOCAB.t2d), "disagree"),
        (dict, also("t2d", torch.ones(299, dtype=torch.bool)), "maps of other sizes"),
        (plus(norm_before_residual=True), dict, "norm_before_residual"),
        (plus(norm_before_fc=True), dict, "norm_before_fc"),
        (plus(eagle_config={"norm_before_fc": True}), dict, "norm_before_fc"),
        (plus(eagle_config={"use_aux_hidden_state": False}), dict, "use_aux_hidden_state"),
        (plus(num_hidden_layers=2), dict, "num_hidden_layers = 2"),
        (plus(attention_bias=True), dict, "attention_bias"),
        (plus(tie_word_embeddings=True), dict, "tie_word_embeddings"),
        (plus(partial_rotary_factor=0.5), dict, "partial_rotary_factor"),
        (plus(quantization_config={"quant_method": "fp8"}), dict, "quantization_config"),
        (plus(rope_parameters={"rope_type": "longrope"}), dict, "longrope"),
        (plus(hidden_act="gelu"), dict, "silu only"),
        (plus(num_aux_hidden_states=4), dict, "4 layer outputs"),
        (plus(vocab_size=301), dict, "a draft for 301 tokens, the target has 300"),
        (plus(target_hidden_size=64), dict, "a draft for states of 64, the target has 32"),
        (plus(fc_norm=True), dict, r"no fc_norm\.0\.weight"),
        (without("intermediate_size"), dict, "lacks sizes"),
        (lambda raw: without("norm_before_residual")(speculators(raw)), dict, "norm_before_residual"),
        (plus(hidden_size=[32], head_dim=None), dict, "other types"),
        (plus(intermediate_size="48"), dict, "intermediate_size is '48'"),
        (plus(rms_norm_eps="small"), dict, "other types"),
        (plus(eyas={}, eagle_config=[1], eagle_aux_hidden_state_layer_ids=None), dict, "other types"),
        (plus(eyas={}, eagle_aux_hidden_state_layer_ids=["a", "b"]), dict, "other types"),
        (plus(rope_parameters="yarn"), dict, "other types"),
        (plus(eyas={"target": "0" * 32, "aux_layers": [0, 1, 3]}), dict, "trained for another target"),
    ],
)
def test_nothing_is_skipped_or_guessed(
    config: Callable[[Raw], Raw], tensors: Callable[[Tensors], Tensors], what: str, tmp_path: Path, target: Target
) -> None:
    published(tmp_path, target)
    changed(tmp_path, config, tensors)
    with pytest.raises(ConfigError, match=what) as error:
        DraftCheckpoint.load(tmp_path, target)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_folders_that_hold_none(tmp_path: Path, target: Target) -> None:
    with pytest.raises(ConfigError, match="no such folder or hub model"):
        DraftCheckpoint.load(tmp_path / "nowhere", target)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        DraftCheckpoint.load(tmp_path, target)
    published(tmp_path, target)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no weights"):
        DraftCheckpoint.load(tmp_path, target)
    for content in (b"nonsense", b""):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(ConfigError, match="unreadable weights"):
            DraftCheckpoint.load(tmp_path, target)
    torch.save([torch.ones(1)], tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="not a state dict"):
        DraftCheckpoint.load(tmp_path, target)


def test_a_pickle_that_runs_code_is_not_run(tmp_path: Path, target: Target) -> None:
    published(tmp_path, target)
    (tmp_path / "model.safetensors").unlink()
    torch.save(_Touches(tmp_path / "touched"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="unreadable weights"):
        DraftCheckpoint.load(tmp_path, target)
    assert not (tmp_path / "touched").exists()


class _Touches:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.path,)


def test_smollm2(smollm2_dir: Path, tmp_path: Path) -> None:
    """At its real shape: the default layers are left out, the weights are bf16, and all of it comes back."""
    smollm2 = Target.load(str(smollm2_dir))
    vocab = DraftVocab(torch.arange(0, 49_152, 3), 49_152)
    shape = Eagle3Config.from_target(smollm2, draft_vocab_size=len(vocab))
    draft = Eagle3Draft(shape, input_embeddings(smollm2), torch.Generator().manual_seed(0)).bfloat16()
    save_checkpoint(tmp_path, shape, draft.state_dict(), vocab, smollm2)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert "eagle_aux_hidden_state_layer_ids" not in raw
    assert raw["eagle_config"] == {"use_aux_hidden_state": True}
    assert raw["eyas"]["target"] == smollm2.fingerprint()
    found = DraftCheckpoint.load(tmp_path, smollm2)
    assert found.config == replace(shape, rope=RopeConfig("default", 100_000.0, 8192))
    assert same(dict(found.tensors), draft.state_dict())
    assert {name: tuple(t.shape) for name, t in found.tensors.items()} == expected_tensors(shape)
