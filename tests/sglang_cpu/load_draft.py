"""Load draft checkpoints with SGLang's own model class, without a server, and save what it made of each.

python load_draft.py TARGET FOLDER...      writes FOLDER/loaded.pt
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from sglang.srt import server_args
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.hf_transformers_utils import get_config

ALONE = {"tp_rank": 0, "tp_size": 1, "attn_tp_rank": 0, "attn_tp_size": 1, "pp_rank": 0, "pp_size": 1}
POSITIONS = 600


@contextmanager
def alone(target: str, meeting: str) -> Iterator[None]:
    """What SGLang's models need around them: a server's arguments, and a world of one process."""
    args = server_args.ServerArgs(model_path=target, device="cpu", attention_backend="torch_native")
    server_args.set_global_server_args_for_scheduler(args)
    init_distributed_environment(1, 0, f"file://{meeting}/rendezvous", 0, "gloo")
    initialize_model_parallel()
    with ExitStack() as stack:
        for name, value in ALONE.items():
            stack.enter_context(get_parallel().override(**{name: value}))
        yield


def main(target: str, folders: list[str]) -> None:
    with alone(target, folders[0]):
        for folder in map(Path, folders):
            torch.save(_loaded(folder), folder / "loaded.pt")


def _loaded(folder: Path) -> dict[str, object]:
    model = LlamaForCausalLMEagle3(get_config(str(folder), trust_remote_code=False))
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)  # what is not loaded shows
    model.load_weights(load_file(folder / "model.safetensors").items())
    return {
        "parameters": {name: parameter.data for name, parameter in model.named_parameters()},
        "hot_token_id": model.hot_token_id,
        "cos_sin": model.model.layers[0].self_attn.rotary_emb.cos_sin_cache[:POSITIONS],
        "norm_output": model.model.norm_output,
        "num_aux_hidden_states": model.model.num_aux_hidden_states,
        "draft_vocab_size": model.lm_head.org_vocab_size,
        "eps": model.model.norm.variance_epsilon,
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
