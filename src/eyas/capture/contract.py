"""What server and client agree on before the first request, and what every record must prove.

Runs inside the inference server too: standard library and xxhash only. Whatever is read here may come from anybody: it
is a ValueError unless every field is of its type and within its bounds.

    CaptureSpec   which states, in which dtype, of which model; its hash `spec_id` names the agreement
    RequestId     eyas.<run8>.<session8>.<row:08d>.<attempt:02d>, the identity that travels with the tensors
    Refusal       the closed set of names for "this record will not come"
    *_hash        xxh3 digests of token ids, positions and field bytes
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

import xxhash

from eyas.capture.strictjson import build, loads, shown

CONTRACT_VERSION: Final = 1
REPLY_KEY: Final = "eyas"  # meta_info[REPLY_KEY] of a reply holds [CaptureReply as a dict]
SPEC_PARAM: Final = "eyas_spec"  # custom_params: the client's spec_id
LAST_PARAM: Final = "eyas_last"  # custom_params: flat runs [start, stop, start, stop, ...] where `last` is kept
PROBE_ROW: Final = 99_999_999  # the row number of start-up probes; no corpus may be that long

#: dtype name -> (safetensors name, bytes an item). States in `fp8_e4m3` are bytes: codes, then a scale (encoding.py).
DTYPES: Final[Mapping[str, tuple[str, int]]] = {
    "bf16": ("BF16", 2),
    "f16": ("F16", 2),
    "f32": ("F32", 4),
    "fp8_e4m3": ("U8", 1),
}
SCALE_BYTES: Final = 4  # one float32 behind the codes of each quantised state
LAST_MODES: Final = ("loss", "all")
MAX_NOTE_BYTES: Final = 64 << 10  # settings, spec.json and failure notes are a few hundred
_MAX_HEADER_BYTES: Final = 1 << 20  # a record's header lists its chunks
_MAX_SIZE: Final = 2**31 - 1  # layers, widths, vocabularies


class Refusal(StrEnum):
    """Why the server will not deliver a record. Closed: clients match on it."""

    SPOOL_FULL = "spool-full"  # over quota: back-pressure, not an attempt
    ROW_TOO_LARGE = "row-too-large"  # larger than the whole quota
    PREFIX_CACHED = "prefix-cached"  # the radix cache kept rows from being computed
    CHUNK_GAP = "chunk-gap"  # a chunk does not start where the last one ended
    TOKENS_DIFFER = "tokens-differ"  # the forward's input_ids are not the request's
    RETRACTED = "retracted"  # the scheduler took the request back and began again
    ABORTED = "aborted"
    SPEC_DIFFERS = "spec-differs"  # the client asked for another spec_id
    BAD_REQUEST = "bad-request"  # malformed request id or positions
    NO_STATES = "no-states"  # the forward brought no hidden states of the agreed shape
    WRITE_FAILED = "write-failed"
    PLUGIN_ERROR = "plugin-error"


@dataclass(frozen=True, slots=True)
class Refused:
    """No record will come of a request."""

    reason: Refusal
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CaptureSpec:
    """The agreement. Two specs with the same `spec_id` produce interchangeable records.

    Attributes:
        layers: 0-based decoder layers whose *output* (residual stream after the layer) is captured, ascending.
            Layer i's output is Hugging Face's `hidden_states[i + 1]`, except the last layer's, which is normed there.
        last: where the state after the final norm is kept: `loss` (positions named by the request) or `all`.
        dtype: a key of DTYPES; states in another dtype are cast or quantised before the copy.
        hidden_size: H.
        vocab_size: size of the target's vocabulary.
        num_layers: decoder layers of the target.
        model: `fingerprint.model_fingerprint` of the target, 32 hex digits.
    """

    layers: tuple[int, ...]
    last: str
    dtype: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    model: str

    def __post_init__(self) -> None:
        if max(self.hidden_size, self.vocab_size, self.num_layers) > _MAX_SIZE:
            raise ValueError("a model larger than any: more than 31 bits")
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers must be ascending and distinct, got {list(self.layers)[:20]}")
        if self.layers[0] < 0 or self.layers[-1] >= self.num_layers:
            raise ValueError(f"layers {list(self.layers)[:20]} out of range for a model of {self.num_layers} layers")
        if self.last not in LAST_MODES:
            raise ValueError(f"last must be one of {LAST_MODES}, got {self.last!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {tuple(DTYPES)}, got {self.dtype!r}")
        if self.hidden_size < 1 or self.vocab_size < 1:
            raise ValueError(f"hidden_size {self.hidden_size} and vocab_size {self.vocab_size} must be positive")

    @property
    def spec_id(self) -> str:
        """32 hex digits naming this agreement."""
        return _spec_id(self)

    @property
    def stored_dtype(self) -> str:
        """What files call the dtype of the states (a safetensors name)."""
        return DTYPES[self.dtype][0]

    @property
    def stored_width(self) -> int:
        """Items of `stored_dtype` that one state of H numbers takes."""
        return self.hidden_size + (SCALE_BYTES if self.stored_dtype == "U8" else 0)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state: of one token at one layer."""
        return self.stored_width * DTYPES[self.dtype][1]

    def aux_shape(self, tokens: int) -> tuple[int, int, int]:
        """Of `aux` in files, for T tokens."""
        return tokens, len(self.layers), self.stored_width

    def last_shape(self, positions: int) -> tuple[int, int]:
        """Of `last` in files, for L positions."""
        return positions, self.stored_width

    @property
    def aux_bytes_per_token(self) -> int:
        return len(self.layers) * self.state_bytes

    @property
    def last_bytes_per_position(self) -> int:
        return self.state_bytes

    def record_bytes(self, tokens: int, positions: int) -> int:
        """Bytes of the states of a row of `tokens` tokens whose `last` is kept at `positions` positions."""
        return tokens * self.aux_bytes_per_token + positions * self.last_bytes_per_position

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"layers": list(self.layers)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CaptureSpec:
        """Raises ValueError for a missing, unknown or ill-typed field."""
        return build(cls, with_layers(data), "capture spec")

    def differences(self, other: CaptureSpec) -> list[str]:
        """Human-readable `field: mine != theirs`, empty when equal."""
        mine, theirs = self.to_dict(), other.to_dict()
        return [f"{key}: {mine[key]} != {theirs[key]}" for key in mine if mine[key] != theirs[key]]


@functools.lru_cache(maxsize=64)
def _spec_id(spec: CaptureSpec) -> str:
    """Asked for several times a row, and as dear as a row's other bookkeeping."""
    text = json.dumps(asdict(spec) | {"contract": CONTRACT_VERSION}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def with_layers(data: object) -> object:
    """JSON has no tuples."""
    if isinstance(data, Mapping) and isinstance(data.get("layers"), list):
        return {**data, "layers": tuple(data["layers"])}
    return data


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's usual choice (1, N//2 - 1, N - 4).

    Raises:
        ValueError: below 7 layers, where these would collide: such a model must name its own.
    """
    if num_layers < 7:
        raise ValueError(f"a model of {num_layers} layers has no default capture layers; name them")
    return (1, num_layers // 2 - 1, num_layers - 4)


# --- identity ---------------------------------------------------------------------------------------------------------

_RID: Final = re.compile(r"eyas\.([0-9a-z]{8})\.([0-9a-z]{8})\.([0-9]{8})\.([0-9]{2})")
_RID_LENGTH: Final = len("eyas.") + 8 + 1 + 8 + 1 + 8 + 1 + 2


class RequestId(NamedTuple):
    """Fixed width and `[a-z0-9.]` only: servers abort by prefix, and the id becomes a file name.

    `run` names the store being filled; `session` one process's life, so that requests still in flight after a crash,
    or records they left behind, can never be taken for this session's.
    """

    run: str
    session: str
    row: int
    attempt: int

    def __str__(self) -> str:
        return f"eyas.{self.run}.{self.session}.{self.row:08d}.{self.attempt:02d}"

    @classmethod
    def parse(cls, text: str) -> RequestId | None:
        """None for anything that is not exactly one of ours."""
        match = _RID.fullmatch(text) if len(text) == _RID_LENGTH else None
        return cls(match[1], match[2], int(match[3]), int(match[4])) if match else None


def is_own_rid(text: object) -> bool:
    """Whether a request carries our prefix (it may still be malformed)."""
    return isinstance(text, str) and text.startswith("eyas.")


# --- digests ----------------------------------------------------------------------------------------------------------


def _int32_le(values: Iterable[int]) -> bytes:
    data = array("i", values)
    if sys.byteorder == "big":
        data.byteswap()
    return data.tobytes()


def token_hash(tokens: Iterable[int] | bytes) -> str:
    """xxh3-128 (32 hex) of the token ids as little-endian int32; bytes are taken as already encoded."""
    return xxhash.xxh3_128_hexdigest(tokens if isinstance(tokens, bytes) else _int32_le(tokens))


def field_hash(data: Any) -> int:
    """xxh3-64 of one field's bytes (any buffer)."""
    return xxhash.xxh3_64_intdigest(data)


def runs_of(positions: Sequence[int]) -> list[int]:
    """Ascending positions -> flat runs [start, stop, start, stop, ...] (stop exclusive)."""
    runs: list[int] = []
    for position in positions:
        if runs and runs[-1] == position:
            runs[-1] += 1
        else:
            runs += (position, position + 1)
    return runs


def count_of(runs: Sequence[int]) -> int:
    """Number of positions in flat runs."""
    return sum(runs[1::2]) - sum(runs[0::2])


def check_runs(runs: Sequence[int], tokens: int) -> None:
    """Raises ValueError unless runs are pairs, ascending, disjoint, non-empty and within [0, tokens)."""
    if len(runs) % 2:
        raise ValueError("positions must come as [start, stop, ...] pairs")
    if len(runs) > 2 * tokens:  # before any work: a request may bring millions
        raise ValueError(f"{len(runs) // 2} position runs for {tokens} tokens")
    edge = 0
    for start, stop in zip(runs[0::2], runs[1::2], strict=True):
        if not (type(start) is int and type(stop) is int and edge <= start < stop <= tokens):
            run = f"[{shown(start)}, {shown(stop)})"
            raise ValueError(f"position run {run} is not ascending within [0, {tokens})")
        edge = stop


def runs_hash(runs: Sequence[int]) -> int:
    """xxh3-64 of the flat runs as little-endian int32: where `last` was kept is part of a record's identity."""
    return xxhash.xxh3_64_intdigest(_int32_le(runs))


# --- what crosses the wire and the spool ------------------------------------------------------------------------------

SPEC_FILE: Final = "spec.json"  # in the spool: JSON of ServerHello
RECORD_SUFFIX: Final = ".safetensors"  # <rid>.safetensors: tensors aux [T, A, H], last [L, H]; metadata below
FAILED_SUFFIX: Final = ".failed"  # <rid>.failed: JSON {"reason": Refusal, "detail": str}
RECORD_METADATA: Final = "eyas"  # metadata key of a record file: JSON of RecordHeader


@dataclass(frozen=True, slots=True)
class ServerHello:
    """What the plugin writes to the spool when the model is loaded: the agreement, and what it admits.

    Attributes:
        spec: CaptureSpec as a dict, `spec_id` its hash.
        provenance: engine, versions, host.
        max_row_tokens: longest prompt the server admits.
        quota_bytes: as in ServerSettings.
    """

    spec: dict[str, Any]
    spec_id: str
    provenance: dict[str, str]
    max_row_tokens: int
    quota_bytes: int
    contract: int = CONTRACT_VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> ServerHello:
        """Raises ValueError for another contract version, or a spec whose hash is not `spec_id`."""
        hello = build(cls, loads(text, MAX_NOTE_BYTES))
        if hello.contract != CONTRACT_VERSION:
            raise ValueError(f"contract version {hello.contract}, this is version {CONTRACT_VERSION}")
        if CaptureSpec.from_dict(hello.spec).spec_id != hello.spec_id:
            raise ValueError("spec_id is not the hash of the spec")
        if hello.max_row_tokens < 1 or hello.quota_bytes < 1:
            raise ValueError("max_row_tokens and quota_bytes must be positive")
        return hello


@dataclass(frozen=True, slots=True)
class CaptureReply:
    """meta_info["eyas"][0] of a reply: accepted (the record's rename will follow) or refused, by name.

    `forward_us_p50` and `forward_us_p99` say what capture has cost the server's forward thread: percentiles over the
    last thousand forwards that held rows of ours, 0 before the first.
    """

    status: str  # "accepted" | "refused"
    spec_id: str
    tokens: str  # token_hash of the prompt the server saw
    rows: int
    reason: str = ""  # a Refusal when refused
    detail: str = ""
    forward_us_p50: float = 0.0
    forward_us_p99: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward_us_p50", "forward_us_p99"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"not a CaptureReply: {name} is no time")

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}  # asdict would copy every value

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CaptureReply:
        """Raises ValueError for a missing, unknown or ill-typed field."""
        return build(cls, data)


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The identity a record file carries in its safetensors metadata.

    Attributes:
        rid: str of RequestId, equal to the file's stem.
        spec_id: the agreement.
        tokens: token_hash of the ids the forwards actually saw; rows: their number T.
        positions: number L of kept `last` positions; runs: runs_hash of where.
        chunks: [start, stop) of each forward the record was assembled from, gapless from 0 to T.
        aux, last: field_hash of the tensors' bytes, 16 hex digits.
    """

    rid: str
    spec_id: str
    tokens: str
    rows: int
    positions: int
    runs: str
    chunks: Any  # whether they are gapless pairs is asked where the record is believed
    aux: str
    last: str

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RecordHeader:
        """Raises ValueError for anything but what `to_json` writes."""
        return build(cls, loads(text, _MAX_HEADER_BYTES))
