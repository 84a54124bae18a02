"""speculators 0.9.0's EAGLE-3 training on rows of an Eyas store: its own config, model, data set, loader and Trainer.

Its layout: a file a row, `hidden_states/hs_12.safetensors`: `token_ids` [T] int64 and `hidden_states` [T, 4, H], the
layers shallow to deep and `last` behind them; the loss mask lies beside them here, since the table that holds it for
its data set is read by a package that may be missing. Nothing is shifted on disk: its loader moves tokens, teacher and
mask one to the left, so that row t reads aux[t] and x[t+1], learns from last[t+1], and counts where token t+1 is
trained. It numbers layers by how many were run: the output of layer 1 is layer 2.

The rest is its `ArrowDataset`, its sampler that packs rows and its loader with twelve processes, its Trainer: fp32
weights under bf16 autocast, KL loss with all steps weighted alike, Muon with AdamW for what is no matrix, both at
--lr (`--optimizer adamw`: AdamW alone), weight decay, gradients clipped to 1.0, warm-up over 1 % of the steps and a
line to 0, embeddings and lm_head (the target's rows) frozen, a checkpoint an epoch. Its vocabulary counts the trained
tokens of the rows. Beside what the command names (the learning rate, 1e-3 there, epochs, seed, --steps, 3 there, and
--batch-tokens, 8192 there too) these are not its defaults:

    verifier_norm              left out: it stores states from before the target's final norm, a store those behind it
    norms                      `--norms 3.1` (the default here): a norm for each layer's states and normed states fed
                               back, and none before the residual, which is what servers and `eyas export` know and
                               nearest to its default; `plain`: EAGLE-3 without them; `own`: its default, which has one
                               norm for all layers' states and one before the residual, and which export refuses
    full_attention_indices     its layer attends to all tokens, as both servers do, instead of to 2048
    loss_implementation        eager where its fused loss does not compile (torch below 2.12, CPU)
    train_data_ratio           all rows are trained on, and none are held out: its loaders want some for validation
    scheduler_total_steps      the run's; it multiplies the first epoch's batches, and packing differs by epoch
    log_freq                   twenty times a run instead of each step, which waits for the GPU
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import importlib
import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from layout import Layout, read_counts
from run_record import RunRecord
from safetensors import safe_open
from safetensors.torch import save_file

from eyas.store.reader import StoreRow

_NORMS: dict[str, dict[str, bool]] = {
    "own": {},
    "3.1": {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": True, "norm_output": True},
    "plain": {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False},
}


def write_row(folder: Path, number: int, row: StoreRow) -> None:
    """Row `number` in its layout."""
    path = _file(folder, number)
    path.parent.mkdir(exist_ok=True)
    tensors = {
        "hidden_states": torch.cat([row.aux, row.last[:, None]], dim=1),
        "token_ids": row.tokens.long(),
        "loss_mask": row.loss_mask.long(),
    }
    save_file(tensors, path)


def _file(folder: Path, number: int) -> Path:
    return folder / "hidden_states" / f"hs_{number}.safetensors"


@dataclass(frozen=True)
class Table:
    """The rows' tokens and masks as its data set asks a table for them, from the files of a layout."""

    folder: Path
    seq_len: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.seq_len)

    def __getitem__(self, key: Any) -> Any:
        if key == "seq_len":
            return self.seq_len
        if key >= len(self):
            raise IndexError(key)
        with safe_open(_file(self.folder, key), framework="pt") as held:
            return {"input_ids": held.get_tensor("token_ids"), "loss_mask": held.get_tensor("loss_mask")}

    def select(self, rows: range) -> Table:
        """The table itself: all its rows are asked for."""
        if rows != range(len(self)):
            raise ValueError("a layout is trained on as a whole")
        return self

    def with_format(self, _: None) -> Table:
        """The table itself, whose lengths are plain numbers."""
        return self


def open_table(folder: str | Path) -> Table:
    """The table of the layout in `folder`."""
    return Table(Path(folder), tuple(read_counts(Path(folder))))


def import_peer() -> None:
    """All that a run imports, so that the clock can start after it."""
    importlib.import_module("speculators.train.cli")


def train(args: Any, layout: Layout, out: Path) -> RunRecord:
    """A run in `out/speculators`, its head in `out/head`.

    Args:
        args: the command's.
        layout: in its files.
        out: the run's folder.
    """
    record = RunRecord(layout, 0, time.perf_counter())
    cli = importlib.import_module("speculators.train.cli")
    save_path = out / "speculators"
    shutil.rmtree(save_path, ignore_errors=True)
    options = _options(args, layout, save_path)
    cli.set_seed(options.seed, options.deterministic_cuda)
    model = _model(cli, options, out)
    loader = _loader(options, model)
    batches, epochs = _batches(loader, options)
    record.total_steps = len(batches)
    call_options, _ = type(model).get_trainer_kwargs(**vars(options))
    if args.device == "cpu":
        _on_cpu()
    trainer = cli.Trainer(model, _trainer_config(cli, options, call_options, epochs, record), loader, None)
    if args.device == "cpu":
        trainer.device_type = "cpu"
    _watch(trainer, batches, record)
    trainer.run_training()
    shutil.rmtree(out / "head", ignore_errors=True)
    (out / "head").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(save_path / str(epochs - 1) / name, out / "head" / name)
    return record


def _options(args: Any, layout: Layout, save_path: Path) -> argparse.Namespace:
    """Its flat settings: ours over its defaults."""
    config_type = importlib.import_module("speculators.train.config").TrainConfig
    fused = args.device == "cuda" and torch.__version__ >= "2.12"
    chosen: dict[str, Any] = {
        "speculator_type": "eagle3",
        "verifier_name_or_path": str(args.target),
        "data_path": str(layout.folder),
        "save_path": str(save_path),
        "total_seq_len": args.batch_tokens,
        "lr": args.lr,
        "epochs": args.epochs,
        "seed": args.seed,
        "ttt_steps": args.steps,
        "draft_vocab_size": args.draft_vocab,
        "target_layer_ids": [layer + 1 for layer in layout.layers],
        "full_attention_indices": [0],
        "loss_implementation": "fused" if fused else "eager",
        "on_missing": "raise",
        **_NORMS[args.norms],
    }
    if args.max_steps is not None:
        chosen["max_steps"] = args.max_steps
    if args.optimizer is not None:
        chosen["optimizer"] = args.optimizer
    if args.device == "cpu":
        chosen["hidden_states_dtype"] = "float32"
    if args.workers is not None:
        chosen["num_workers"] = args.workers
    config = config_type.from_sources(cli=chosen, argv=[])
    return argparse.Namespace(**config.flatten())


def _model(cli: Any, options: argparse.Namespace, out: Path) -> Any:
    """Its draft over its vocabulary, with the target's embeddings and head."""
    mapping = importlib.import_module("speculators.train.vocab_mapping")
    options.token_freq_path = str(out / "token_freq.pt")
    Path(options.token_freq_path).unlink(missing_ok=True)  # it counts only where there is none
    mapping.save_token_frequency_distribution(open_table(options.data_path), options.token_freq_path)
    with (Path(options.data_path) / "vocabulary.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run of the same layout may be here
        for held in Path(options.data_path).glob("*2*-*.npy"):
            held.unlink()  # as above
        d2t, t2d, size = cli.parse_vocab_mappings(options)
    model = cli.build_draft_model(options, cli.SpeculatorModel.registry["eagle3"], t2d, d2t, size)
    model.verifier_norm = torch.nn.Identity()
    return model


def _loader(options: argparse.Namespace, model: Any) -> Any:
    """Its loader over its data set of all rows."""
    data: Any = importlib.import_module("speculators.train.data")
    dataloader = importlib.import_module("speculators.train.dataloader")
    shift = importlib.import_module("speculators.models.eagle3.data").shift_batch
    data.load_from_disk = open_table
    dtype = getattr(torch, options.hidden_states_dtype)
    rows = data.ArrowDataset(
        options.total_seq_len, options.data_path, on_missing=options.on_missing, hidden_states_dtype=dtype
    )
    return dataloader._setup_dataloader(
        rows,
        options.total_seq_len,
        model.config.transformer_layer_config.hidden_size,
        num_workers=options.num_workers,
        num_target_layers=len(model.target_layer_ids),
        prefetch_factor=options.prefetch_factor,
        preprocess=shift,
        seed=options.seed,
    )


def _batches(loader: Any, options: argparse.Namespace) -> tuple[list[list[int]], int]:
    """(rows of each step of the run, epochs that it begins)."""
    found: list[list[int]] = []
    for epoch in range(options.epochs):
        found += [[int(row) for row in batch] for batch in loader.batch_sampler._generate_batches(epoch)]
        if options.max_steps is not None and len(found) >= options.max_steps:
            return found[: options.max_steps], epoch + 1
    return found, options.epochs


def _trainer_config(
    cli: Any, options: argparse.Namespace, call_options: dict[str, Any], epochs: int, record: RunRecord
) -> Any:
    """Its Trainer's settings, those of the same name taken over."""
    names = set(cli.TrainerConfig._fields) & vars(options).keys()
    taken = {name: getattr(options, name) for name in names} | {
        "num_epochs": epochs,
        "resume_from_checkpoint": False,
        "train_call_kwargs": call_options,
        "scheduler_total_steps": record.total_steps,
        "hidden_states_dtype": getattr(torch, options.hidden_states_dtype),
        "log_freq": record.every,
    }
    return cli.TrainerConfig(**taken)


def _watch(trainer: Any, batches: list[list[int]], record: RunRecord) -> None:
    """Tell `record` of each step and of what its Trainer logs."""
    steps = iter(batches)

    def stepped() -> None:
        record.saw(next(steps))
        record.stepped()

    trainer.train_epoch = functools.partial(trainer.train_epoch, step_callback=stepped)
    logger = logging.getLogger("speculators.metrics")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers = [_Losses(record)]


class _Losses(logging.Handler):
    """Takes the loss out of what its Trainer logs."""

    def __init__(self, record: RunRecord) -> None:
        super().__init__()
        self._record = record

    def emit(self, record: logging.LogRecord) -> None:
        said: Any = record.msg
        if isinstance(said, dict) and "train" in said:
            self._record.loss.append((said["global_step"] + 1, float(said["train"]["loss"])))
            print(f"step {said['global_step'] + 1}: loss {self._record.loss[-1][1]:.4f}", flush=True)


def _on_cpu() -> None:
    """A rehearsal: its Trainer knows accelerators only."""
    trainer: Any = importlib.import_module("speculators.train.trainer")
    trainer.get_local_rank = lambda: torch.device("cpu")
    torch.accelerator.synchronize = lambda *_: None
