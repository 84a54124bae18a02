"""What servers count, from their own words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.evaluate.counters import Cycles, VllmCounters, parse_metrics, sglang_reply, vllm_reply

# As vLLM 0.32.0 writes them, serving an EAGLE-3 drafter; two engines.
METRICS = """
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="/m/SmolLM2 \\"x\\""} 31.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="/m/SmolLM2 \\"x\\""} 9.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7960431199206135e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 93.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 27.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 17.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 2.0
vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 36.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1.2e+02
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 3.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 4.0
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="m"} 32.0
vllm:broken{engine="0"} NaN
vllm:also_broken one
"""


def test_vllm_over_all_engines() -> None:
    found = VllmCounters.read(METRICS)
    assert found == VllmCounters(40, 120, (12, 5, 2), generated=120, prompted=36, finished=7, running=3)
    assert found.cycles() == Cycles((40, 12, 5), (12, 5, 2))
    assert parse_metrics(METRICS)["vllm:spec_decode_num_drafts_total"][0][0]["model_name"] == '/m/SmolLM2 "x"'
    assert "vllm:broken" not in parse_metrics(METRICS)


def test_what_was_added_since() -> None:
    before = VllmCounters(40, 120, (12, 5, 2), 120, 36, 7, 0)
    after = VllmCounters(50, 150, (18, 8, 2), 150, 40, 8, 0)
    assert after.since(before) == VllmCounters(10, 30, (6, 3, 0), 30, 4, 1, 0)


def test_counters_of_another_depth_were_not_added() -> None:
    before = VllmCounters(40, 120, (12, 5, 2), 120, 36, 7, 0)
    for now in (VllmCounters(50, 150, (18, 8), 150, 40, 8, 0), VllmCounters(None, 0, (), 150, 40, 8, 0)):
        with pytest.raises(ValueError, match="3 before"):
            now.since(before)


@pytest.mark.parametrize("missing", ["generation_tokens_total", "request_success_total"])
def test_no_counters_of_tokens(missing: str) -> None:
    assert VllmCounters.read("\n".join(line for line in METRICS.splitlines() if missing not in line)) is None


def test_a_position_that_is_missing_is_no_position() -> None:
    assert VllmCounters.read("\n".join(line for line in METRICS.splitlines() if 'position="1"' not in line)) is None


def test_a_server_without_a_drafter_has_no_drafts() -> None:
    found = VllmCounters.read("\n".join(line for line in METRICS.splitlines() if "spec_decode" not in line))
    assert found is not None and found.drafts is None and found.accepted == ()


def test_sglang_and_vllm_replies_say_the_same() -> None:
    told = {"acceptance_histogram": [5, 3, 0, 2], "num_spec_steps": 10, "num_spec_tokens": 3}
    found = vllm_reply({"speculative_decoding": told})
    assert found == Cycles((10, 5, 2), (5, 2, 2))
    meta = {"spec_verify_ct": 10, "spec_correct_drafts_histogram": [5, 3, 0, 2]}
    assert sglang_reply(meta, 3) == found
    # A histogram ends at the most that were accepted; the older name.
    older = {"spec_verify_ct": 8, "spec_accept_histogram": [5, 3]}
    assert sglang_reply(older, 3) == Cycles((8, 3, 0), (3, 0, 0))


def test_a_reply_without_drafts_tells_none() -> None:
    assert sglang_reply({"completion_tokens": 1}, 3) is None
    assert vllm_reply(None) is None and vllm_reply({"time_to_first_token_ms": 3.0}) is None


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({"spec_verify_ct": 9, "spec_correct_drafts_histogram": [5, 3]}, "8 cycles, 9 were made"),
        ({"spec_verify_ct": 8}, "0.5.17"),
        ({"spec_verify_ct": 8, "spec_correct_drafts_histogram": [5, 1, 1, 0, 1]}, "more than 3"),
        ({"spec_verify_ct": 8, "spec_correct_drafts_histogram": [9, -1]}, "not a histogram"),
        ({"spec_verify_ct": 8, "spec_correct_drafts_histogram": "8"}, "not a histogram"),
    ],
)
def test_an_sglang_reply_that_contradicts_itself(meta: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        sglang_reply(meta, 3)


@pytest.mark.parametrize(
    "told",
    [
        {"acceptance_histogram": [5, 3], "num_spec_steps": 9, "num_spec_tokens": 3},
        {"acceptance_histogram": [], "num_spec_tokens": 3},
        {"acceptance_histogram": [1, 2], "num_spec_tokens": None},
        {"acceptance_histogram": [1, 2, 3, 4, 5], "num_spec_tokens": 3},
    ],
)
def test_a_vllm_reply_that_contradicts_itself(told: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        vllm_reply({"speculative_decoding": told})


@given(st.lists(st.lists(st.integers(0, 4), max_size=12), min_size=1, max_size=6), st.integers(0, 3))
def test_answers_fit_the_cycles_they_came_of(answers: list[list[int]], cut: int) -> None:
    """And do not fit them with a cycle more than their ends can hide."""
    made = [Cycles.of_histogram([cycles.count(n) for n in range(5)], 4) for cycles in answers]
    total = Cycles.total(made)
    assert total is not None
    lost = sum(min(cut, cycles[-1]) for cycles in answers if cycles)
    tokens = sum(1 + len(cycles) + sum(cycles) for cycles in answers) - lost
    assert total.fit(len(answers), tokens)
    assert not total.fit(len(answers), tokens + lost + 1)
    assert not total.fit(len(answers), tokens + lost - 5 * len(answers) - 1)
