"""All mutations, and the page that lists them."""

from __future__ import annotations

from collections import Counter
from typing import Final

from mutations.mutation import Check, Mutation, Stage
from mutations.mutations_forward import FORWARD
from mutations.mutations_forward import unchanged as taken_back
from mutations.mutations_journal import OPEN
from mutations.mutations_record import RECORDS, REPLIES, SPOOL
from mutations.mutations_record import unchanged as rebuilt
from mutations.mutations_store import DOCUMENTS, SHARDS

WIRE: Final = (*FORWARD, *RECORDS, *SPOOL, *REPLIES)
CATALOGUE: Final = (*WIRE, *OPEN, *SHARDS, *DOCUMENTS)

#: Nothing is wrong with these, though all the machinery was at work: none may be refused.
CONTROLS: Final = (
    Mutation("a request taken back and begun anew in other chunks", Stage.FORWARD, taken_back, Check.EXTRACT, ""),
    Mutation("a record taken apart and put together again", Stage.RECORD, rebuilt, Check.EXTRACT, ""),
)

_WHERE: Final = {
    Stage.FORWARD: "Inside the server: what the recorder is fed, its own hashes over it",
    Stage.RECORD: "The record's file, between server and client",
    Stage.SPOOL: "The folder it lies in",
    Stage.REPLY: "The plugin's word in the reply",
    Stage.OPEN: "Open shards of an interrupted run, then resumed",
    Stage.STORE: "Finished shards and documents",
}


def page() -> str:
    """docs/mutations.md: what is injected, and which check sees it under which name."""
    by_check = Counter(mutation.seen_by for mutation in CATALOGUE)
    counts = ", ".join(f"{by_check[check]} by `{check}`" for check in Check if by_check[check])
    lines = [_HEAD, f"{len(CATALOGUE)} mutations, {len(CATALOGUE)} detected: {counts}."]
    for stage, where in _WHERE.items():
        chosen = [mutation for mutation in CATALOGUE if mutation.stage is stage]
        lines += ["", f"## {where}", "", "| what is wrong | seen by | as |", "|---|---|---|"]
        lines += [f"| {mutation.name} | `{mutation.seen_by}` | {_as(mutation)} |" for mutation in chosen]
    return "\n".join([*lines, "", _END])


def _as(mutation: Mutation) -> str:
    if mutation.seen_by is not Check.AGAINST:
        return f"`{mutation.error}`"
    audit = f"; `{Check.LOGITS}`: `{mutation.logits}`" if mutation.logits else ""
    return f"mismatch of {mutation.error}{audit}"


_HEAD: Final = """\
# Mutations

Made by `make docs` from the catalogue in `tests/mutations`, which the tests hold to the letter: each corruption is
really injected, the check named here must be the first to see it, by this very name, and afterwards the rows it touched
must end byte for byte as in an undisturbed run. Rows beside them, and controls with which nothing is wrong, must pass.
States come from a tiny Llama, computed by transformers chunk by chunk, recorded by the plugin's own recorder, and
fetched by a real `eyas extract` over HTTP. `PYTHONPATH=tests python -m mutations` does it all and prints what was seen.
"""
_END: Final = """\
## What only values tell

Where every identity and checksum is honest over wrong states, only `verify --against` sees it, in the rows it samples;
`verify --logits` sees what changes `last`, and says nothing of the captured layers. In bf16 neither bounds a single
token of a row of 50 or more: 2 % of a row may stray, see [verification](verification.md).

## What has no effect

The client reads a record once, into memory of its own. A file that is replaced, overwritten or cut short after that
changes nothing, and one that shrinks while it is read is `record-damaged`. What a part holds of the corpus (header,
tokens, mask) is written anew by every resume. Texts for people, such as the reasons of failed rows in a sidecar, decide
nothing.
"""
