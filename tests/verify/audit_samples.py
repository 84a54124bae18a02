"""A store with right states, the same with honest checksums and wrong ones, and a server that tells the truth.

The server is in process (httpx.MockTransport): its log-probabilities are transformers' own. What goes wrong is a field.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from eyas.capture.contract import CaptureSpec
from eyas.capture.encoding import encode
from eyas.data.corpus import Corpus, CorpusMeta, CorpusWriter
from eyas.extract.hf import hidden_states
from eyas.positions import kept_counts, kept_positions
from eyas.store.format import RowContents
from eyas.store.plan import Shard
from eyas.store.reader import StoreReader
from eyas.store.writer import StoreWriter

States = tuple[list[torch.Tensor], list[torch.Tensor]]
LENGTHS = [40, 64, 64, 64, 90, 3, 130]


def make_corpus(path: Path, model: Path, vocab_size: int, lengths: list[int], seed: int = 0) -> Path:
    """Random rows; the first two tokens are not trained. One holds the last id of the vocabulary."""
    rng = np.random.default_rng(seed)
    meta = CorpusMeta(model=str(model), tokenizer_hash="", template_hash="", vocab_size=vocab_size)
    with CorpusWriter(path, meta) as writer:
        for index, length in enumerate(lengths):
            tokens = rng.integers(10, vocab_size, length)
            if length > 30:
                tokens[20] = vocab_size - 1
            mask = np.ones(length, np.uint8)
            mask[:2] = 0
            writer.add(str(index), tokens, mask)
    return path


def captured(network: PreTrainedModel, corpus: Path, spec: CaptureSpec, dtype: torch.dtype = torch.float32) -> States:
    """What a right capture holds: aux [T, A, H] and last [L, H] of every row."""
    aux, last = [], []
    for row in Corpus.open(corpus).rows(0, len(Corpus.open(corpus))):
        states, final = hidden_states(network, row.tokens.tolist(), spec.layers)
        aux.append(torch.stack([states[layer] for layer in spec.layers], 1).to(dtype))
        last.append(final[torch.from_numpy(kept_positions(row.loss_mask, spec.last)).long()].to(dtype))
    return aux, last


def stored(reader: StoreReader) -> States:
    rows = [reader[i] for i in range(len(reader))]
    return [row.aux.clone() for row in rows], [row.last.clone() for row in rows]


def write_store(out: Path, corpus: Path, spec: CaptureSpec, states: States) -> Path:
    """A finished store of these states with valid checksums everywhere."""
    opened, (aux, last) = Corpus.open(corpus), states
    writer = StoreWriter.open(
        out,
        spec=spec,
        corpus={"digest": opened.digest, "tokenizer": "", "template": "", "rows": len(opened), "tokens": 0},
        tokens_N=opened.n_tokens,
        positions_N=kept_counts(opened.n_tokens, opened.n_positions, spec.last),
        shard_bytes=1 << 20,
        provenance={"engine": "test"},
    )

    def contents(shard: Shard) -> list[RowContents]:
        return [
            RowContents(row.tokens, row.loss_mask, kept_positions(row.loss_mask, spec.last))
            for row in opened.rows(shard.start, shard.stop)
        ]

    for shard in writer.plan.shards:
        lease = writer.lease(shard, contents)
        assert lease is not None
        with lease:
            for row in lease.pending:
                lease.put(row, *(encode(field[row], spec.dtype).view(torch.uint8).numpy() for field in (aux, last)))
            lease.finish()
    writer.write_manifest()
    return out


def damaged(states: States, change: str, pre_norm: Callable[[int], torch.Tensor] | None = None) -> States:
    """The same states after a fault between server and store; row 1 and 2 are of equal length."""
    aux, last = [tensor.clone() for tensor in states[0]], [tensor.clone() for tensor in states[1]]
    match change:
        case "swapped":
            aux[1], aux[2], last[1], last[2] = aux[2], aux[1], last[2], last[1]
        case "shifted late":
            aux[3], last[3] = aux[3].roll(1, 0), last[3].roll(1, 0)
        case "shifted early":
            aux[3], last[3] = aux[3].roll(-1, 0), last[3].roll(-1, 0)
        case "pre-norm":
            assert pre_norm is not None
            last = [pre_norm(row).to(state.dtype) for row, state in enumerate(last)]
        case "last chunk doubled":
            last[4][-16:] = last[4][-32:-16].clone()
        case "one chunk of another row":
            last[4][20:36] = last[0][20:36]
        case "zeros":
            last[0].zero_()
        case "aux only":
            aux[4] = aux[4].flip(1)
        case _:
            assert change == "nothing"
    return aux, last


@dataclass
class TruthfulServer:
    """An SGLang server without capture, as a client sees it.

    Attributes:
        model: folder of the target it serves.
        info: changes what it says of itself.
        settings: what /server_info says; None is HTTP 404.
        answers: called with each /generate body first: a response, or None to go on.
        entries: changes the list of [log p, id, text] before it is sent.
        asked: every body.
    """

    model: Path
    url: str = "http://mock:30000"
    info: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] | None = field(default_factory=lambda: {"dtype": "float32"})
    answers: Callable[[dict[str, Any]], httpx.Response | None] = lambda _: None
    entries: Callable[[list[Any]], Any] = lambda entries: entries
    api_key: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._network = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()

    @property
    def network(self) -> PreTrainedModel:
        return self._network

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.handle)

    async def handle(self, request: httpx.Request) -> httpx.Response:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        match request.url.path:
            case "/model_info":
                known = {"model_path": "x", "architectures": self._network.config.architectures, "is_generation": True}
                return httpx.Response(200, json=known | self.info)
            case "/server_info" if self.settings is not None:
                return httpx.Response(200, json=self.settings)
            case "/generate":
                await asyncio.sleep(0)
                return self._generate(json.loads(request.content))
        return httpx.Response(404, json={"detail": "Not Found"})

    def _generate(self, body: dict[str, Any]) -> httpx.Response:
        self.asked.append(body)
        if (answer := self.answers(body)) is not None:
            return answer
        assert body["return_logprob"]
        assert body["logprob_start_len"] == 0
        tokens = torch.tensor(body["input_ids"])
        with torch.no_grad():
            logits = self._network(input_ids=tokens[None], use_cache=False).logits[0].float()
        found = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0].tolist()
        vocab_size = self._network.config.vocab_size
        shown = [token if token < vocab_size - 1 else 0 for token in tokens.tolist()]
        entries = [[value, token, None] for value, token in zip([None, *found], shown, strict=True)]
        meta = {"id": body["rid"], "finish_reason": {"type": "length"}, "input_token_logprobs": self.entries(entries)}
        # As SGLang writes it: NaN and infinities as such, which httpx's own writer refuses.
        return httpx.Response(200, content=json.dumps({"text": "", "output_ids": [5], "meta_info": meta}))
