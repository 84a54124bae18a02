"""`FinalNorm` against the norm inside the model that transformers runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from head_families import FAMILIES
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from eyas.errors import ConfigError
from eyas.target.checkpoint import Target
from eyas.target.norm import FinalNorm

Make = Callable[[], PreTrainedModel]
NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


def around_norm(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """The states before and after the final norm, [T, H]."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    decoder = model.get_decoder()
    decoder = getattr(decoder, "language_model", decoder)
    norm = next(getattr(decoder, name) for name in NORMS if hasattr(decoder, name))
    norm.register_forward_hook(lambda _, args, output: seen.append((args[0][0].detach(), output[0].detach())))
    with torch.no_grad():
        model(input_ids=torch.arange(5, 25)[None], use_cache=False)
    return seen[0]


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_norm_of_the_model(make: Make, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make().to(dtype)
    model.save_pretrained(tmp_path)
    before, after = around_norm(model)
    assert not torch.allclose(before, after, atol=0.1)
    mine = FinalNorm.load(Target.load(str(tmp_path)))(before)
    assert mine.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(mine, after, atol=tolerance, rtol=tolerance)


def test_a_checkpoint_without_it_is_named(tmp_path: Path) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    del held["model.norm.weight"]
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no norm\.weight"):
        FinalNorm.load(Target.load(str(tmp_path)))


def test_two_of_them_are_refused(tmp_path: Path) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    save_file({**held, "other.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="two final norms"):
        FinalNorm.load(Target.load(str(tmp_path)))


def test_an_architecture_nobody_knows_is_named(tmp_path: Path) -> None:
    sizes = '"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 9'
    (tmp_path / "config.json").write_text(f'{{"model_type": "of-its-own", {sizes}}}')
    with pytest.raises(ConfigError, match="does not know"):
        FinalNorm.load(Target.load(str(tmp_path)))


def test_many_rows_are_taken_in_parts(tmp_path: Path) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    norm = FinalNorm.load(Target.load(str(tmp_path)))
    rows = torch.randn(20_000, 32, generator=torch.Generator().manual_seed(0))
    together = norm(rows)
    assert torch.equal(together[9_000:9_010], norm(rows[9_000:9_010]))
    assert norm(rows[:0]).shape == (0, 32)
