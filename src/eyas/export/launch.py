"""How a server is told to draft: SGLang's flags and vLLM's, for the same chains (and SGLang's trees)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from eyas.errors import ConfigError

Engine = Literal["sglang", "vllm"]
_A_STEP = 4  # nodes of a tree for each step, where their number is not given


@dataclass(frozen=True, slots=True)
class Drafting:
    """What is drafted in a cycle.

    Attributes:
        steps: tokens drafted one after another.
        topk: branches at each step; 1 is a chain.
        tokens: of a tree that the target verifies, root included; None for all of a chain, else 4 for each step and
            the root, or all where the tree has fewer.
    """

    steps: int = 3
    topk: int = 1
    tokens: int | None = None

    @property
    def verified(self) -> int:
        """Tokens that the target verifies in a cycle, the root included."""
        if self.topk == 1:
            return self.steps + 1  # SGLang allows no other number for a chain
        return self.tokens or min(_A_STEP * self.steps + 1, self.most)

    @property
    def most(self) -> int:
        """Tokens of the whole tree, the root included."""
        return 1 + self.topk + (self.steps - 1) * self.topk**2


def draft_flags(engine: Engine, draft: str, drafting: Drafting) -> tuple[str, ...]:
    """Arguments of the server's command that make it draft.

    Args:
        engine: whose.
        draft: folder or hub id of the exported draft.
        drafting: how much.

    Raises:
        ConfigError: vLLM and a tree, a tree of more tokens than its branches can have, or a chain of another number
            of tokens than its steps give.
    """
    if engine == "vllm" and drafting.topk != 1:
        raise ConfigError("vLLM drafts chains", f"serve.draft_topk={drafting.topk}", "1, or --engine sglang")
    if drafting.topk == 1 and drafting.tokens not in (None, drafting.verified):
        what = f"a chain of {drafting.steps} steps verifies {drafting.verified} tokens, not {drafting.tokens}"
        hint = "leave it out" if engine == "vllm" else "leave it out, or serve.draft_topk for a tree"
        raise ConfigError(what, "serve.draft_tokens", hint)
    if engine == "vllm":
        said = {"method": "eagle3", "model": draft, "num_speculative_tokens": drafting.steps}
        return ("--speculative-config", json.dumps(said))
    if drafting.verified > drafting.most:
        hint = f"{drafting.steps} steps of {drafting.topk} branches give {drafting.most}, the root included"
        raise ConfigError(f"{drafting.verified} draft tokens are more than there are", "serve.draft_tokens", hint)
    return (
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", draft),
        *("--speculative-num-steps", str(drafting.steps), "--speculative-eagle-topk", str(drafting.topk)),
        *("--speculative-num-draft-tokens", str(drafting.verified)),
    )


def launch_words(engine: Engine, model: str, draft: str, drafting: Drafting) -> tuple[str, ...]:
    """The shortest command that serves `model` with a draft."""
    program = (
        ("vllm", "serve", model)
        if engine == "vllm"
        else ("python", "-m", "sglang.launch_server", "--model-path", model)
    )
    return (*program, *draft_flags(engine, draft, drafting))
