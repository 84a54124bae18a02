"""A drafter measured in servers, with and without it: figures, fairness, and every way in which they could be wrong."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from fake_servers import END, FakeServer, Net, answer_to, drafts_for
from rich.console import Console

from eyas.acceptance import accept_length
from eyas.config import Config, load
from eyas.data.template import Template
from eyas.errors import ConfigError, EngineError, EyasError, IntegrityError, Interrupted
from eyas.evaluate.counters import Cycles
from eyas.evaluate.live import Live, evaluate_live
from eyas.evaluate.results import read_evaluation

MOST = 12  # tokens of an answer
QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["Name three rivers.", "Now three lakes."]},
    {"question_id": 2, "category": "math", "turns": ["What is 7 times 8?"]},
    {"question_id": 3, "category": "math", "turns": ["Is 91 a prime?", "Why?"]},
]
ENGINES = ["vllm", "sglang"]


class World(NamedTuple):
    """Attributes: head: a drafter. questions: of two categories. out: where files go. template: the target's."""

    head: Path
    questions: Path
    out: Path
    target: Path
    template: Template

    def run(self, server: FakeServer, plain: FakeServer | str | None = None, **settings: Any) -> Live:
        servers = {"drafting": server} | ({"plain": plain} if isinstance(plain, FakeServer) else {})
        named = "http://plain:8000" if isinstance(plain, FakeServer) else plain
        cfg = self.config(server="http://drafting:8000/v1", baseline_server=named, **settings)
        console = Console(file=io.StringIO())
        return evaluate_live(self.head, cfg, console=console, command="eyas evaluate", transport=Net(servers))

    def config(self, **settings: Any) -> Config:
        said = {
            "questions": self.questions, "out": self.out, "target": self.target, "max_new_tokens": MOST,
            "concurrency": "1,3", **settings,
        }  # fmt: skip
        return load(overrides=[f"evaluate.{key}={value}" for key, value in said.items() if value is not None])


@pytest.fixture(scope="module")
def template(smollm2_dir: Path) -> Template:
    return Template.load(str(smollm2_dir))


@pytest.fixture
def world(tmp_path: Path, smollm2_dir: Path, template: Template) -> World:
    head, questions = tmp_path / "head", tmp_path / "toy" / "question.jsonl"
    for folder in (head, questions.parent):
        folder.mkdir()
    (head / "model.safetensors").write_bytes(b"weights")
    (head / "config.json").write_text("{}")
    questions.write_text("".join(f"{json.dumps(question)}\n" for question in QUESTIONS))
    return World(head, questions, tmp_path / "out", smollm2_dir, template)


def asked_for(server: FakeServer) -> list[list[int]]:
    """The prompts it was asked, warm-ups left out."""
    key = "prompt" if server.engine == "vllm" else "input_ids"
    longest = [body.get("max_tokens") or body["sampling_params"]["max_new_tokens"] for body in server.asked]
    assert set(longest) == {MOST}
    return [body[key] for body in server.asked]


def expected_prompts(template: Template) -> list[list[int]]:
    """Each turn with the answers before it, as the target's template has them."""
    prompts = []
    for question in QUESTIONS:
        messages: list[dict[str, Any]] = []
        for turn in question["turns"]:  # type: ignore[union-attr]
            messages.append({"role": "user", "content": turn})
            prompts.append(template.prompt_ids(messages))
            answer = answer_to(prompts[-1], MOST)
            said = answer[:-1] if answer[-1] == END else answer
            messages.append({"role": "assistant", "content": template.decode(said)})
    return prompts


def expected_cycles(prompts: list[list[int]], depth: int = 3) -> Cycles:
    drafts = [n for ids in prompts for n in drafts_for(ids, len(answer_to(ids, MOST)), depth)]
    return Cycles.of_histogram([drafts.count(n) for n in range(depth + 1)], depth)


# --- figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "server",
    [
        FakeServer("vllm"), FakeServer("vllm", lag=3), FakeServer("vllm", told=True),
        FakeServer("sglang"), FakeServer("sglang", increments=True),
    ],
    ids=["vllm", "vllm, counters lag", "vllm, a reply", "sglang", "sglang, increments"],
)  # fmt: skip
def test_acceptance_is_what_the_server_counted(server: FakeServer, world: World, template: Template) -> None:
    """Of all prompts, and of nothing else: warm-ups are not among them."""
    done = world.run(server, FakeServer(server.engine, depth=0))
    prompts = expected_prompts(template)
    cycles = expected_cycles(prompts)
    assert len(server.asked) > 2 * len(prompts)  # the warm-ups
    tokens = sum(len(answer_to(ids, MOST)) for ids in prompts)
    for one in (result for result in done.evaluation.results if result.category == "all"):
        assert (one.reached, one.right) == (cycles.reached, cycles.right)
        assert one.counters == {"drafts": cycles.number, "accepted": list(cycles.right)}
        shares = [right / reached for right, reached in zip(cycles.right, cycles.reached, strict=True)]
        assert one.accept_by_position == pytest.approx(shares)
        assert one.accept_length == pytest.approx(accept_length(shares))
        assert one.ci95[0] <= one.accept_length <= one.ci95[1]
        assert (one.prompts, one.tokens, one.cycles) == (len(QUESTIONS), tokens, cycles.number)
        assert one.tokens_per_s and one.ttft_ms and one.speedup
    math = next(one for one in done.evaluation.results if one.category == "math")
    own = expected_cycles(prompts[2:])
    assert (math.prompts, math.reached, math.right) == (2, own.reached, own.right)
    assert [(one.category, one.concurrency) for one in done.evaluation.results] == [
        ("all", 1), ("math", 1), ("writing", 1), ("all", 3),
    ]  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
def test_both_servers_are_asked_the_same_and_share_no_cache(engine: str, world: World, template: Template) -> None:
    server, plain = FakeServer(engine), FakeServer(engine, depth=0)
    done = world.run(server, plain)
    prompts = expected_prompts(template)
    for one in (server, plain):
        asked = asked_for(one)
        assert [ids for ids in asked if ids in prompts] == asked
        assert asked[1:6] == prompts  # one warm-up, then one at a time
        assert sorted(asked[9:]) == sorted(prompts)  # three warm-ups, then three at a time
        assert one.most == 3
        salts = [body.get("cache_salt") or body["extra_key"] for body in one.asked]
        assert len(set(salts)) == len(salts)
    assert done.evaluation.notes[-1] == "5 of 5 answers are token for token those without speculation"
    plain_speeds = [one.tokens_per_s for one in done.plain.results]  # type: ignore[union-attr]
    for one, speed in zip(done.evaluation.results, plain_speeds, strict=True):
        assert one.speedup == pytest.approx(one.tokens_per_s / speed)  # type: ignore[operator]


def test_answers_that_differ_are_told(world: World) -> None:
    plain = FakeServer(depth=0)
    plain.hook = lambda body: _with_a_word_changed(plain._vllm(body)) if len(plain.asked) == 2 else None
    done = world.run(FakeServer(), plain)
    assert done.evaluation.notes[-1] == "4 of 5 answers are token for token those without speculation"


def _with_a_word_changed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    events[0]["choices"][0]["token_ids"] = [99]
    return events


def test_what_it_leaves(world: World) -> None:
    done = world.run(FakeServer(), FakeServer(depth=0))
    names = sorted(path.name for path in world.out.iterdir())
    assert names == [
        "evaluation-toy-vllm-live-d0.answers.jsonl", "evaluation-toy-vllm-live-d0.json",
        "evaluation-toy-vllm-live-d3.answers.jsonl", "evaluation-toy-vllm-live-d3.json",
    ]  # fmt: skip
    kept = read_evaluation(done.path)
    assert (kept["engine"], kept["mode"], kept["benchmark"], kept["depth"]) == ("vllm", "live", "toy", 3)
    assert kept["head_digest"] and kept["versions"]["vllm"] == "0.32.0"
    plain = read_evaluation(done.plain_path)  # type: ignore[arg-type]
    assert (plain["head"], plain["depth"]) == ("", 0)
    assert plain["results"][0]["accept_length"] == 1.0 and plain["results"][0]["accept_by_position"] == []
    assert plain["results"][0]["cycles"] == plain["results"][0]["tokens"] - 5
    shown = Console(file=io.StringIO(), width=120)
    shown.print(done.table())
    assert "speed-up" in shown.file.getvalue()  # type: ignore[attr-defined]


def test_more_at_a_time_than_there_are_prompts(world: World) -> None:
    done = world.run(FakeServer(), concurrency="2,50")
    assert {one.concurrency for one in done.evaluation.results} == {1, 2}


def test_a_prompt_that_does_not_fit_is_left_out_by_name(world: World, template: Template) -> None:
    longest = max(len(ids) for ids in expected_prompts(template)) + MOST + 3 - 1
    done = world.run(FakeServer(longest=longest))
    assert any("from turn 2 on: longer than the server admits" in note for note in done.evaluation.notes)
    with pytest.raises(ConfigError, match="no prompt fits"):
        world.run(FakeServer(longest=20))


def test_a_password_in_a_url_is_not_kept(world: World) -> None:
    cfg = world.config(server="http://me:hunter2@drafting:8000")
    net = Net({"drafting": FakeServer()})
    command = "eyas evaluate head --server http://me:hunter2@drafting:8000"
    done = evaluate_live(world.head, cfg, console=Console(file=io.StringIO()), command=command, transport=net)
    assert "hunter2" not in done.path.read_text()
    assert "http://drafting:8000" in done.evaluation.command


# --- without speculation, from an earlier run -------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_an_earlier_run_takes_the_second_servers_place(engine: str, world: World) -> None:
    first = world.run(FakeServer(engine), FakeServer(engine, depth=0))
    again = world.run(FakeServer(engine), str(first.plain_path))
    plain = first.plain
    assert plain is not None and again.plain is not None
    assert [one.tokens_per_s for one in again.plain.results] == [one.tokens_per_s for one in plain.results]
    assert all(one.speedup for one in again.evaluation.results)
    assert again.evaluation.notes[-1].startswith("5 of 5 answers")


def test_one_server_after_another(world: World) -> None:
    """Where there is one GPU: first without a drafter, alone, then with it."""
    cfg, quiet = world.config(baseline_server="http://plain:8000"), Console(file=io.StringIO())
    net = Net({"plain": FakeServer(depth=0)})
    first = evaluate_live(world.head, cfg, console=quiet, transport=net)
    assert first.path.name == "evaluation-toy-vllm-live-d0.json" and first.plain is None
    done = world.run(FakeServer(), str(first.path))
    assert all(one.speedup for one in done.evaluation.results)
    with pytest.raises(ConfigError, match="drafts 3 tokens a cycle"):
        evaluate_live(world.head, cfg, console=quiet, transport=Net({"plain": FakeServer()}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_new_tokens": 11}, "sampling"),
        ({"temperature": 0.5}, "sampling"),
        ({"limit": 2}, "prompts_digest"),
    ],
)
def test_runs_of_other_prompts_or_sampling_are_not_compared(change: dict[str, Any], says: str, world: World) -> None:
    plain = world.run(FakeServer(), FakeServer(depth=0)).plain_path
    server = FakeServer()
    with pytest.raises(ConfigError, match=f"cannot be compared: {says}"):
        world.run(server, str(plain), **change)
    assert not server.asked


def test_runs_whose_prompts_have_other_tokens_are_not_compared(world: World) -> None:
    """Another template or tokenizer under the same name."""
    plain = world.run(FakeServer(), FakeServer(depth=0)).plain_path
    answers = plain.with_suffix(".answers.jsonl")  # type: ignore[union-attr]
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    lines[1]["prompt_ids"][3] += 1
    answers.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(ConfigError, match="tokens differ"):
        world.run(FakeServer(), str(plain))


def test_files_that_are_no_such_run(world: World, tmp_path: Path) -> None:
    done = world.run(FakeServer(), FakeServer(depth=0))
    with pytest.raises(ConfigError, match="without speculation"):
        world.run(FakeServer(), str(done.path))
    with pytest.raises(ConfigError, match="no such evaluation"):
        world.run(FakeServer(), str(tmp_path / "nothing.json"))
    answers = done.plain_path.with_suffix(".answers.jsonl")  # type: ignore[union-attr]
    answers.write_text("{")
    with pytest.raises(IntegrityError):
        world.run(FakeServer(), str(done.plain_path))
    answers.unlink()
    with pytest.raises(ConfigError, match="are gone"):
        world.run(FakeServer(), str(done.plain_path))


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        (FakeServer(depth=2), "drafts 2 tokens"),
        (FakeServer("sglang", depth=0), "engine vllm and sglang"),
        (FakeServer(depth=0, model="/models/other"), "model SmolLM2-135M-Instruct and other"),
        (FakeServer(depth=0, version="0.31.0"), "version 0.32.0 and 0.31.0"),
    ],
)
def test_servers_that_differ_elsewhere_are_not_compared(plain: FakeServer, says: str, world: World) -> None:
    server = FakeServer()
    with pytest.raises(ConfigError, match=says):
        world.run(server, plain)
    assert not server.asked and not plain.asked


# --- faults -----------------------------------------------------------------------------------------------------------


def _refuses(_: dict[str, Any]) -> httpx.Response:
    return httpx.Response(400, json={"error": {"message": "prompt too long"}})


def _breaks_off(_: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"error": {"message": "engine died"}}]


def _sends_text_only(_: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"choices": [{"index": 0, "text": "hello"}], "text": "hello", "meta_info": {}}]


def _loses_a_token(server: FakeServer) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    def hook(body: dict[str, Any]) -> list[dict[str, Any]]:
        events = server._vllm(body)
        return events[1:]

    return hook


def _counts_nothing(server: FakeServer) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    def hook(body: dict[str, Any]) -> list[dict[str, Any]]:
        server.depth, depth = 0, server.depth
        events = server._vllm(body) if server.engine == "vllm" else server._sglang(body)
        server.depth = depth
        return events

    return hook


def _with(server: FakeServer, make: Callable[[FakeServer], Any]) -> FakeServer:
    server.hook = make(server)
    return server


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (FakeServer("vllm", dies_after=3), "broke off an answer"),
        (FakeServer("sglang", dies_after=3), "broke off an answer"),
        (FakeServer("sglang", falls_silent=True), "ends without a last word"),
        (FakeServer("vllm", metrics=False), "counters are missing"),
        (FakeServer("vllm", depth=0), "does not speculate"),
        (FakeServer("sglang", depth=0), "does not speculate"),
        (FakeServer("vllm", foreign=(1, 5, 9)), "others use it"),
        (FakeServer("vllm", foreign=(0, 7, 0)), "others use it"),
        (FakeServer("vllm", told=True, foreign=(1, 5, 9)), "others use it"),
        (FakeServer("vllm", hook=_refuses), "prompt too long"),
        (FakeServer("sglang", hook=_refuses), "prompt too long"),
        (FakeServer("vllm", hook=_breaks_off), "engine died"),
        (FakeServer("sglang", hook=_breaks_off), "engine died"),
        (FakeServer("vllm", hook=_sends_text_only), "no token ids"),
        (FakeServer("sglang", hook=_sends_text_only), "no token ids"),
        (_with(FakeServer("vllm"), _loses_a_token), "counts 12 tokens of an answer, and sent 11"),
        (_with(FakeServer("vllm"), _counts_nothing), "counts no drafts"),
        (_with(FakeServer("sglang"), _counts_nothing), "tells nothing of its drafts"),
        (FakeServer("openai"), "neither SGLang nor vLLM"),
    ],
)
def test_what_would_be_wrong_figures_is_one_error(server: FakeServer, says: str, world: World) -> None:
    with pytest.raises(EngineError) as caught:
        world.run(server)
    assert says in str(caught.value)
    assert not world.out.exists()


def test_a_server_that_others_keep_busy_is_not_measured(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("vllm", "sglang"):
        monkeypatch.setattr(f"eyas.evaluate.{module}.SETTLE_S", 0.05)
    for engine in ENGINES:
        with pytest.raises(EngineError, match="2 requests of others"):
            world.run(FakeServer(engine, busy=2))
    with pytest.raises(EngineError, match="of the 12 that it sent"):  # another server's counters
        world.run(FakeServer("vllm", lag=10**9))


def test_what_the_server_without_speculation_gave_outlives_the_other_ones_death(world: World) -> None:
    with pytest.raises(EngineError):
        world.run(FakeServer(dies_after=2), FakeServer(depth=0))
    plain = world.out / "evaluation-toy-vllm-live-d0.json"
    assert world.run(FakeServer(), str(plain)).evaluation.results[0].speedup


def test_another_drafter_is_refused_where_the_server_tells(world: World, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    (other / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(ConfigError, match="another drafter"):
        world.run(FakeServer("sglang", draft=str(other)))
    (other / "model.safetensors").write_bytes(b"weights")
    assert world.run(FakeServer("sglang", draft=str(other))).evaluation.notes == ()
    elsewhere = world.run(FakeServer("sglang", draft="/elsewhere/draft")).evaluation.notes
    assert "whether it is this one is not known" in elsewhere[0]


@pytest.mark.parametrize("asked", [1, 4], ids=["warming up", "measuring"])
def test_ctrl_c_leaves_no_figures(asked: int, world: World) -> None:
    server = FakeServer()
    server.hook = lambda _: signal.raise_signal(signal.SIGINT) if len(server.asked) == asked else None
    with pytest.raises(Interrupted):
        world.run(server)
    assert not world.out.exists()


@pytest.mark.parametrize("settings", [{"store": "store"}, {"questions": None}])
def test_a_server_needs_questions_and_nothing_else(settings: dict[str, Any], world: World) -> None:
    said = {"questions": world.questions, "server": "http://drafting", **settings}
    cfg = load(overrides=[f"evaluate.{key}={value}" for key, value in said.items() if value is not None])
    with pytest.raises(ConfigError, match="measured on questions"):
        evaluate_live(world.head, cfg, transport=Net({}))


def test_nobody_there(world: World) -> None:
    with pytest.raises(EyasError, match="no server"):
        evaluate_live(world.head, world.config(server="http://nowhere:1"), transport=Net({}))
