"""The real SGLang on CPU as a server that is measured. It cannot draft there: its kernels for that are not on CPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from eyas.config import Config
from eyas.evaluate.conversation import Prompt
from eyas.evaluate.decode import Sampling, TargetModel, decode_plainly
from eyas.evaluate.live import open_server
from eyas.evaluate.passes import Asker, Pass
from eyas.evaluate.served import Asking
from servers import sglang_server
from sglang_cpu.models import tiny_llama

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PROMPTS = [[7 + (row * 13 + at * 5) % 200 for at in range(6 + row)] for row in range(5)]
LONGEST = 12


async def _passes(url: str) -> list[Pass]:
    server = await open_server(url, Config())
    try:
        assert (server.engine, server.depth, server.draft) == ("sglang", 0, "")
        assert server.version and server.longest
        asker = Asker(server, Asking(0.0, LONGEST, ()))
        prompts = [Prompt(row, 0, tuple(ids)) for row, ids in enumerate(PROMPTS)]
        return [await asker.ask(prompts, at_a_time) for at_a_time in (1, 3)]
    finally:
        await server.close()


def test_answers_and_times_of_a_server_without_a_drafter(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", hidden_size=32)
    with sglang_server(model, tmp_path / "server", capture=False, flags=["--skip-tokenizer-init"]) as server:
        passes = asyncio.run(_passes(server.url))
    target = TargetModel(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), (), 4)
    ends = target._model.generation_config.eos_token_id
    sampling = Sampling(max_new_tokens=LONGEST, ends=[ends] if isinstance(ends, int) else ends or [])
    with target:
        expected = [tuple(decode_plainly(target, ids, sampling)) for ids in PROMPTS]
    for one in passes:
        assert [answer.tokens for answer in one.answers] == expected
        assert one.total is None and one.tokens_per_s > 0
        assert all(0 < answer.first_s <= answer.seconds for answer in one.answers)
