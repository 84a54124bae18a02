"""What SGLang's own loader makes of drafts whose names are not all right, and of our flags; JSON on the last line.

python load_names.py TARGET FLAGS_JSON FOLDER...
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from load_draft import alone
from safetensors.torch import load_file
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers_utils import get_config

FLAGS = (
    *("model_path", "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps"),
    *("speculative_eagle_topk", "speculative_num_draft_tokens", "host", "port"),
)


def unfilled(folder: Path) -> list[str]:
    """Parameters that no tensor reached."""
    model = LlamaForCausalLMEagle3(get_config(str(folder), trust_remote_code=False))
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    model.load_weights(load_file(folder / "model.safetensors").items())
    empty = [name for name, parameter in model.named_parameters() if parameter.data.isnan().all()]
    return sorted([*empty, *(["d2t"] if model.hot_token_id is None else [])])


def parsed(words: list[str]) -> dict[str, object]:
    """Our flags as SGLang's parser takes them."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    found = parser.parse_args(words)
    return {name: getattr(found, name) for name in FLAGS}


if __name__ == "__main__":
    target, words, *folders = sys.argv[1:]
    with alone(target, folders[0]):
        print(json.dumps({"parsed": parsed(json.loads(words)), "unfilled": [unfilled(Path(at)) for at in folders]}))
