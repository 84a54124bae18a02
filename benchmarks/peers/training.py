"""The training steps of SpecForge 0.2.0 and speculators 0.9.0: their own models, losses and optimisers, one batch.

Nothing of theirs is written anew here; what is: the batch in their layout, and the few lines of speculators' loop,
whose own wants a data loader and ranks. Settings are their defaults for EAGLE-3 with K steps and flex attention:

    specforge    bf16 model with fp32 master weights, AdamW, gradient clipped to 0.5; rows of T tokens, no documents
    speculators  fp32 model under bf16 autocast, AdamW, gradient clipped to 1.0; documents packed, lm_head frozen.
                 Its fused loss where it compiles (torch 2.11 refuses it), else its eager one
"""

from __future__ import annotations

import importlib
import json
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from training_batch import Made

from eyas.train.draft import Eagle3Config

_LR, _TOTAL_STEPS = 1e-4, 1000

Built = tuple[Callable[[], Tensor | float], float, str]


def _config(config: Eagle3Config) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.rope.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _flops(
    config: Eagle3Config, made: Made, steps: int, *, teacher_vocab: int, head_trained: bool, packed: bool
) -> float:
    """Products of a step in which every row takes every step, forward and backward."""
    rows = made.tokens.numel()
    hidden, queries, pair = config.hidden_size, config.q_size, 2 * config.kv_size
    layer = 2 * hidden * (queries + pair) + queries * hidden + 3 * hidden * config.intermediate_size
    lengths = [n for row in made.lengths for n in row] if packed else [made.tokens.shape[1]] * len(made.tokens)
    seen = sum(n * (n + 1) / 2 for n in lengths)
    attention = 3.5 * 4 * queries * (steps * seen + rows * steps * (steps - 1) / 2)
    head = (6 if head_trained else 4) * hidden * config.draft_vocab_size * steps * rows
    once = rows * (4 * config.aux_size * hidden + 2 * config.target_hidden_size * teacher_vocab)
    return 6.0 * layer * steps * rows + attention + head + once


def _maps(config: Eagle3Config, made: Made) -> tuple[Tensor, Tensor]:
    """Their t2d [V] bool and d2t [Vd] offsets."""
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[made.draft_ids] = True
    return t2d, made.draft_ids - torch.arange(len(made.draft_ids))


def build_specforge(made: Made, config: Eagle3Config, steps: int, device: str) -> Built:
    """Its TrainerCore over its own strategy, backend and optimiser.

    Raises:
        ImportError: it is not installed.
    """
    core, _, batch = specforge_parts(made, config, steps, device)
    flops = _flops(config, made, steps, teacher_vocab=config.vocab_size, head_trained=True, packed=False)
    return (lambda: core.train_step(batch).loss), flops, "rows of T tokens as one document each; teacher on all tokens"


def specforge_parts(
    made: Made, config: Eagle3Config, steps: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[Any, Any, Any]:
    """(TrainerCore, draft model, batch)."""
    load = importlib.import_module
    auto = load("specforge.modeling.auto")
    head_type = load("specforge.modeling.target.target_head").TargetHead
    backend_module, contracts = load("specforge.training.backend"), load("specforge.runtime.contracts")
    bf16_optimizer = load("specforge.optimizer").BF16Optimizer
    torch._dynamo.config.recompile_limit = 64  # as it sets for itself
    shape = _config(config) | {"rope_theta": config.rope.theta, "model_type": "llama"}
    with tempfile.TemporaryDirectory() as folder:
        target, draft_file = Path(folder, "config.json"), Path(folder, "draft.json")
        target.write_text(json.dumps(shape | {"architectures": ["LlamaForCausalLM"]}))
        named = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": config.draft_vocab_size}
        draft_file.write_text(json.dumps(shape | named))
        torch.manual_seed(0)
        with torch.device(device):
            draft = auto.AutoDraftModel.from_config(
                auto.AutoDraftModelConfig.from_file(str(draft_file)),
                attention_backend="flex_attention",
                torch_dtype=dtype,
            )
            head = head_type(folder)
    t2d, d2t = _maps(config, made)
    head = head.to(dtype)
    with torch.no_grad():
        draft.t2d.copy_(t2d)
        draft.d2t.copy_(d2t)
        draft.embed_tokens.weight.copy_(made.embeddings)
        head.fc.weight.copy_(made.head)
    draft.vocab_mapping_loaded = True
    draft.freeze_embedding()
    head.freeze_weights()
    model = load("specforge.algorithms.eagle3.model").OnlineEagle3Model(
        draft_model=draft, length=steps, attention_backend="flex_attention"
    )
    model = model.to(device=device, dtype=dtype).train()

    def optimizer_of(module: Any) -> Any:
        return bf16_optimizer(
            module, lr=_LR, max_grad_norm=0.5, warmup_ratio=0.0, lr_scheduler="cosine", total_steps=_TOTAL_STEPS
        )

    backend = backend_module.FSDPTrainingBackend(backend_module.ParallelConfig(), optimizer_factory=optimizer_of)
    backend.prepare_model(model, wrap=False, optimizer_target=draft)  # one GPU: no wrapper
    strategy = load("specforge.training.strategies.base").Eagle3TrainStrategy(
        model, target_head=head, compact_teacher=False
    )
    core = load("specforge.training.controller").TrainerCore(strategy, backend)
    mask = made.trained.long()
    mask[:, -1] = 0
    batch = contracts.TrainBatch(
        sample_ids=[str(i) for i in range(len(mask))],
        strategy="eagle3",
        metadata={"target_repr": "hidden_state"},
        tensors={
            "input_ids": made.tokens.to(device),
            "attention_mask": torch.ones_like(mask).to(device),
            "loss_mask": mask.to(device),
            "hidden_state": made.aux.to(device, dtype),
            "target": made.last.to(device, dtype),
        },
    )
    return core, draft, batch


def build_speculators(made: Made, config: Eagle3Config, steps: int, device: str) -> Built:
    """Its model with its own compiled forward pass, and the body of its Trainer.train_epoch.

    Raises:
        ImportError: it is not installed.
    """
    optimizers, transformers = (importlib.import_module(n) for n in ("speculators.train.optimizers", "transformers"))
    model, batch, options = speculators_parts(made, config, steps, device)
    settings = types.SimpleNamespace(optimizer="adamw", lr=_LR, weight_decay=0.01)
    opts = optimizers.build_optimizers(model, settings)
    schedules = [transformers.get_linear_schedule_with_warmup(o, 0, _TOTAL_STEPS) for o in opts]

    def step() -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            _, loss, _ = model(**batch, **options)
        for o in opts:
            o.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in opts:
            o.step()
        for s in schedules:
            s.step()
        return loss.detach()

    trained = any(p.requires_grad for p in model.lm_head.parameters())
    flops = _flops(config, made, steps, teacher_vocab=config.draft_vocab_size, head_trained=trained, packed=True)
    notes = f"{_loss_kind(device)} loss, documents packed, lm_head {'trained' if trained else 'frozen'}"
    return step, flops, notes


def _loss_kind(device: str) -> str:
    return "fused" if device == "cuda" and torch.__version__ >= "2.12" else "eager"


def speculators_parts(
    made: Made, config: Eagle3Config, steps: int, device: str, *, norms: bool = True
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """(model, batch, options of its forward pass); `norms`: its defaults, three norms that plain EAGLE-3 lacks."""
    load = importlib.import_module
    eagle3, transformers = load("speculators.models.eagle3"), load("transformers")
    collate_type = load("speculators.train.data").CollateFn
    layer = transformers.LlamaConfig(
        **_config(config),
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        layer_types=["full_attention"],
    )
    layer._attn_implementation = "simple_flex_attention"
    torch.manual_seed(0)
    with torch.device(device):
        model = eagle3.Eagle3DraftModel(
            eagle3.Eagle3SpeculatorConfig(
                transformer_layer_config=layer,
                draft_vocab_size=config.draft_vocab_size,
                norm_before_residual=norms,
                norm_before_fc=norms,
                norm_output=norms,
                eagle_aux_hidden_state_layer_ids=list(config.aux_layers),
            )
        ).float()
    model.load_vocab_mappings(*_maps(config, made))
    head = made.head[made.draft_ids].float()
    with torch.no_grad():
        model.embed_tokens.weight.copy_(made.embeddings)
        model.lm_head.weight.copy_(head)
        model.verifier_lm_head.weight.copy_(head)
    model.to(device).train()
    options, _ = eagle3.Eagle3DraftModel.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation=_loss_kind(device), ttt_steps=steps, ttt_step_loss_decay=1.0
    )
    size = -(-made.tokens.numel() // 128) * 128
    collate = collate_type(size, config.hidden_size, config.num_aux, torch.bfloat16, preprocess=eagle3.shift_batch)
    batch = {
        key: value.to(device) if isinstance(value, Tensor) else value
        for key, value in collate(_documents(made)).items()
    }
    return model, batch, options


def _documents(made: Made) -> list[dict[str, Tensor]]:
    found = []
    for b, lengths in enumerate(made.lengths):
        start = 0
        for n in lengths:
            part = slice(start, start + n)
            found.append(
                {
                    "input_ids": made.tokens[b, part],
                    "hidden_states": made.aux[b, part],
                    "verifier_last_hidden_states": made.last[b, part],
                    "loss_mask": made.trained[b, part],
                    "lengths": torch.tensor([n]),
                    "position_ids": torch.arange(n),
                }
            )
            start += n
    return found
