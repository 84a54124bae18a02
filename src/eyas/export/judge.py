"""Whether a drafter does best as it would be served: run on texts of its target, and on every alternative input."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from eyas.export.documents import Texts
from eyas.export.evidence import FEWEST, Drafter, measure
from eyas.export.findings import CheckReport
from eyas.export.probe import embedding_of_rows
from eyas.target.checkpoint import Target
from eyas.target.embeddings import input_embeddings
from eyas.target.head import Head
from eyas.train.checkpoint_format import DraftCheckpoint
from eyas.train.draft import Eagle3Draft


def judge_acceptance(checkpoint: DraftCheckpoint, target: Target, texts: Texts, report: CheckReport) -> None:
    """Whether the drafter does best as served; adds a finding.

    Args:
        checkpoint: as servers read it.
        target: for its embeddings.
        texts: what it is tried on.
        report: is added to.
    """
    if len(texts.documents) < FEWEST:
        what = f"{len(texts.documents)} texts with answers are too few to compare alternatives on"
        report.leave_open("acceptance", what, f"at least {FEWEST}")
        return
    ids = torch.cat([document.tokens for document in texts.documents]).unique()
    drafter = drafter_of(checkpoint, ids, embeddings_for(checkpoint, target, ids))
    drafter = replace(drafter, teach=Head.load(target, rows=checkpoint.vocab.target_ids).logits)
    found = measure(drafter, texts.documents, texts.others)
    if found.faults:
        report.refuse("acceptance", found.faults[0], _hint_for(found.faults[0]))
        return
    served, tried = found.served, len(found.alternatives)
    text = (
        f"{served.length:.2f} tokens a cycle of {len(texts.documents)} texts ({served.low:.2f} to {served.high:.2f}); "
    )
    if unclear := found.unclear:
        also = f" and {len(unclear) - 1} more" if len(unclear) > 1 else ""
        what = f"{text}no alternative does better, but these texts cannot tell whether {unclear[0]}{also}"
        report.leave_open("acceptance", what, "more texts tell more: export.documents, export.answer_tokens")
        return
    text += f"all of {tried} alternatives do worse"
    if not texts.others:
        text += "; neighbouring layers were not among them"
    report.passed("acceptance", text)


def _hint_for(fault: str) -> str:
    if "ids are" in fault:
        return "name the layers it was trained on: eyas export DRAFT --set export.aux_layers=[...]"
    return "train again on the right inputs" if "norm" in fault else "find the head that belongs to this config"


def embeddings_for(checkpoint: DraftCheckpoint, target: Target, ids: Tensor) -> Tensor:
    """[U, H] the embeddings that servers would draft with, of these tokens.

    Raises:
        ConfigError: the target's cannot be read.
    """
    own = checkpoint.embed_tokens
    if own is not None and checkpoint.config.hidden_size != checkpoint.config.target_hidden_size:
        return own[ids]
    return input_embeddings(target, ids)


def drafter_of(checkpoint: DraftCheckpoint, ids: Tensor, rows: Tensor) -> Drafter:
    """A checkpoint in float32 over the embeddings `rows` [U, H] of the token ids [U], ascending."""
    config = checkpoint.config
    with torch.device("meta"):
        nowhere = torch.empty(config.vocab_size, config.hidden_size)
    model = Eagle3Draft(config, nowhere, torch.Generator().manual_seed(0))
    model.load_state_dict({name: tensor.float() for name, tensor in checkpoint.tensors.items()})
    return Drafter(model, checkpoint.vocab.target_ids, embedding_of_rows(ids, rows))
