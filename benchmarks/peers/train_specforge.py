"""SpecForge 0.2.0's offline EAGLE-3 training on rows of an Eyas store: its own run, from its config to its export.

Its layout: a file a row, `00000012.ckpt`, by torch.save: `input_ids` [T] and `loss_mask` [T] int64, `hidden_state`
[1, T, H], the state after the final norm (its target head is a matrix alone), and `aux_hidden_state` [1, T, 3H],
shallow to deep. Nothing is shifted on disk: its trainer moves tokens and teacher one to the left, so that row t reads
aux[t] and x[t+1], learns from last[t+1], and counts where token t is trained.

What `build_application_run` makes of the config is run as it is: reader, loader with four threads, collator that pads
to the longest of a batch, cross entropy with the soft teacher weighted 0.8^k, AdamW with fp32 master weights, gradients
clipped to 0.5, warm-up over 1.5 % of the steps and a cosine to 0, flex attention, FSDP over one rank, one checkpoint at
the end. Its vocabulary counts the trained tokens of the files. Beside what the command names (learning rate, epochs,
steps of the test, seed) these are not its defaults:

    batch_size                 rows that have about --batch-tokens tokens in the mean, instead of 1; an epoch's last,
                               incomplete batch is left out, as it does
    max_length                 the longest row, instead of 2048, so that no row is cut
    draft config               what it derives from the target, with the vocabulary's size and the store's layers
    log_interval               twenty times a run instead of every 50 steps
    target                     a folder with its config, embeddings and lm_head: the head is read through an index
                               only, which a checkpoint of one file lacks, and by name, which tied ones lack
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import torch
from layout import Layout, mean_tokens
from run_record import RunRecord
from safetensors.torch import save_file

from eyas.store.reader import StoreRow
from eyas.target.checkpoint import Target
from eyas.target.embeddings import input_embeddings
from eyas.target.head import Head

NAME = "specforge"


def write_row(folder: Path, number: int, row: StoreRow) -> None:
    """Row `number` in its layout."""
    torch.save(
        {
            "input_ids": row.tokens.long(),
            "loss_mask": row.loss_mask.long(),
            "hidden_state": row.last.clone()[None],
            "aux_hidden_state": row.aux.flatten(1).clone()[None],
        },
        folder / f"{number:08d}.ckpt",
    )


def batch_rows(layout: Layout, batch_tokens: int) -> int:
    """Rows of a batch that holds about `batch_tokens` tokens, padding not counted."""
    return max(1, min(len(layout.tokens), round(batch_tokens / mean_tokens(layout))))


def import_peer() -> None:
    """All that a run imports, so that the clock can start after it."""
    for name in ("application", "config", "distributed", "launch", "training.assembly", "export.to_sglang"):
        importlib.import_module(f"specforge.{name}")
    importlib.import_module("specforge.algorithms.eagle3.model")
    importlib.import_module("specforge.modeling.auto")


def train(args: Any, layout: Layout, out: Path) -> RunRecord:
    """A run in `out/specforge`, its head in `out/head`.

    Args:
        args: the command's.
        layout: in its files.
        out: the run's folder.
    """
    began = time.perf_counter()
    target = _target_folder(args.target, out / "target")
    config = _config(args, layout, target, out)
    rows = config.training.batch_size
    steps = config.training.max_steps or len(layout.tokens) // rows * args.epochs
    if not steps:
        raise ValueError(f"{len(layout.tokens)} rows make no batch of {rows}")
    record = RunRecord(layout, steps, began)
    config.training.log_interval = record.every
    importlib.import_module("transformers").set_seed(args.seed)
    os.environ["FSDP_SHARDING"] = config.training.fsdp_sharding
    distributed = importlib.import_module("specforge.distributed")
    _one_rank()
    distributed.init_distributed(timeout=config.training.dist_timeout)
    try:
        run = importlib.import_module("specforge.application").build_application_run(config)
        _watch(run.trainer, record)
        run.run()
    finally:
        distributed.destroy_distributed()
    importlib.import_module("specforge.export.to_sglang").export_to_sglang(
        config.output_dir, config.model.draft_model_config, str(out / "head")
    )
    return record


def _config(args: Any, layout: Layout, target: Path, out: Path) -> Any:
    """Its typed config of the run; its draft's is `out/draft.json`."""
    config_type = importlib.import_module("specforge.config").Config
    settings = {
        "model": {"target_model_path": str(target)},
        "data": {
            "hidden_states_path": str(layout.folder),
            "max_length": max(layout.tokens),
            "cache_dir": str(out / "cache"),
        },
        "training": {
            "strategy": "eagle3",
            "num_epochs": args.epochs,
            "max_steps": args.max_steps,
            "batch_size": batch_rows(layout, args.batch_tokens),
            "learning_rate": args.lr,
            "ttt_length": args.steps,
            "seed": args.seed,
            # FSDP wants an accelerator; DDP, its other wrapper, does not.
            **({"fsdp_sharding": "NO_SHARD"} if args.device == "cpu" else {}),
        },
        "run_id": NAME,
        "output_dir": str(out / NAME),
    }
    resolve = importlib.import_module("specforge.application").resolve_run
    loading = importlib.import_module("specforge.training.model_loading")
    config = config_type.model_validate(settings)
    provider = resolve(config).algorithm.providers.model.draft_config
    draft = loading.resolve_draft_config(config, provider=provider).to_dict()
    draft |= {
        "draft_vocab_size": args.draft_vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layout.layers},
    }
    (out / "draft.json").write_text(json.dumps(draft, indent=1) + "\n")
    settings["model"]["draft_model_config"] = str(out / "draft.json")
    return config_type.model_validate(settings)


def _target_folder(model: str, folder: Path) -> Path:
    """The target as far as its trainer reads it: config, embeddings, and lm_head under the names it asks for."""
    target = Target.load(model)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(target.dir / "config.json", folder / "config.json")
    names = {"model.embed_tokens.weight": input_embeddings(target), "lm_head.weight": Head.load(target).weight}
    save_file({name: tensor.clone() for name, tensor in names.items()}, folder / "target.safetensors")
    index = {"weight_map": dict.fromkeys(names, "target.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _one_rank() -> None:
    """A process group of this process alone, as its command makes one for a run on one GPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)


def _watch(trainer: Any, record: RunRecord) -> None:
    """Tell `record` of each step; its trainer has a logger, and no hook for the rows."""
    step = trainer.core.train_step

    def train_step(batch: Any, **context: Any) -> Any:
        result = step(batch, **context)
        record.saw(int(name.rpartition(":")[2]) for name in batch.sample_ids)
        record.stepped()
        return result

    def log(metrics: dict[str, Any], at: int) -> None:
        record.loss.append((at, float(metrics["loss"])))
        print(f"step {at}: loss {record.loss[-1][1]:.4f}", flush=True)

    trainer.core.train_step = train_step
    trainer._controller.logger = log
