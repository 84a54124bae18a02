"""Checkpoints of a training run: written whole or not at all, and read only where they are whole and of this run.

    checkpoints/step-00000500/
        weights.safetensors     the trained weights, float32, under their published names
        optimizer.safetensors   `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`
        rng.safetensors         generator states: `cpu.RANK`, `cuda.RANK`
        state.json              step, position in the data, settings, identity, metric; the files' sizes and hashes

Everything is gathered on rank 0 and lies there unsharded, so that the files do not depend on how the run was spread,
and as safetensors, so that none of them can hold code. A folder is written under a temporary name, synced, and renamed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from eyas.capture import strictjson
from eyas.capture.folder import read_limited
from eyas.disk import fsync_dir
from eyas.errors import ConfigError, IntegrityError, StoreError, first_line
from eyas.store.files import disk_errors, hash_range, make_folder, open_regular, write_atomic
from eyas.train.distributed import World

FORMAT: Final = 1
WEIGHTS: Final = "weights.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"
RNG: Final = "rng.safetensors"
STATE: Final = "state.json"
_FILES: Final = (WEIGHTS, OPTIMIZER, RNG)
_NAME: Final = re.compile(r"step-(\d{8,})")
_PART: Final = ".part-"
_STATE_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is.

    Attributes:
        step: optimiser steps done.
        total: optimiser steps of the whole run, by which the learning rate goes; fixed at its start.
        tokens: positions read so far, over all ranks.
        data: the reader's own account of its position; JSON.
        metric: simulated acceptance length at this step, where it was evaluated.
        best: the highest one so far, and `best_step` its step.
        untrained: the one before the first step.
    """

    step: int = 0
    total: int = 0
    tokens: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    metric: float | None = None
    best: float | None = None
    best_step: int | None = None
    untrained: float | None = None


def superfluous(metrics: Mapping[int, float | None], keep_last: int) -> list[int]:
    """Steps whose checkpoints can go: all but the last `keep_last` and the best one, the earlier one of equals."""
    kept = set(sorted(metrics)[-keep_last:])
    measured = [(metric, -step) for step, metric in metrics.items() if metric is not None]
    if measured:
        kept.add(-max(measured)[1])
    return sorted(metrics.keys() - kept)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they lie; made at the first one.
        settings: those on which the curve depends; JSON. A checkpoint of others is refused.
        identity: what else must be the same: store, vocabulary, number of ranks; JSON.
        keep_last: how many stay besides the best one.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], identity: Mapping[str, Any], *, keep_last: int = 2
    ) -> None:
        self.folder, self._keep_last = folder, keep_last
        # As JSON gives them back, so that tuples and lists are one thing.
        self._settings, self._identity = json.loads(json.dumps(settings)), json.loads(json.dumps(identity))

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, ascending."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []  # noqa: PTH208
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def latest(self) -> Path | None:
        """The last one, or None."""
        return self.path(steps[-1]) if (steps := self.steps()) else None

    def best(self) -> Path | None:
        """The one with the highest metric, or None where none was evaluated; damaged ones are passed over."""
        measured = [(metric, -step) for step, metric in self._metrics().items() if metric is not None]
        return self.path(-max(measured)[1]) if measured else None

    def save(self, module: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, world: World) -> Path:
        """Write one. Every rank calls it; rank 0 writes, and the others wait for it.

        Raises:
            StoreError: the disk.
        """
        weights = {name: _whole(value, world) for name, value in module.state_dict().items()}
        moments = {name: _whole(value, world) for name, value in _optimizer_tensors(module, optimizer)}
        rng = {name: state for states in world.gather(_rng_states(world)) for name, state in states.items()}
        final = self.path(progress.step)
        with world.main_first("save the checkpoint"):
            if world.is_main and not final.exists():
                with disk_errors(final):
                    self._write(final, {WEIGHTS: weights, OPTIMIZER: moments, RNG: rng}, progress)
                    self._tidy()
        return final

    def load(self, path: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None, world: World) -> Progress:
        """Put a checkpoint's state into place, the generators' included. Without an optimizer, the weights alone.

        Raises:
            IntegrityError: it is torn or damaged. ConfigError: it is another run's, or of another drafter.
        """
        document = self._checked(path)
        self._same_run(path, document)
        _load_weights(path / WEIGHTS, module)
        if optimizer is not None:
            _load_optimizer(path / OPTIMIZER, module, optimizer)
            _set_rng(path / RNG, world)
        return Progress(**document["progress"])

    def sweep(self) -> None:
        """Remove what killed sessions left half written. Only for who holds the run's lock."""
        for name in os.listdir(self.folder) if self.folder.is_dir() else []:  # noqa: PTH208
            if name.startswith(_PART):
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def _write(self, final: Path, tensors: Mapping[str, dict[str, torch.Tensor]], progress: Progress) -> None:
        make_folder(self.folder)
        part = self.folder / f"{_PART}{final.name}-{os.getpid()}"
        shutil.rmtree(part, ignore_errors=True)
        try:
            make_folder(part)
            files: dict[str, dict[str, Any]] = {}
            for name, values in tensors.items():
                _write_tensors(values, part / name)
                files[name] = _seal(part / name)
            document = {
                "format": FORMAT,
                "progress": asdict(progress),
                "settings": self._settings,
                "identity": self._identity,
                "files": files,
            }
            write_atomic(part / STATE, (json.dumps(document, indent=1) + "\n").encode())
            part.rename(final)
            fsync_dir(self.folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise

    def _tidy(self) -> None:
        for step in superfluous(self._metrics(), self._keep_last):
            path = self.path(step)
            # First out of sight: a folder that is removed file by file would look torn to a session that starts now.
            gone = self.folder / f"{_PART}{path.name}-gone"
            shutil.rmtree(gone, ignore_errors=True)
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _metrics(self) -> dict[int, float | None]:
        found: dict[int, float | None] = {}
        for step in self.steps():
            try:
                found[step] = _document(self.path(step))["progress"]["metric"]
            except IntegrityError:
                continue  # refused by name when it is asked for; here it only counts as neither old nor best
        return found

    def _checked(self, path: Path) -> dict[str, Any]:
        """The state document of a checkpoint whose files are what it says."""
        document = _document(path)
        for name, said in document["files"].items():
            found = _measure(path / name, path, self._hint(path))
            if found != said:
                raise IntegrityError("the checkpoint is damaged", path / name, self._hint(path))
        return document

    def _same_run(self, path: Path, document: Mapping[str, Any]) -> None:
        for kind, mine, theirs in (
            ("with other settings", self._settings, document["settings"]),
            ("of another run", self._identity, document["identity"]),
        ):
            if changes := _changes(theirs, mine):
                raise ConfigError(
                    f"the checkpoint is {kind}: {'; '.join(changes)}", path, "set them back, or name another --out"
                )

    def _hint(self, path: Path) -> str:
        earlier = [step for step in self.steps() if self.path(step) != path]
        return f"remove it to resume at step {earlier[-1]}" if earlier else "remove it to begin anew"


def _document(path: Path) -> dict[str, Any]:
    """state.json, every field of it there and of its kind."""
    hint = "remove it; the next session takes the one before"
    try:
        found = strictjson.loads(read_limited(path / STATE, _STATE_BYTES)[0], _STATE_BYTES)
        if found["format"] != FORMAT:
            raise IntegrityError(f"a checkpoint of format {found['format']}, this is {FORMAT}", path, hint)
        Progress(**found["progress"])
        kinds = {"settings": dict, "identity": dict, "files": dict}
        if any(not isinstance(found[key], kind) for key, kind in kinds.items()) or set(found["files"]) != set(_FILES):
            raise ValueError("fields are missing")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError("the checkpoint is torn", path, f"{error}; {hint}") from error
    return found


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    keys = sorted({*before, *now})
    return [f"{key} was {before.get(key)}, is {now.get(key)}" for key in keys if before.get(key) != now.get(key)]


def _measure(path: Path, checkpoint: Path, hint: str) -> dict[str, Any]:
    try:
        fd = open_regular(path)
        try:
            size = os.fstat(fd).st_size
            return {"bytes": size, "xxh3": f"{hash_range(fd, 0, size):016x}"}
        finally:
            os.close(fd)
    except OSError as error:
        raise IntegrityError("the checkpoint is torn", checkpoint, f"{path.name}: {error.strerror}; {hint}") from error


def _write_tensors(values: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(values, path)
    except SafetensorError as error:  # its own for a disk that is full, too
        raise StoreError("cannot write the checkpoint", path, first_line(error)) from error


def _seal(path: Path) -> dict[str, Any]:
    """Size and hash of a file that is now on the disk."""
    fd = open_regular(path)
    try:
        os.fsync(fd)
        size = os.fstat(fd).st_size
        return {"bytes": size, "xxh3": f"{hash_range(fd, 0, size):016x}"}
    finally:
        os.close(fd)


# --- tensors ----------------------------------------------------------------------------------------------------------


def _whole(value: torch.Tensor, world: World) -> torch.Tensor:
    """A tensor gathered from its shards (all ranks take part), on the CPU of rank 0; elsewhere an empty one."""
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().cpu().contiguous().clone() if world.is_main else torch.empty(0)


def _optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{key}.{name}", value


def _like(full: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A whole tensor, as `parameter` is spread and where it lies; every rank has read the file itself."""
    if isinstance(parameter, DTensor):
        moved = full.to(parameter.device)
        return distribute_tensor(moved, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return full.to(parameter.device)


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
    except (SafetensorError, OSError) as error:
        raise IntegrityError("the checkpoint is damaged", path, str(error)) from error


@torch.no_grad()
def _load_weights(path: Path, module: nn.Module) -> None:
    found, mine = _read(path), module.state_dict()
    if {name: tuple(value.shape) for name, value in found.items()} != {k: tuple(v.shape) for k, v in mine.items()}:
        raise ConfigError("the checkpoint is of another drafter", path, "other names or shapes; name another --out")
    for name, value in mine.items():
        value.copy_(_like(found[name].to(value.dtype), value))


def _load_optimizer(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameters = dict(module.named_parameters())
    for full_name, value in _read(path).items():
        key, _, name = full_name.partition(".")
        if name not in parameters:
            raise ConfigError("the checkpoint is of another drafter", f"{path}: {full_name}", "name another --out")
        parameter = parameters[name]
        # Moments are spread as their weights are; the step count is one number on every rank.
        placed = _like(value, parameter) if value.shape == parameter.shape else value.to(parameter.device)
        optimizer.state[parameter][key] = placed


def _rng_states(world: World) -> dict[str, torch.Tensor]:
    states = {f"cpu.{world.rank}": torch.get_rng_state()}
    if world.device.type == "cuda":
        states[f"cuda.{world.rank}"] = torch.cuda.get_rng_state(world.device)
    return states


def _set_rng(path: Path, world: World) -> None:
    states = _read(path)
    if (cpu := states.get(f"cpu.{world.rank}")) is not None:
        torch.set_rng_state(cpu)
    if world.device.type == "cuda" and (cuda := states.get(f"cuda.{world.rank}")) is not None:
        torch.cuda.set_rng_state(cuda, world.device)
