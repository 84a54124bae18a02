from types import SimpleNamespace

PARALLEL = SimpleNamespace(attn_tp_rank=0, attn_cp_size=1, num_dp_ranks=1)


def get_parallel() -> SimpleNamespace:
    return PARALLEL
