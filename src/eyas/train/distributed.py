"""Several processes as one run: who they are, what they tell each other on the host, and how one's death ends all.

    torchrun --nproc-per-node 8 -m eyas train run.yaml

Before every optimiser step all ranks exchange a few numbers on the host (`World.sum`): how many rows count,
whether everyone has a batch, whether someone was told to stop. So all take the same number of steps whatever their
rows' lengths, and a rank that died is noticed within a step: its sockets close. A rank that waits for its GPU cannot
see that, so a thread of each rank (`_Watch`) looks at the others' signs of life, and ends the process should its main
thread hang.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from eyas.errors import ConfigError, EyasError, TrainError, first_line

torch_dist: Any = dist  # part of torch's documented names are not in its stubs' exports
_BEAT_S: Final = 1.0
_SILENT_S: Final = 60.0  # without a sign of life: a process that is alive gives one a second
_LEAVE_S: Final = 20.0  # that a process has to end by itself once another has
_TELL_S: Final = 4.0  # for which a reason is waited for, once a connection broke
_ENV: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(slots=True)
class World:
    """This process among those of the run.

    Attributes:
        rank, size: its number, and how many there are.
        device: where it computes.
        ending: set once the run ends by a rank's fault: torchrun's SIGTERM, which follows, must not hide the reason.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    ending: threading.Event = field(default_factory=threading.Event)
    _host: dist.ProcessGroup | None = None
    _watch: _Watch | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes and speaks."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Numbers added up over all ranks, in float64 on the host: [n] -> [n]."""
        if self._host is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        with self.named():
            dist.all_reduce(total, group=self._host)
        return total.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        if self._host is None:
            return [value]
        found: list[Any] = [None] * self.size
        with self.named():
            dist.all_gather_object(found, value, group=self._host)
        return found

    @contextlib.contextmanager
    def main_first(self, what: str) -> Iterator[None]:
        """All ranks leave the block together, and all raise where one did.

        Raises:
            TrainError: another rank could not `what`.
        """
        mine: EyasError | None = None
        try:
            yield
        except EyasError as error:
            mine = error
        told = self.gather(None if mine is None else str(mine))
        if mine is not None:
            raise mine
        for rank, text in enumerate(told):
            if text is not None:
                raise TrainError(f"rank {rank} could not {what}", "", text)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """What torch says within when a rank is gone becomes the reason of that rank.

        Raises:
            TrainError: another rank ended, or did not answer in time.
        """
        try:
            yield
        except (RuntimeError, ValueError) as error:  # gloo's own are plain RuntimeErrors
            if self._watch is None or not _is_of_a_connection(error):
                raise
            self.ending.set()
            raise TrainError(*self._watch.reason(first_line(error))) from error


class _Watch(threading.Thread):
    """Signs of life in the run's key-value store: mine are written, the others' are looked at."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(name="eyas-watch", daemon=True)
        self._store, self._rank, self._size = store, rank, size
        self._done = threading.Event()
        self._seen = {other: (b"", time.monotonic()) for other in range(size) if other != rank}
        self._beat = 0
        self.found: tuple[str, str, str] | None = None

    def run(self) -> None:
        """Until `stop`; ends the process where another has ended and the main thread does not notice."""
        found_s = None
        while not self._done.wait(_BEAT_S):
            self._look()
            if self.found and found_s is None:
                found_s = time.monotonic()
            if found_s is not None and time.monotonic() - found_s > _LEAVE_S:
                what, where, _ = self.found or ("another rank ended", "", "")
                # The main thread waits for a device that waits for the dead rank: no exception can reach it.
                sys.stderr.write(f"error {what}: {where}\n")
                sys.stderr.flush()
                os._exit(TrainError.exit_code)

    def stop(self) -> None:
        """End the thread."""
        self._done.set()
        if self.is_alive():
            self.join()

    def tell(self, reason: str) -> None:
        """Leave word of why this rank ends."""
        with contextlib.suppress(RuntimeError, ValueError):
            self._store.set(f"end/{self._rank}", reason[:2000])

    def reason(self, said: str) -> tuple[str, str, str]:
        """What, where and hint of a rank that is gone; waits a moment for its word."""
        began = time.monotonic()
        while time.monotonic() - began < _TELL_S and not self.found:
            time.sleep(_BEAT_S / 4)
        if self.found:
            return self.found
        # Its last sign may have been seen only now; whoever lives has given several since.
        now = time.monotonic()
        silent = [other for other, (_, since_s) in self._seen.items() if now - since_s > _TELL_S - 1.5 * _BEAT_S]
        who = f"rank {', '.join(map(str, silent))}" if silent else "another rank"
        said = said.split(". This is typically", maxsplit=1)[0]  # what gloo guesses
        return f"{who} is gone: killed, out of memory, or its machine is lost", said, _HINT

    def _look(self) -> None:
        self._beat += 1
        try:
            self._store.set(f"beat/{self._rank}", str(self._beat))
            now = time.monotonic()
            for other, (beat, since_s) in self._seen.items():
                if self._store.check([f"end/{other}"]):
                    reason = self._store.get(f"end/{other}").decode(errors="replace")
                    self.found = self.found or (f"rank {other} ended", reason, _HINT)
                found = self._store.get(f"beat/{other}") if self._store.check([f"beat/{other}"]) else b""
                if found != beat:
                    self._seen[other] = (found, now)
                elif now - since_s > _SILENT_S:
                    silent = (f"rank {other} is gone", f"no sign of life for {_SILENT_S:.0f} s", _HINT)
                    self.found = self.found or silent
        except (RuntimeError, ValueError) as error:
            self.found = self.found or ("the ranks' meeting point is gone", first_line(error), _HINT)


_HINT: Final = "see that rank's own output; the same command resumes at the last checkpoint"


def _is_of_a_connection(error: BaseException) -> bool:
    """Whether an error of torch speaks of other processes: it has no type of its own for gloo's."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "connection", "timed out", "socket", "monitoredbarrier"))


@contextlib.contextmanager
def open_world(
    device: str = "auto", *, timeout_s: float = 600.0, ending: threading.Event | None = None
) -> Iterator[World]:
    """The world that torchrun's environment describes, or this process alone.

    Args:
        device: torch device; `auto` is a GPU where there is one. Of several ranks each takes the GPU of its local rank.
        timeout_s: longest wait for one another.
        ending: see `World`.

    Raises:
        ConfigError: no such device, or an environment that is not complete. TrainError: a rank did not come.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        yield World(device=find_device(device, 0))
        return
    if missing := [name for name in _ENV if name not in os.environ]:
        raise ConfigError(f"the environment of several ranks lacks {', '.join(missing)}", "", "start it with torchrun")
    place = find_device(device, int(os.environ["LOCAL_RANK"]))
    if os.environ["WORLD_SIZE"] == "1":
        yield World(device=place)
        return
    world = _joined(place, timeout_s)
    world.ending = ending or world.ending
    assert world._watch is not None
    try:
        yield world
        with world.named():
            dist.barrier(group=world._host)  # nobody is told gone who has only finished first
    except BaseException as error:
        world.ending.set()
        world._watch.tell(str(error) if isinstance(error, EyasError) else f"{type(error).__name__}: {error}")
        _leave(world, failed=True)
        raise
    _leave(world, failed=False)


def _joined(place: torch.device, timeout_s: float) -> World:
    timeout = timedelta(seconds=timeout_s)
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, rank, size = next(torch_dist.rendezvous("env://", timeout=timeout))
        on_gpu = place.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=torch_dist.PrefixStore("torch", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=place if on_gpu else None,
        )
        host: Any = dist.new_group(backend="gloo", timeout=timeout)
        dist.monitored_barrier(group=host, timeout=timeout, wait_all_ranks=True)  # names those that are missing
    except (RuntimeError, ValueError) as error:
        raise TrainError("the ranks did not meet", where, first_line(error)) from error
    watch = _Watch(torch_dist.PrefixStore("eyas", store), rank, size)
    watch.start()
    return World(rank, size, place, _host=host, _watch=watch)


def _leave(world: World, *, failed: bool) -> None:
    assert world._watch is not None
    if failed:
        # Collectives of the device that wait for a dead rank would be waited for at the end of the process.
        threading.Thread(target=_end_soon, daemon=True).start()
        if world.device.type == "cuda":
            dist.distributed_c10d._abort_process_group()
            world._watch.stop()
            return
    world._watch.stop()
    with contextlib.suppress(RuntimeError, ValueError):
        dist.destroy_process_group()


def _end_soon() -> None:
    time.sleep(_LEAVE_S)
    sys.stderr.write("error the process did not end by itself\n")
    sys.stderr.flush()
    os._exit(TrainError.exit_code)


def find_device(name: str, local_rank: int) -> torch.device:
    """The torch device of a setting: `auto` is the GPU of this rank where there is one, else the CPU.

    Raises:
        ConfigError: no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"not a torch device: {name}", "train.device", first_line(error)) from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = local_rank if device.index is None else device.index
        if index >= count:
            raise ConfigError(f"there is no GPU {index}", "train.device", f"torch sees {count}")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


# --- the module of several ranks --------------------------------------------------------------------------------------


class Shared:
    """A module whose gradients become those of all ranks' batches together.

    The module's forward must give a loss that is already divided by what all ranks count (`World.sum`): gradients are
    added up over the ranks, not averaged.

    Args:
        module: its forward gives the loss of one batch; parameters are equal on every rank.
        mode: `ddp` keeps whole copies, `fsdp` spreads weights, gradients and optimiser state over the ranks.
    """

    def __init__(self, module: nn.Module, world: World, mode: Literal["ddp", "fsdp"] = "ddp") -> None:
        self._world = world
        self._inner: nn.Module = module
        if world.size == 1:
            return
        if mode == "fsdp":
            mesh = dist.device_mesh.init_device_mesh(world.device.type, (world.size,))
            # One group: the objective uses the one layer's weights at every step, so there is nothing to gather late.
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
            assert isinstance(module, FSDPModule)
        else:
            ids = [world.device] if world.device.type == "cuda" else None
            known = inspect.signature(DistributedDataParallel).parameters
            # Buffers never change here. The older name is deprecated in torch 2.13, and the newer unknown to 2.11.
            name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
            options: dict[str, Any] = {name: False, "device_ids": ids, "gradient_as_bucket_view": True}
            self._inner = DistributedDataParallel(module, **options)

    def __call__(self, *args: Any, last: bool = True, **kwargs: Any) -> Any:
        """The module's forward; with `last` (of the batches accumulated) the next backward adds up over the ranks."""
        match self._inner:
            case DistributedDataParallel() as ddp:
                with contextlib.nullcontext() if last else ddp.no_sync():
                    return ddp(*args, **kwargs)
            case FSDPModule() as sharded:
                sharded.set_requires_gradient_sync(last)
                return sharded(*args, **kwargs)
            case module:
                return module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of the loss. Both ways average over the ranks, which the factor takes back."""
        with self._world.named():
            (loss * self._world.size).backward()
