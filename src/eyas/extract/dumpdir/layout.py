"""Where a dump keeps what, and how its pieces become states. Pure: values in, tensors out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from eyas.config import DumpdirConfig
from eyas.errors import ConfigError

TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin")
_LAYER: Final = "{layer}"
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


class Unfinished(Exception):
    """A dump that is not all there, or not yet: looking again may help."""


class Misfit(Exception):
    """A dump that is not as the settings say: looking again does not help."""

    reason = "dump-layout"


class MarkedEarly(Misfit):
    """A dump whose states are younger than the marker that vouches for them.

    It may be half of one dump and half of another: a server that counts anew writes over what lies there, and until it
    has set its own marker, the old one stands beside new files.
    """

    reason = "dump-marked-early"


@dataclass(frozen=True, slots=True)
class Place:
    """`FILE` or `FILE:KEY` inside a dump's folder.

    Attributes:
        file: its name; `*` stands for the number of a chunk, `{layer}` for a captured layer.
        key: of the dict in the file; empty when the file is the value.
    """

    file: str
    key: str

    @classmethod
    def parse(cls, text: str, setting: str) -> Place:
        """Raises ConfigError for what cannot name a file of the folder."""
        file, _, key = text.partition(":")
        if not file or "/" in file or file in (".", "..") or file.count("*") > 1:
            hint = "FILE or FILE:KEY, the file lies in the dump's own folder, with at most one * for the chunk's number"
            raise ConfigError(f"not a place in a dump: {text!r}", setting, hint)
        return cls(file, key)

    @property
    def is_torch(self) -> bool:
        """Whether the file is one of torch's; else it is text."""
        return self.file.endswith(TORCH_SUFFIXES)

    @property
    def by_layer(self) -> bool:
        """Whether every layer has a place of its own."""
        return _LAYER in self.file or _LAYER in self.key

    def of_layer(self, layer: int) -> Place:
        return Place(self.file.replace(_LAYER, str(layer)), self.key.replace(_LAYER, str(layer)))

    def files(self, names: Iterable[str]) -> list[str]:
        """Which of a folder's files are meant, chunks in the order of their numbers.

        Raises:
            Unfinished: none is there.
        """
        before, star, after = self.file.partition("*")
        if not star:
            found = [name for name in names if name == self.file]
        else:
            pattern = re.compile(rf"{re.escape(before)}([0-9]+){re.escape(after)}")
            matches = sorted((int(match[1]), name) for name in names if (match := pattern.fullmatch(name)))
            found = [name for _, name in matches]
        if not found:
            raise Unfinished(f"no {self.file} yet")
        return found

    def value(self, content: Any) -> Any:
        """What the key names in a file's content.

        Raises:
            Misfit: the content has no such key, or is a dict and no key is named.
        """
        if self.key:
            if not isinstance(content, dict) or self.key not in content:
                known = f"keys {sorted(map(str, content))[:8]}" if isinstance(content, dict) else type(content).__name__
                raise Misfit(f"{self.file} has no {self.key}, it holds {known}")
            return content[self.key]
        if isinstance(content, dict):
            raise Misfit(f"{self.file} holds a dict: name one of its keys {sorted(map(str, content))[:8]}")
        return content


@dataclass(frozen=True, slots=True)
class Layout:
    """A dump as the settings describe it.

    Attributes:
        done: name of the marker file that is written last.
        count, aux, last: where the token count and the states are.
        layers: the captured layers, in the order of the columns.
        hidden_size: H.
    """

    done: str
    count: Place
    aux: Place
    last: Place
    layers: tuple[int, ...]
    hidden_size: int

    @classmethod
    def of(cls, cfg: DumpdirConfig, layers: Sequence[int], hidden_size: int) -> Layout:
        """Raises ConfigError for places that cannot be."""
        count = Place.parse(cfg.num_tokens, "dumpdir.num_tokens")
        aux = Place.parse(cfg.aux_file, "dumpdir.aux_file")
        last = Place.parse(cfg.last_file, "dumpdir.last_file")
        for place, setting in ((aux, "dumpdir.aux_file"), (last, "dumpdir.last_file")):
            if not place.is_torch:
                raise ConfigError("states lie in files of torch", setting, f"they end in {', '.join(TORCH_SUFFIXES)}")
        if count.by_layer or last.by_layer:
            raise ConfigError("{layer} stands in the place of the layers' states only", "dumpdir.aux_file")
        if "/" in cfg.done or not cfg.done:
            raise ConfigError("not a file name", "dumpdir.done")
        return cls(cfg.done, count, aux, last, tuple(layers), hidden_size)

    def aux_of(self, values: Sequence[Any], tokens: int) -> torch.Tensor:
        """States of all layers [T, A, H] from the chunks' values, each [t, A*H], [t, A, H] or A times [t, H].

        Args:
            values: of the files, chunks in order.
            tokens: T.

        Raises:
            Misfit: another shape or dtype, or more rows.
            Unfinished: fewer rows.
        """
        return _joined([self._aux(value, tokens) for value in values], tokens, "aux")

    def last_of(self, values: Sequence[Any], tokens: int) -> torch.Tensor:
        """[T, H] of one layer from the chunks' values, each [t, H] or a list of such. Raises as `aux_of`."""
        parts = [part for value in values for part in (value if isinstance(value, list | tuple) else [value])]
        return _joined([self._plain(part, self.hidden_size) for part in parts], tokens, "states")

    def _aux(self, value: Any, tokens: int) -> torch.Tensor:
        columns, width = len(self.layers), self.hidden_size
        if not isinstance(value, list | tuple):
            tensor = _states(value)
            if tensor.dim() == 4 and tensor.shape[0] == 1:
                tensor = tensor[0]
            if tensor.dim() == 3 and tensor.shape[1:] == (columns, width):
                return tensor
            return self._plain(tensor, columns * width).reshape(-1, columns, width)
        tensors = [_states(part) for part in value]
        if len(tensors) == columns and all(_is_layer(tensor, width) for tensor in tensors):
            if tokens == columns > 1 and all(tensor.shape == (1, columns, width) for tensor in tensors):
                raise Misfit(f"a list of {columns} states [1, {columns}, {width}]: layers, or chunks of one token?")
            layers = [self._plain(tensor, width) for tensor in tensors]
            if len({(tensor.shape, tensor.dtype) for tensor in layers}) > 1 or len(layers[0]) > tokens:
                raise Misfit(f"layers of shapes {[list(tensor.shape) for tensor in tensors]} for {tokens} tokens")
            return torch.stack(layers, dim=1)
        return torch.cat([self._aux(tensor, tokens) for tensor in _few(tensors, tokens)])

    def _plain(self, value: Any, width: int) -> torch.Tensor:
        """[t, width], a leading dimension of one dropped."""
        tensor = _states(value)
        shape = tensor.shape
        if tensor.dim() == 3 and shape[0] == 1:
            tensor = tensor[0]
        if tensor.dim() != 2 or tensor.shape[1] != width:
            known = f"{len(self.layers)} layers of hidden size {self.hidden_size}"
            raise Misfit(f"states of shape {list(shape)}, expected [T, {width}] ({known})")
        return tensor


def count_of(contents: Sequence[Any]) -> int:
    """The token count, summed over chunks; each a number, a tensor of one, or text.

    Raises:
        Misfit: something else.
    """
    return sum(_count(content) for content in contents)


def parse_text(text: str, has_key: bool) -> Any:
    """Content of a text file: a number, or JSON where a key is looked up in it.

    Raises:
        Unfinished: neither, or not yet.
    """
    try:
        return json.loads(text) if has_key else int(text.strip())
    except (ValueError, RecursionError) as error:
        raise Unfinished(f"no {'JSON' if has_key else 'number'} in it yet") from error


def _count(content: Any) -> int:
    if isinstance(content, torch.Tensor) and content.numel() == 1 and not content.dtype.is_floating_point:
        content = content.item()
    if not isinstance(content, int) or isinstance(content, bool) or content < 0:
        raise Misfit(f"the token count is {str(content)[:40]!r}")
    return content


def _states(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise Misfit(f"expected a tensor, found {type(value).__name__}")
    if value.dtype not in _DTYPES or value.layout is not torch.strided or not 2 <= value.dim() <= 4:
        raise Misfit(f"states of dtype {str(value.dtype).removeprefix('torch.')} and shape {list(value.shape)}")
    if value.numel() * value.itemsize > value.untyped_storage().nbytes():
        raise Misfit(f"states of shape {list(value.shape)} that are fewer in the file")
    return value


def _is_layer(tensor: torch.Tensor, width: int) -> bool:
    """Whether states can be one layer's, [t, H] or [1, t, H]; [t, A, H] is a chunk of all layers."""
    return tensor.shape[-1] == width and (tensor.dim() == 2 or (tensor.dim() == 3 and len(tensor) == 1))


def _joined(parts: Sequence[torch.Tensor], tokens: int, name: str) -> torch.Tensor:
    """Chunks as one; nothing is copied before it is known to be of the size agreed."""
    if len({part.dtype for part in parts}) > 1:
        raise Misfit("chunks of different dtypes")
    rows = sum(len(part) for part in parts)
    if rows > tokens:
        raise Misfit(f"{name} of {rows} rows for {tokens} tokens")
    if rows < tokens:
        raise Unfinished(f"{name} of {rows} rows for {tokens} tokens")
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _few(chunks: Sequence[torch.Tensor], tokens: int) -> Sequence[torch.Tensor]:
    """The chunks, if they are not more than the rows that they may hold."""
    if not chunks or len({chunk.dtype for chunk in chunks}) > 1 or sum(len(chunk) for chunk in chunks) > tokens:
        raise Misfit(f"a list of {len(chunks)} states for {tokens} tokens")
    return chunks
