from types import SimpleNamespace

PARALLEL = SimpleNamespace(attn_tp_rank=0, num_dp_ranks=1)


def get_parallel() -> SimpleNamespace:
    return PARALLEL
