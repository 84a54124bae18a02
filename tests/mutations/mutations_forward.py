"""Inside the server: what the recorder is fed is wrong. What it then writes carries honest hashes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from mutations.mutation import Check, Mutation, Prefill, Stage, chunks_of

_Inject = Callable[[Prefill], Prefill]


def _refused(name: str, error: str, inject: _Inject) -> Mutation:
    return Mutation(name, Stage.FORWARD, inject, Check.EXTRACT, error)


def _valued(name: str, error: str, inject: _Inject, *, logits: str = "") -> Mutation:
    """Right in every identity and checksum: only the values tell."""
    return Mutation(name, Stage.FORWARD, inject, Check.AGAINST, error, logits)


def _chunks(change: Callable[[list[tuple[int, int]]], list[tuple[int, int]]]) -> _Inject:
    return lambda prefill: replace(prefill, chunks=change(prefill.chunks))


def _ids(prefill: Prefill) -> Prefill:
    ids = prefill.ids.clone()
    ids[-1] = (ids[-1] + 1) % 1000
    return replace(prefill, ids=ids)


def _retokenised(prefill: Prefill) -> Prefill:
    other = [(token + 1) % 1000 for token in prefill.prompt]
    return replace(prefill, prompt=other, ids=torch.tensor(other))


def _column(column: int, away: int) -> _Inject:
    def inject(prefill: Prefill) -> Prefill:
        aux = prefill.aux.clone()
        aux[:, column] = prefill.layers[:, prefill.captured[column] + away]
        return replace(prefill, aux=aux)

    return inject


def _embeddings(prefill: Prefill) -> Prefill:
    aux = prefill.aux.clone()
    aux[:, 0] = prefill.embeddings
    return replace(prefill, aux=aux)


def _doubled(prefill: Prefill) -> Prefill:
    """The last whole chunk's states twice: over its own rows and over those of the chunk before."""
    aux, last = prefill.aux.clone(), prefill.last.clone()
    aux[:16], last[:16] = aux[16:32].clone(), last[16:32].clone()
    return replace(prefill, aux=aux, last=last)


def _lost(prefill: Prefill) -> Prefill:
    aux, last = prefill.aux.clone(), prefill.last.clone()
    aux[16:32], last[16:32] = 0, 0
    return replace(prefill, aux=aux, last=last)


def _one_token(prefill: Prefill) -> Prefill:
    aux = prefill.aux.clone()
    aux[20] = prefill.twin().aux[20]
    return replace(prefill, aux=aux)


def _renormed(prefill: Prefill) -> Prefill:
    last = prefill.last.clone()
    return replace(prefill, last=last / last.pow(2).mean(-1, keepdim=True).sqrt() * 0.5)


def _odd(field: str, value: float) -> _Inject:
    def inject(prefill: Prefill) -> Prefill:
        states = getattr(prefill, field).clone()
        states[-2].view(-1)[7] = value  # of a position whose `last` is kept
        return replace(prefill, **{field: states})

    return inject


FORWARD = (
    _refused("a chunk in the middle is missing", "chunk-gap", _chunks(lambda c: c[:1] + c[2:])),
    _refused("a chunk comes twice", "chunk-gap", _chunks(lambda c: [*c[:2], *c[1:]])),
    _refused("chunks overlap", "chunk-gap", _chunks(lambda c: [c[0], (c[0][1] - 4, c[1][1]), *c[2:]])),
    _refused("chunks out of order", "chunk-gap", _chunks(lambda c: [c[0], c[2], c[1]])),
    _refused("the last chunk never comes", "no-plugin-reply", _chunks(lambda c: c[:-1])),
    _refused("the first chunk came from the prefix cache", "prefix-cached", _chunks(lambda c: c[1:])),
    _refused("the forward was fed one other token id", "tokens-differ", _ids),
    _refused("the server tokenised with another tokenizer", "tokens-differ", _retokenised),
    _refused("a row less than tokens", "no-states", lambda p: replace(p, aux=p.aux[:-1])),
    _refused("a layer less than agreed", "no-states", lambda p: replace(p, aux=p.aux[:, :-1])),
    _refused("NaN in one number of aux", "not-finite", _odd("aux", float("nan"))),
    _refused("NaN in one number of last", "not-finite", _odd("last", float("nan"))),
    _refused("+Inf in aux", "not-finite", _odd("aux", float("inf"))),
    _refused("-Inf in last", "not-finite", _odd("last", float("-inf"))),
    _valued("two samples of equal length swapped", "last", lambda p: p.twin(), logits="logits-differ"),
    _valued(
        "last of another sample of equal length",
        "last",
        lambda p: replace(p, last=p.twin().last),
        logits="logits-differ",
    ),
    _valued("aux of another sample of equal length", "layer 1", lambda p: replace(p, aux=p.twin().aux)),
    _valued(
        "rows shifted by one",
        "last",
        lambda p: replace(p, aux=p.aux.roll(1, 0), last=p.last.roll(1, 0)),
        logits="shifted-by-one",
    ),
    _valued("last shifted by one", "last", lambda p: replace(p, last=p.last.roll(1, 0)), logits="shifted-by-one"),
    _valued(
        "last shifted the other way", "last", lambda p: replace(p, last=p.last.roll(-1, 0)), logits="shifted-by-one"
    ),
    _valued("aux shifted by one", "layer 1", lambda p: replace(p, aux=p.aux.roll(1, 0))),
    _valued("the layer below the first agreed one", "layer 1", _column(0, -1)),
    _valued("the layer above the second agreed one", "layer 3", _column(1, 1)),
    _valued("the layer above the third agreed one", "layer 4", _column(2, 1)),
    _valued("every layer's input instead of its output", "layer 1", lambda p: replace(p, aux=_inputs(p))),
    _valued("the embeddings instead of a layer", "layer 1", _embeddings),
    _valued("layers permuted", "layer 1", lambda p: replace(p, aux=p.aux.flip(1))),
    _valued(
        "the pre-norm state under the name last", "last", lambda p: replace(p, last=p.layers[:, -1]), logits="pre-norm"
    ),
    _valued("last normed once more", "last", _renormed, logits="logits-differ"),
    _valued("one chunk's states over another's rows", "last", _doubled, logits="logits-differ"),
    _valued("a chunk of zeros", "last", _lost, logits="logits-differ"),
    _valued("one token's states are another sample's", "layer 1", _one_token),
    _valued(
        "tokens in reverse order",
        "last",
        lambda p: replace(p, aux=p.aux.flip(0), last=p.last.flip(0)),
        logits="logits-differ",
    ),
    _valued("another model of equal shape and norm weights", "last", lambda p: p.stranger(), logits="logits-differ"),
)


def _inputs(prefill: Prefill) -> torch.Tensor:
    return torch.stack([prefill.layers[:, layer - 1] for layer in prefill.captured], dim=1)


def unchanged(prefill: Prefill) -> Prefill:
    """The control: other chunks, taken back once and begun anew; nothing about the row is wrong."""
    return replace(prefill, chunks=[(0, 16), *chunks_of(len(prefill.prompt), 8)])
