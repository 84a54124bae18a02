"""Test only: serve DeepSeek's MLA on CPU.

SGLang's `torch_native` attention backend has no multi-head prefill over the latent cache, its other CPU backends need
compiled kernels. Absorbed MLA computes the same attention and is plain torch.
"""

from __future__ import annotations

from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod


def register() -> None:
    AttentionBackendRegistry.register("torch_native", lambda attention, forward_batch: AttnForwardMethod.MLA)
