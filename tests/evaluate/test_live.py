"""A drafter measured in servers, with and without it: figures, fairness, and every way in which they could be wrong."""

from __future__ import annotations

import io
import json
import shlex
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
from eyas.evaluate.results import read_evaluation, without_secrets

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

    def alone(self, plain: FakeServer, **settings: Any) -> Live:
        """Only the server without a drafter."""
        cfg = self.config(baseline_server="http://plain:8000", **settings)
        return evaluate_live(self.head, cfg, console=Console(file=io.StringIO()), transport=Net({"plain": plain}))

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


@pytest.mark.parametrize("engine", ENGINES)
def test_no_default_of_the_server_decides_on_the_sampling(engine: str, world: World) -> None:
    server = FakeServer(engine)
    world.run(server, concurrency="1", temperature=0.5)
    for body in server.asked:
        said = body if engine == "vllm" else body["sampling_params"]
        neutral = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "top_k": 0 if engine == "vllm" else -1}
        assert {name: said.get(name) for name in neutral} == neutral
        assert said["temperature"] == 0.5


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
    assert any("from turn 2 on is longer than the server admits" in note for note in done.evaluation.notes)
    with pytest.raises(ConfigError, match="no prompt fits"):
        world.run(FakeServer(longest=20))


def test_what_a_server_without_a_drafter_was_not_asked_is_in_its_file(world: World, template: Template) -> None:
    longest = max(len(ids) for ids in expected_prompts(template)) + MOST + 3 - 1
    beside = world.run(FakeServer(longest=longest), FakeServer(depth=0, longest=longest))
    alone = world.alone(FakeServer(depth=0, longest=longest))
    for path in (beside.plain_path, alone.path):
        (note,) = read_evaluation(path)["notes"]  # type: ignore[arg-type]
        assert "from turn 2 on is longer than the server admits" in note


@pytest.mark.parametrize("engine", ENGINES)
def test_a_first_question_that_does_not_fit_leaves_no_server_cold(engine: str, world: World) -> None:
    rows = [{"question_id": 0, "category": "long", "turns": ["word " * 900]}, *QUESTIONS]
    world.questions.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    server = FakeServer(engine, longest=700)
    done = world.run(server, concurrency="1")
    assert len(server.asked) == 1 + 5, "one request warms it up"
    assert done.evaluation.results[0].tokens == sum(len(answer_to(ids, MOST)) for ids in asked_for(server)[1:])


SECRETS = [
    ["--server", "http://me:hunter2@drafting:8000"],
    ["--server", "http://me:hunter@hunter2@drafting:8000"],
    ["--set", "server.api_key=hunter2"],
    ["--set", "server.api_key=a b 'hunter2'"],
    ["--set", "server.api_key= hunter2"],
    ["--set", 'server.urls=["http://me:hunter2@drafting:8000/v1"]'],
]


@pytest.mark.parametrize("words", SECRETS, ids=" ".join)
def test_a_password_in_a_url_and_an_api_key_are_not_kept(words: list[str], world: World) -> None:
    cfg = world.config(server="http://me:hunter2@drafting:8000", concurrency="1")
    net, command = Net({"drafting": FakeServer()}), shlex.join(["eyas", "evaluate", "a head", *words, "--depth", "3"])
    done = evaluate_live(world.head, cfg, console=Console(file=io.StringIO()), command=command, transport=net)
    assert "hunter2" not in done.path.read_text()
    kept = shlex.split(done.evaluation.command)
    assert kept[:4] + kept[5:] == ["eyas", "evaluate", "a head", words[0], "--depth", "3"]
    assert kept[4].startswith(("http://drafting:8000", "server.api_key=", "server.urls="))


def test_a_command_that_hides_nothing_is_kept_as_it_is() -> None:
    for text in ("eyas ...", "eyas evaluate 'a b' --target me@home", "it's open", ""):
        assert without_secrets(text) == text
    assert "hunter2" not in without_secrets("it's api_key: hunter2")


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
    assert read_evaluation(first.path)["versions"]["model"] == "SmolLM2-135M-Instruct"
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


def test_runs_of_other_models_are_not_compared_and_tell(world: World) -> None:
    """Whatever target was named, the servers' own words count."""
    other = world.alone(FakeServer(depth=0, model="/models/SmolLM2-360M-Instruct"))
    (note,) = read_evaluation(other.path)["notes"]
    assert "names its model SmolLM2-360M-Instruct, the drafter's target is" in note
    server = FakeServer()
    with pytest.raises(ConfigError, match="model SmolLM2-360M-Instruct and SmolLM2-135M-Instruct"):
        world.run(server, str(other.path))
    assert not server.asked


def test_a_file_that_does_not_tell_its_model_is_not_compared(world: World) -> None:
    plain = world.alone(FakeServer(depth=0)).path
    known = json.loads(plain.read_text())
    del known["versions"]["model"]
    plain.write_text(json.dumps(known))
    with pytest.raises(ConfigError, match="model unknown and"):
        world.run(FakeServer(), str(plain))


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
        (FakeServer("vllm", deeper_after=2), "counters went back"),
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
    with pytest.raises(ConfigError, match="another drafter") as caught:
        world.run(FakeServer("sglang", draft=str(other)))
    assert "name the exported folder" in str(caught.value)
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


@pytest.mark.parametrize("name", ["server", "baseline_server"])
def test_ctrl_c_shows_the_server_and_no_password(name: str, world: World) -> None:
    server = FakeServer(depth=3 if name == "server" else 0)
    server.hook = lambda _: signal.raise_signal(signal.SIGINT)
    cfg = world.config(**{name: "http://me:hunter2@drafting:8000"})
    with pytest.raises(Interrupted) as caught:
        evaluate_live(world.head, cfg, console=Console(file=io.StringIO()), transport=Net({"drafting": server}))
    assert "http://drafting:8000" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"depth": 5}, "drafts with depth 3, not 5"),
        ({"topk": 2}, "drafts with topk 1, not 2"),
        ({"draft_tokens": 8}, "drafts with draft_tokens 3, not 8"),
        ({"temperature": 1, "sample_drafts": "true"}, "sample_drafts is of this process"),
        ({"tree_keys": "ancestors"}, "tree_keys is of this process"),
        ({"dtype": "bf16"}, "dtype is of this process"),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_drafting_that_is_not_the_servers_is_refused(
    engine: str, settings: dict[str, Any], says: str, world: World
) -> None:
    server = FakeServer(engine)
    with pytest.raises(ConfigError, match=says):
        world.run(server, **settings)
    assert not server.asked and not world.out.exists()


def test_drafting_that_is_the_servers_may_be_said(world: World) -> None:
    said = {"depth": 3, "topk": 1, "draft_tokens": 3, "dtype": "f32", "tree_keys": "places"}
    assert world.run(FakeServer(), concurrency="1", **said).evaluation.depth == 3


@pytest.mark.parametrize("text", ["0", "-1", "1,0", "[4, -2]"])
def test_none_or_less_at_a_time_is_refused_beforehand(text: str, world: World) -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.concurrency"):
        world.config(concurrency=text)


@pytest.mark.parametrize("settings", [{"store": "store"}, {"questions": None}])
def test_a_server_needs_questions_and_nothing_else(settings: dict[str, Any], world: World) -> None:
    said = {"questions": world.questions, "server": "http://drafting", **settings}
    cfg = load(overrides=[f"evaluate.{key}={value}" for key, value in said.items() if value is not None])
    with pytest.raises(ConfigError, match="measured on questions"):
        evaluate_live(world.head, cfg, transport=Net({}))


def test_nobody_there(world: World) -> None:
    with pytest.raises(EyasError, match="no server"):
        evaluate_live(world.head, world.config(server="http://nowhere:1"), transport=Net({}))
