"""Input embeddings and rows of `lm_head` against transformers' models, family by family, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from head_families import FAMILIES
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from eyas.errors import ConfigError
from eyas.target.checkpoint import Target
from eyas.target.embeddings import input_embeddings
from eyas.target.head import Head
from tiny_models import llama

Make = Callable[[], PreTrainedModel]
ROWS = torch.tensor([299, 0, 7, 7, 150])


def wiped(folder: Path) -> None:
    """Every weight file in the folder is overwritten in place; whatever is still mapped from it is zeros now."""
    for path in folder.glob("*.safetensors"):
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.write(bytes(size))


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("shards", ["5GB", "50KB"], ids=["one file", "sharded"])
def test_they_are_the_matrix_that_transformers_embeds_with(make: Make, shards: str, tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path, max_shard_size=shards)
    expected = model.get_input_embeddings().weight
    target = Target.load(str(tmp_path))
    whole, some = input_embeddings(target), input_embeddings(target, ROWS)
    wiped(tmp_path)
    assert torch.equal(whole, expected)
    assert torch.equal(some, expected[ROWS])
    assert some.untyped_storage().nbytes() == some.numel() * some.element_size()


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
def test_a_head_read_in_part_gives_the_same_logits(make: Make, tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path))
    whole, some = Head.load(target), Head.load(target, rows=ROWS)
    weight, bias = whole.weight[ROWS], None if whole.bias is None else whole.bias[ROWS]
    wiped(tmp_path)
    assert torch.equal(some.weight, weight)
    assert some.weight.untyped_storage().nbytes() == some.weight.numel() * some.weight.element_size()
    assert (some.scale, some.softcap) == (whole.scale, whole.softcap)
    assert (some.bias is None) == (bias is None)
    if some.bias is not None and bias is not None:
        assert torch.equal(some.bias, bias)


def test_tied_and_stored_under_the_heads_name_alone(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    held["lm_head.weight"] = held.pop("model.embed_tokens.weight")
    save_file(held, tmp_path / "model.safetensors")
    assert torch.equal(input_embeddings(Target.load(str(tmp_path))), model.get_input_embeddings().weight)


def test_untied_without_embeddings_is_named(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    del held["model.embed_tokens.weight"]
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="no input embeddings"):
        input_embeddings(Target.load(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "tensor", "what"),
    [
        ("model.embed_tokens.weight", torch.zeros(300, 31), r"is \[300, 31\]"),
        ("model.embed_tokens.weight", torch.zeros(300, 32, dtype=torch.int8), "quantised"),
        ("other.embed_tokens.weight", torch.zeros(300, 32), "several"),
    ],
)
def test_a_matrix_that_is_not_it_is_refused(name: str, tensor: torch.Tensor, what: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors") | {name: tensor}
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=what):
        input_embeddings(Target.load(str(tmp_path)))


@pytest.mark.parametrize("rows", [[-1], [300], [0, 5, 300]])
@pytest.mark.parametrize("read", [input_embeddings, lambda target, rows: Head.load(target, rows=rows)])
def test_rows_outside_the_vocabulary_are_a_mistake_of_the_caller(
    read: Callable[[Target, torch.Tensor], object], rows: list[int], tmp_path: Path
) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="outside"):
        read(Target.load(str(tmp_path)), torch.tensor(rows))


def test_only_the_shard_that_holds_them_is_needed(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    mine = files["model.embed_tokens.weight"]
    for file in set(files.values()) - {mine}:
        (tmp_path / file).unlink()
    target = Target.load(str(tmp_path))
    assert torch.equal(input_embeddings(target), model.get_input_embeddings().weight)
    (tmp_path / mine).unlink()
    with pytest.raises(ConfigError, match="incomplete"):
        input_embeddings(target)
    with pytest.raises(ConfigError, match="not downloaded") as error:
        input_embeddings(dataclasses.replace(target, model="some/hub-id"))
    assert error.value.hint == f"hf download some/hub-id {mine}"


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    llama().config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="safetensors files are needed"):
        input_embeddings(Target.load(str(tmp_path)))


def test_real_files(smollm2_dir: Path) -> None:
    """SmolLM2 is tied: the head's rows are the embeddings'."""
    target = Target.load(str(smollm2_dir))
    rows = torch.arange(0, target.vocab_size, 1000)
    some = input_embeddings(target, rows)
    assert some.dtype == torch.bfloat16
    assert torch.equal(some, load_file(smollm2_dir / "model.safetensors")["model.embed_tokens.weight"][rows])
    assert torch.equal(Head.load(target, rows=rows).weight, some)
