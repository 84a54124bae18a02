"""The plugin inside the real SGLang server on CPU: a tiny Llama, plain HTTP, every row against transformers."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from eyas.capture.contract import (
    FAILED_SUFFIX,
    LAST_PARAM,
    RECORD_METADATA,
    RECORD_SUFFIX,
    SPEC_FILE,
    SPEC_PARAM,
    RecordHeader,
    RequestId,
    ServerHello,
    field_hash,
    runs_hash,
    token_hash,
)
from servers import Server, sglang_server
from sglang_cpu.models import VOCAB_SIZE, tiny_llama

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.contract]

Reference = Callable[[list[int]], tuple[torch.Tensor, ...]]
_rows = iter(range(1_000_000))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One rank, radix cache on, chunks of 64 tokens that decoding requests may share, room for everything."""
    flags = ["--chunked-prefill-size", "64", "--context-length", "1024", "--enable-mixed-chunk"]
    with sglang_server(model, tmp_path_factory.mktemp("plain"), flags=flags) as running:
        yield running


QUOTA = 4_000_000


@pytest.fixture(scope="module")
def tight_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two tensor-parallel ranks, a quota of 4 MB, no tokenizer, requests taken back at random while they decode.

    Its writers are threads; those of `server` are a process of their own.
    """
    folder = tmp_path_factory.mktemp("tight")
    flags = ["--chunked-prefill-size", "64", "--tp-size", "2", "--skip-tokenizer-init", "--disable-radix-cache"]
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1", "SGLANG_TEST_RETRACT": "1"}
    with sglang_server(model, folder, flags=flags, env=env, quota_bytes=QUOTA, writers="threads") as running:
        yield running


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()

    def hidden_states(ids: list[int]) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return tuple(h[0] for h in target(torch.tensor([ids]), output_hidden_states=True).hidden_states)

    return hidden_states


def hello(server: Server) -> ServerHello:
    return ServerHello.from_json((server.spool / SPEC_FILE).read_text())


def new_rid() -> str:
    return str(RequestId("testtest", "abcd0123", next(_rows), 0))


def some_tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(6, VOCAB_SIZE), k=length)


def capture(server: Server, ids: list[int], runs: list[int], rid: str, **extra: Any) -> dict[str, Any]:
    """Send one own request; `extra` overrides fields of the payload, its `params` those of custom_params."""
    params = {SPEC_PARAM: hello(server).spec_id, LAST_PARAM: runs} | extra.pop("params", {})
    sampling = {"max_new_tokens": 1, "temperature": 0, "custom_params": params, **extra.pop("sampling", {})}
    payload = {"rid": rid, "input_ids": ids, "extra_key": rid, "sampling_params": sampling, **extra}
    return server.generate(**payload)["meta_info"]


def refusal(meta: dict[str, Any]) -> str:
    (reply,) = meta["eyas"]
    assert reply["status"] == "refused", reply
    return reply["reason"]


def wait_for(server: Server, rid: str, deadline_s: float = 20.0) -> Path:
    """The record's file, whichever way it ended."""
    ends = [server.spool / f"{rid}{suffix}" for suffix in (RECORD_SUFFIX, FAILED_SUFFIX)]
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        for path in ends:
            if path.exists():
                return path
        time.sleep(0.01)
    raise AssertionError(f"no record of {rid}:\n{server.log_tail()}")


def check_record(server: Server, rid: str, ids: list[int], runs: list[int], reference: Reference) -> RecordHeader:
    """Identity, checksums and every number of a published record; neighbouring layers must not match."""
    path = wait_for(server, rid)
    assert path.suffix == RECORD_SUFFIX, path.read_text()
    agreed = hello(server)
    with safe_open(path, framework="pt") as file:
        header = RecordHeader.from_json(file.metadata()[RECORD_METADATA])
        aux, last = file.get_tensor("aux"), file.get_tensor("last")
    layers = agreed.spec["layers"]
    positions = [p for a, b in zip(runs[0::2], runs[1::2], strict=True) for p in range(a, b)]
    assert (header.rid, header.spec_id, header.tokens) == (rid, agreed.spec_id, token_hash(ids))
    assert (header.rows, header.positions, header.runs) == (len(ids), len(positions), f"{runs_hash(runs):016x}")
    assert (int(header.aux, 16), int(header.last, 16)) == (field_hash(aux.numpy()), field_hash(last.numpy()))
    assert [a for a, _ in header.chunks] == [0, *(b for _, b in header.chunks[:-1])]
    assert header.chunks[-1][1] == len(ids)
    states = reference(ids)
    assert aux.shape == (len(ids), len(layers), agreed.spec["hidden_size"])
    for at, layer in enumerate(layers):
        torch.testing.assert_close(aux[:, at], states[layer + 1], atol=1e-3, rtol=1e-3)
        for neighbour in (states[layer], states[layer + 2]):
            assert (aux[:, at] - neighbour).abs().max() > 0.1
    torch.testing.assert_close(last, states[-1][positions], atol=1e-3, rtol=1e-3)
    return header


def test_hello_states_the_agreement_and_what_the_server_admits(
    server: Server, record_property: Callable[[str, object], None]
) -> None:
    agreed = hello(server)
    assert agreed.spec["layers"] == [1, 3, 4]
    assert (agreed.spec["num_layers"], agreed.spec["hidden_size"], agreed.spec["vocab_size"]) == (8, 256, VOCAB_SIZE)
    assert agreed.provenance["layers_checked"] == "yes"
    release = tuple(int(part) for part in agreed.provenance["sglang"].split(".")[:3])
    assert agreed.provenance["capture"] == ("server flags" if release >= (0, 5, 23) else "hooks")
    for key in ("sglang", "torch", "capture"):  # for the table of supported releases
        record_property(key, agreed.provenance[key])
    longest = agreed.max_row_tokens
    assert longest == 1024 - 7
    rid = new_rid()
    assert capture(server, some_tokens(1, longest), [], rid)["eyas"][0]["status"] == "accepted"
    wait_for(server, rid).unlink()
    with pytest.raises(OSError, match="400"):
        capture(server, some_tokens(1, longest + 1), [], new_rid())


def test_sixteen_at_once_every_row_right(server: Server, reference: Reference) -> None:
    shared = some_tokens(2, 300)
    lengths = [1, 2, 63, 64, 65, 128, 200, 200, 200, 333, 333, 512, 600]
    prompts = [some_tokens(100 + n, length) for n, length in enumerate(lengths)]
    prompts += [shared + some_tokens(3, 40), shared + some_tokens(4, 40), prompts[-1]]  # prefixes, and a duplicate
    random.Random(5).shuffle(prompts)
    jobs: list[tuple[str, list[int], list[int]]] = []
    for n, ids in enumerate(prompts):
        cuts = sorted(random.Random(n).sample(range(len(ids) + 1), min(4, (len(ids) + 1) // 2 * 2)))
        jobs.append((new_rid(), ids, cuts))
    with ThreadPoolExecutor(16) as pool:
        metas = list(pool.map(lambda job: capture(server, job[1], job[2], job[0]), jobs))
    for (rid, ids, runs), meta in zip(jobs, metas, strict=True):
        (reply,) = meta["eyas"]
        assert (reply["status"], reply["rows"], reply["tokens"]) == ("accepted", len(ids), token_hash(ids))
        check_record(server, rid, ids, runs, reference)
    assert not list(server.spool.glob(".*"))


def test_other_requests_are_not_touched(server: Server) -> None:
    """Side by side in the same batches, streamed or not: no `eyas` key, no file, the same tokens as alone."""
    ids = some_tokens(6, 90)
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    alone = server.generate(input_ids=ids, sampling_params=sampling)
    before = set(server.spool.iterdir())
    own = [(new_rid(), some_tokens(200 + n, 50 + n)) for n in range(8)]

    def streamed(_: int) -> list[dict[str, Any]]:
        body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
        with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    with ThreadPoolExecutor(24) as pool:
        ours = [pool.submit(capture, server, tokens, [], rid) for rid, tokens in own]
        others = [pool.submit(server.generate, input_ids=ids, sampling_params=sampling) for _ in range(8)]
        streams = list(pool.map(streamed, range(8)))
    assert all(job.result()["eyas"][0]["status"] == "accepted" for job in ours)
    for other in [job.result() for job in others] + [stream[-1] for stream in streams]:
        assert other["output_ids"] == alone["output_ids"]
    for meta in [job.result()["meta_info"] for job in others] + [m["meta_info"] for s in streams for m in s]:
        assert "eyas" not in meta
    files = {wait_for(server, rid) for rid, _ in own}
    assert set(server.spool.iterdir()) - before == files


def test_a_batch_shared_with_requests_for_logprobs(server: Server, reference: Reference) -> None:
    """Input logprobs prune the states that go to lm_head; what is captured must stay whole and in order."""
    lengths = [9, 5, 7, 3, 11, 1, 13, 12]
    prompts = [some_tokens(500 + n, length) for n, length in enumerate(lengths)]
    sampling = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
    logprobs = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    alone = server.generate(input_ids=prompts[0], sampling_params=sampling, **logprobs)["meta_info"]
    params = {SPEC_PARAM: hello(server).spec_id}

    def together() -> bool:
        """Queue eight requests behind a long prompt; whether one forward took them all."""
        own = {n: new_rid() for n in range(1, 8, 2)}
        seen = len(server.log.read_text(errors="replace"))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(
                server.generate, input_ids=some_tokens(499, 14 * 64), extra_key=own[1], sampling_params=sampling
            )
            time.sleep(0.1)
            replies = server.generate(
                rid=[own.get(n, f"other-{n}-{own[1]}") for n in range(8)],
                input_ids=prompts,
                extra_key=[own.get(n, f"salt-{n}-{own[1]}") for n in range(8)],
                sampling_params=[
                    sampling | ({"custom_params": params | {LAST_PARAM: [0, lengths[n]]}} if n in own else {})
                    for n in range(8)
                ],
                return_logprob=[n % 4 == 0 for n in range(8)],
                logprob_start_len=[0 if n == 0 else -1 for n in range(8)],
                top_logprobs_num=[2 if n == 0 else 0 for n in range(8)],
            )
        for n, reply in enumerate(replies):
            if n in own:
                assert [word["status"] for word in reply["meta_info"]["eyas"]] == ["accepted"]
                check_record(server, own[n], prompts[n], [0, lengths[n]], reference)
            else:
                assert "eyas" not in reply["meta_info"]
        mine = torch.tensor([value for value, *_ in replies[0]["meta_info"]["input_token_logprobs"][1:]])
        theirs = torch.tensor([value for value, *_ in alone["input_token_logprobs"][1:]])
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)
        return "#new-seq: 8" in server.log.read_text(errors="replace")[seen:]

    assert any(together() for _ in range(10)), f"never in one forward:\n{server.log_tail()}"


def test_chunks_mixed_with_decoding_requests(server: Server, reference: Reference) -> None:
    """Others decode, and so do own requests with more than one token, while further prompts are prefilled."""
    sampling = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}
    jobs = [(new_rid(), some_tokens(600 + n, 20 + 37 * n)) for n in range(8)]
    with ThreadPoolExecutor(16) as pool:
        others = [
            pool.submit(
                server.generate, input_ids=some_tokens(700 + n, 30), sampling_params=sampling, return_logprob=True
            )
            for n in range(4)
        ]
        time.sleep(0.2)
        more = {"max_new_tokens": 20, "ignore_eos": True}
        ours = [pool.submit(capture, server, ids, [0, 20], rid, sampling=more) for rid, ids in jobs]
    assert all(len(job.result()["output_ids"]) == 60 for job in others)
    for (rid, ids), job in zip(jobs, ours, strict=True):
        assert [word["status"] for word in job.result()["eyas"]] == ["accepted"]
        check_record(server, rid, ids, [0, 20], reference)


def test_several_samples_of_one_prompt_are_never_captured_under_one_id(server: Server) -> None:
    """SGLang gives each of them an id of its own, which is not one of ours."""
    before, rid = set(server.spool.iterdir()), new_rid()
    sampling = {"n": 2, "max_new_tokens": 1, "custom_params": {SPEC_PARAM: hello(server).spec_id, LAST_PARAM: []}}
    replies = server.generate(rid=rid, input_ids=some_tokens(15, 40), extra_key=rid, sampling_params=sampling)
    assert all("eyas" not in reply["meta_info"] or refusal(reply["meta_info"]) for reply in replies)
    assert set(server.spool.iterdir()) == before


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_with_many_tokens_says_it_once(server: Server, reference: Reference, stream: bool) -> None:
    ids, rid = some_tokens(7, 70), new_rid()
    params = {SPEC_PARAM: hello(server).spec_id, LAST_PARAM: [0, 70]}
    sampling = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0, "custom_params": params}
    body = {"rid": rid, "input_ids": ids, "extra_key": rid, "sampling_params": sampling, "stream": stream}
    response = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    text = response.text if not stream else response.text.split("data: ")[-2]
    meta = json.loads(text)["meta_info"]
    assert meta["completion_tokens"] == 6
    assert [reply["status"] for reply in meta["eyas"]] == ["accepted"]
    check_record(server, rid, ids, [0, 70], reference)


def test_a_cached_prefix_is_refused_by_name(server: Server) -> None:
    ids = some_tokens(8, 200)
    assert capture(server, ids, [], new_rid(), extra_key=None)["eyas"][0]["status"] == "accepted"
    rid = new_rid()
    meta = capture(server, ids, [], rid, extra_key=None)
    assert meta["cached_tokens"] > 0
    assert refusal(meta) == "prefix-cached"
    assert not list(server.spool.glob(f"*{rid}*"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"params": {SPEC_PARAM: "0" * 32}}, "spec-differs"),
        ({"params": {SPEC_PARAM: None}}, "spec-differs"),
        ({"params": {LAST_PARAM: [0]}}, "bad-request"),
        ({"params": {LAST_PARAM: [0, 81]}}, "bad-request"),
        ({"params": {LAST_PARAM: [5, 5]}}, "bad-request"),
        ({"params": {LAST_PARAM: "0-5"}}, "bad-request"),
        ({"params": {LAST_PARAM: None}}, "bad-request"),
    ],
)
def test_a_wrong_request_is_refused_by_name(server: Server, change: dict[str, Any], reason: str) -> None:
    rid = new_rid()
    assert refusal(capture(server, some_tokens(9, 80), [0, 10], rid, **change)) == reason
    assert not list(server.spool.glob(f"*{rid}*"))


@pytest.mark.parametrize("rid", ["eyas.", "eyas.x", "eyas.testtest.abcd0123.00000001.1", "eyas.../../../../etc/x"])
def test_a_malformed_id_is_refused_by_name(server: Server, rid: str) -> None:
    before = set(server.spool.iterdir())
    assert refusal(capture(server, some_tokens(10, 20), [], rid)) == "bad-request"
    assert set(server.spool.iterdir()) == before


def test_a_vanished_spool_is_refused_by_name_and_the_server_lives(server: Server, reference: Reference) -> None:
    moved = server.spool.with_name("moved")
    server.spool.rename(moved)
    ids, rid = some_tokens(11, 80), new_rid()
    agreed = {SPEC_PARAM: ServerHello.from_json((moved / SPEC_FILE).read_text()).spec_id, LAST_PARAM: []}
    sampling = {"max_new_tokens": 1, "custom_params": agreed}
    assert refusal(server.generate(rid=rid, input_ids=ids, sampling_params=sampling)["meta_info"]) == "write-failed"
    assert not server.spool.exists()
    moved.rename(server.spool)
    rid = new_rid()
    assert capture(server, ids, [0, 5], rid)["eyas"][0]["status"] == "accepted"
    check_record(server, rid, ids, [0, 5], reference)


def test_two_ranks_write_each_record_once(tight_server: Server, reference: Reference) -> None:
    jobs = [(new_rid(), some_tokens(300 + n, 30 + 10 * n)) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        metas = list(pool.map(lambda job: capture(tight_server, job[1], [0, 30], job[0]), jobs))
    assert all(meta["eyas"][0]["status"] == "accepted" for meta in metas)
    for rid, ids in jobs:
        check_record(tight_server, rid, ids, [0, 30], reference)
    records = [path.name for path in tight_server.spool.iterdir() if path.name != SPEC_FILE]
    assert sorted(records) == sorted(f"{rid}{RECORD_SUFFIX}" for rid, _ in jobs)
    assert tight_server.log.read_text(errors="replace").count("eyas: capturing") == 1
    _clean(tight_server)


def test_over_quota_is_refused_until_there_is_room(tight_server: Server) -> None:
    spec = hello(tight_server).spec
    per_token = len(spec["layers"]) * spec["hidden_size"] * 4
    half = some_tokens(12, QUOTA // per_token // 2)
    rids = [new_rid() for _ in range(3)]
    for rid in rids[:2]:
        assert capture(tight_server, half, [], rid)["eyas"][0]["status"] == "accepted"
    assert refusal(capture(tight_server, half, [], rids[2])) == "spool-full"
    wait_for(tight_server, rids[0]).unlink()
    assert capture(tight_server, half, [], rids[2])["eyas"][0]["status"] == "accepted"
    too_large = some_tokens(13, QUOTA // per_token + 1)
    assert refusal(capture(tight_server, too_large, [], new_rid())) == "row-too-large"
    for rid in rids[1:]:
        wait_for(tight_server, rid)
    _clean(tight_server)


def test_an_aborted_request_gives_its_room_back(tight_server: Server) -> None:
    spec = hello(tight_server).spec
    nearly_all = some_tokens(14, QUOTA * 9 // 10 // (len(spec["layers"]) * spec["hidden_size"] * 4))

    def aborted() -> bool:
        rid = new_rid()
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(capture, tight_server, nearly_all, [], rid)
            time.sleep(0.1)
            httpx.post(f"{tight_server.url}/abort_request", json={"rid": rid}, timeout=30)
            finished = job.exception() is None and job.result()["finish_reason"]["type"] != "abort"
        if finished:
            wait_for(tight_server, rid).unlink()
        else:
            assert not (tight_server.spool / f"{rid}{RECORD_SUFFIX}").exists()
        return not finished

    assert any(aborted() for _ in range(10)), "every request finished before its abort arrived"
    rid = new_rid()
    assert capture(tight_server, nearly_all, [], rid)["eyas"][0]["status"] == "accepted"
    wait_for(tight_server, rid)
    _clean(tight_server)


def test_a_request_taken_back_while_it_decodes_keeps_its_record(tight_server: Server, reference: Reference) -> None:
    jobs = [(new_rid(), some_tokens(400 + n, 40 + n)) for n in range(6)]
    sampling = {"max_new_tokens": 40, "ignore_eos": True}
    with ThreadPoolExecutor(6) as pool:
        metas = list(pool.map(lambda j: capture(tight_server, j[1], [1, 9], j[0], sampling=sampling), jobs))
    assert sum(meta["num_retractions"] for meta in metas) > 0
    for (rid, ids), meta in zip(jobs, metas, strict=True):
        assert [reply["status"] for reply in meta["eyas"]] == ["accepted"]
        check_record(tight_server, rid, ids, [1, 9], reference)
    _clean(tight_server)


def test_no_refusal_was_a_plugin_error(server: Server, tight_server: Server) -> None:
    for running in (server, tight_server):
        assert "logged once" not in running.log.read_text(errors="replace")


def writers_of(server: Server) -> list[int]:
    """Its writer processes."""
    found = []
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"eyas.capture.writer" in words and os.getpgid(pid) == server.pid:
                found.append(pid)
    return found


def test_writers_are_a_process_or_threads(server: Server, tight_server: Server) -> None:
    assert (len(writers_of(server)), len(writers_of(tight_server))) == (1, 0)


def test_a_reply_tells_what_capture_costs(server: Server, tight_server: Server) -> None:
    for running in (server, tight_server):
        for _ in range(2):  # the first of them may be the first forward of ours
            rid = new_rid()
            (reply,) = capture(running, some_tokens(17, 30), [0, 30], rid)["eyas"]
            wait_for(running, rid).unlink()
        assert 0 < reply["forward_us_p50"] <= reply["forward_us_p99"]


def test_a_writer_process_that_is_killed_is_replaced(server: Server, reference: Reference) -> None:
    """Rows on their way at that moment are failed by name; the server goes on, and so does capture."""
    before = writers_of(server)
    os.kill(before[0], signal.SIGKILL)
    ids, rid = some_tokens(18, 200), new_rid()
    assert capture(server, ids, [0, 200], rid)["eyas"][0]["status"] == "accepted"
    if wait_for(server, rid).suffix == FAILED_SUFFIX:  # its end was noticed only when it had been given this one
        rid = new_rid()
        assert capture(server, ids, [0, 200], rid)["eyas"][0]["status"] == "accepted"
    check_record(server, rid, ids, [0, 200], reference)
    assert len(after := writers_of(server)) == 1
    assert after != before


def test_replaced_weights_end_capture(server: Server, model: Path) -> None:
    """The last test: this server captures nothing any more. Other requests go on."""
    body = {"model_path": str(model)}
    answer = httpx.post(f"{server.url}/update_weights_from_disk", json=body, timeout=60).json()
    assert answer["success"], answer
    (reply,) = capture(server, some_tokens(16, 20), [], new_rid())["eyas"]
    assert (reply["status"], reply["reason"]) == ("refused", "plugin-error")
    assert "weights were replaced" in reply["detail"]
    assert len(server.generate(input_ids=[7, 8, 9], sampling_params={"max_new_tokens": 3})["output_ids"]) > 0


def _clean(server: Server) -> None:
    for path in server.spool.iterdir():
        if path.name != SPEC_FILE:
            path.unlink()
