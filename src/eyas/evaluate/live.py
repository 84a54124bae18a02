"""`eyas evaluate --server URL`: a drafter in the server that it lives in, with and without it in one run.

Both servers are asked the same prompts with the same sampling, one at a time and several, after requests that warm them
up. Acceptance comes of the server's own counters (`eyas.evaluate.counters`). What was measured without speculation is
written as soon as it is there, with its answers, so that a later run can name the file instead of a second server.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from eyas.config import Config, EvaluateConfig
from eyas.data.template import Template
from eyas.errors import ConfigError, EngineError, Interrupted
from eyas.evaluate.conversation import Conversations, Prompt
from eyas.evaluate.earlier import Earlier, check_comparable, save_answers
from eyas.evaluate.head import Head
from eyas.evaluate.http import Http
from eyas.evaluate.passes import Asker, Pass
from eyas.evaluate.progress import PromptsView
from eyas.evaluate.questions import Question, benchmark_of, digest_of, read_questions
from eyas.evaluate.results import ALL, Evaluation, Result, without_secrets
from eyas.evaluate.served import NO_DRAFTS, Asking, ServedModel
from eyas.evaluate.sglang import SglangServer
from eyas.evaluate.vllm import VllmServer
from eyas.extract.http import json_object
from eyas.signals import StopSignals
from eyas.target.checkpoint import Target
from eyas.train.checkpoint_format import CONFIG_FILE

_URL: Final = ("http://", "https://")
#: Settings that a server was started with, and those that it knows nothing of.
_SERVED: Final = ("depth", "topk", "draft_tokens")
_IN_PROCESS: Final = ("sample_drafts", "tree_keys", "dtype")


class Live(NamedTuple):
    """What was measured.

    Attributes:
        evaluation, path: with speculation, and its file.
        plain, plain_path: without, where that was measured or named.
    """

    evaluation: Evaluation
    path: Path
    plain: Evaluation | None
    plain_path: Path | None

    def table(self) -> Table:
        """Acceptance and speed by requests at a time."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        names = ("at a time", "accepted", "95 %", "by position", "tokens/s", "without", "speed-up", "first token")
        for name in names:
            table.add_column(name, justify="left" if name == "by position" else "right", no_wrap=True)
        plain = {one.concurrency: one for one in self.plain.results if one.category == ALL} if self.plain else {}
        for one in self.evaluation.results:
            if one.category != ALL:
                continue
            other = plain.get(one.concurrency)
            table.add_row(
                str(one.concurrency),
                f"{one.accept_length:.3f}",
                f"{one.ci95[0]:.3f} to {one.ci95[1]:.3f}",
                " ".join(f"{share:.3f}" for share in one.accept_by_position),
                f"{one.tokens_per_s:,.1f}",
                f"{other.tokens_per_s:,.1f}" if other else "",
                f"{one.speedup:.2f}" if one.speedup else "",
                f"{one.ttft_ms:,.0f} ms" + (f" ({other.ttft_ms:,.0f})" if other else ""),
            )
        return table

    def lines(self) -> list[tuple[str, str]]:
        """What is to be said besides, name and text."""
        written = [("written", str(path)) for path in (self.plain_path, self.path) if path is not None]
        return [*(("note", note) for note in self.evaluation.notes), *written]


@dataclass(frozen=True, slots=True)
class _Setting:
    """What is asked, of whom, and where the answers go."""

    head: Head
    cfg: EvaluateConfig
    target: Target
    template: Template
    questions: Sequence[Question]
    console: Console
    command: str
    folder: Path

    @property
    def asking(self) -> Asking:
        cfg = self.cfg
        return Asking(cfg.temperature, cfg.max_new_tokens, tuple(sorted(self.template.end_ids)), cfg.seed)


async def open_server(url: str, cfg: Config, transport: httpx.AsyncBaseTransport | None = None) -> ServedModel:
    """Find out which engine answers at a URL, and what it serves.

    Raises:
        ConfigError: not a URL. EngineError: no such server, or one of another kind.
    """
    http = Http(url, cfg.server, transport)
    try:
        cards = json_object(await http.get("/v1/models")).get("data")
        card: Mapping[str, Any] = cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}
        kinds = {"sglang": SglangServer, "vllm": VllmServer}
        if (kind := kinds.get(str(card.get("owned_by")))) is None:
            hint = "its base URL is needed, such as http://localhost:30000"
            raise EngineError("neither SGLang nor vLLM", http.where, hint)
        server = kind(http)
        await server.identify(card)
    except BaseException:
        await http.close()
        raise
    return server


def evaluate_live(
    draft: str | Path,
    cfg: Config,
    *,
    console: Console | None = None,
    command: str = "",
    transport: httpx.AsyncBaseTransport | None = None,
) -> Live:
    """Measure a drafter in a server.

    Args:
        draft: its folder, its run's, or a hub id.
        cfg: `evaluate.questions` and a server must be named: `evaluate.server`, or a URL in `evaluate.baseline_server`;
            `server` has key, certificates and patience.
        console: where progress goes.
        command: kept in the files.
        transport: what carries the requests; None is the network.

    Raises:
        ConfigError: settings, or runs that cannot be compared.
        EngineError: a server is away, does not count, counts what is not ours, or runs another drafter.
        StoreError: the disk.
        Interrupted: Ctrl-C or SIGTERM.
    """
    wanted = cfg.evaluate
    alone = (wanted.baseline_server or "").startswith(_URL)  # without a drafter first, where there is one GPU
    if not (wanted.server or alone) or wanted.questions is None or wanted.store is not None:
        hint = "name --server URL and --questions FILE, and no --store"
        raise ConfigError("a server is measured on questions", "eyas evaluate", hint)
    _check_in_process(wanted)
    head = Head.find(str(draft))
    with StopSignals():
        target = head.target(wanted.target, None)
        template = Template.load(str(target.dir))
        questions = read_questions(wanted.questions, wanted.limit)
        folder = wanted.out or head.run or Path()
        spoken = console or Console(stderr=True)
        setting = _Setting(head, wanted, target, template, questions, spoken, without_secrets(command), folder)
        try:
            return asyncio.run(_measure(setting, cfg, transport))
        except KeyboardInterrupt:
            where = without_secrets(wanted.server or wanted.baseline_server or "")
            raise Interrupted("stopped", where, "nothing of it is kept but what is said to be written") from None


async def _measure(setting: _Setting, cfg: Config, transport: httpx.AsyncBaseTransport | None) -> Live:
    wanted = setting.cfg
    if wanted.server is None:
        return await _measure_plain(setting, cfg, transport)
    async with AsyncExitStack() as stack:
        server = await open_server(wanted.server, cfg, transport)
        stack.push_async_callback(server.close)
        if not server.depth:
            raise EngineError("the server does not speculate", server.where, NO_DRAFTS[server.engine])
        _check_plan(server, wanted)
        notes = _check_head(server, setting)
        rooms = [server.longest]
        plain_server: ServedModel | None = None
        earlier: Earlier | None = None
        if (named := wanted.baseline_server) and named.startswith(_URL):
            plain_server = await open_server(named, cfg, transport)
            stack.push_async_callback(plain_server.close)
            check_comparable(server, plain_server)
            rooms.append(plain_server.longest)
        elif named:
            earlier = Earlier.read(Path(named))
            earlier.check(_evaluation(setting, server, plain=True))
        known = [room for room in rooms if room is not None]
        room = min(known) - wanted.max_new_tokens - server.depth if known else None
        conversations = Conversations(setting.template, room)
        plain, plain_path, prompts, theirs = None, None, None, None
        if plain_server is not None:
            passes = await _passes(setting, plain_server, conversations, None)
            plain, plain_path = _write_plain(setting, plain_server, conversations, passes)
            prompts, theirs = passes[0].prompts, [answer.tokens for answer in passes[0].answers]
        elif earlier is not None:
            plain, plain_path = earlier.evaluation, earlier.path
            prompts, theirs = earlier.prompts(setting.questions, conversations), earlier.answers
        passes = await _passes(setting, server, conversations, prompts)
        if theirs is not None and not wanted.temperature:
            ours = [answer.tokens for answer in passes[0].answers]
            same = sum(mine == other for mine, other in zip(ours, theirs, strict=True))
            notes.append(f"{same:,} of {len(ours):,} answers are token for token those without speculation")
        speeds = {(one.category, one.concurrency): one.tokens_per_s for one in plain.results} if plain else {}
        done = replace(
            _evaluation(setting, server, plain=False),
            results=_results(passes, setting, server.depth, speeds),
            notes=(*notes, *conversations.left_out),
        )
        path = done.write(setting.folder)
        save_answers(path, passes[0])
    return Live(done, path, plain, plain_path)


async def _measure_plain(setting: _Setting, cfg: Config, transport: httpx.AsyncBaseTransport | None) -> Live:
    """The server without a drafter alone, for a later run to be compared with."""
    wanted = setting.cfg
    server = await open_server(wanted.baseline_server or "", cfg, transport)
    try:
        if server.depth:
            what = f"the server without speculation drafts {server.depth} tokens a cycle"
            raise ConfigError(what, server.where, "name it by --server, or start it without a drafter")
        room = None if server.longest is None else server.longest - wanted.max_new_tokens - wanted.depth
        conversations = Conversations(setting.template, room)
        passes = await _passes(setting, server, conversations, None)
    finally:
        await server.close()
    return Live(*_write_plain(setting, server, conversations, passes), None, None)


def _write_plain(
    setting: _Setting, server: ServedModel, conversations: Conversations, passes: Sequence[Pass]
) -> tuple[Evaluation, Path]:
    """What was measured without a drafter, and its file; the answers lie beside it."""
    notes = (*_check_target(server, setting), *conversations.left_out)
    done = replace(_evaluation(setting, server, plain=True), results=_results(passes, setting, 0, {}), notes=notes)
    path = done.write(setting.folder)
    save_answers(path, passes[0])
    return done, path


async def _passes(
    setting: _Setting, server: ServedModel, conversations: Conversations, prompts: Sequence[Prompt] | None
) -> list[Pass]:
    """One request at a time, then the others of `evaluate.concurrency`."""
    with PromptsView(setting.console) as view:

        def tick(done: int, total: int, concurrency: int) -> None:
            view.count(done, total, f"{server.where}, {concurrency} at a time")

        asker = Asker(server, setting.asking, tick)
        first = await (asker.converse(setting.questions, conversations) if prompts is None else asker.ask(prompts, 1))
        found = [first]
        for concurrency in sorted({*setting.cfg.concurrency} - {1}):
            if concurrency > len(first.prompts):
                text = f"{concurrency} at a time: there are {len(first.prompts)} prompts only"
                setting.console.print(text, highlight=False, soft_wrap=True)
                continue
            found.append(await asker.ask(first.prompts, concurrency))
    return found


def _results(
    passes: Sequence[Pass], setting: _Setting, depth: int, plain: Mapping[tuple[str, int], float | None]
) -> tuple[Result, ...]:
    """All prompts and each category, one at a time; then all prompts, several at a time."""
    categories = [question.category for question in setting.questions]
    first, *others = passes
    names = sorted({categories[prompt.question] for prompt in first.prompts})
    parts = [(ALL, first)]
    parts += [(name, first.of(lambda prompt, name=name: categories[prompt.question] == name)) for name in names]
    parts += [(ALL, one) for one in others]
    return tuple(_result(name, one, setting.cfg.seed, depth, plain.get((name, one.concurrency))) for name, one in parts)


def _result(category: str, one: Pass, seed: int, depth: int, plain: float | None) -> Result:
    numbers = sorted({prompt.question for prompt in one.prompts})
    if one.cycles:  # by question: its turns are of one kind
        counts = np.zeros((2, len(numbers), depth), dtype=np.int64)
        for prompt, cycles in zip(one.prompts, one.cycles, strict=True):
            counts[:, numbers.index(prompt.question)] += np.array([cycles.reached, cycles.right])
    else:
        total = one.total
        counts = np.array([[total.reached], [total.right]]) if total else np.zeros((2, 1, 0), dtype=np.int64)
    total = one.total
    return Result.of_counts(
        category,
        counts[0],
        counts[1],
        tokens=one.tokens,
        prompts=len(numbers),
        seed=seed,
        cycles=total.number if total else one.tokens - len(one.prompts),
        counters={"drafts": total.number, "accepted": list(total.right)} if total else None,
        concurrency=one.concurrency,
        tokens_per_s=one.tokens_per_s,
        speedup=one.tokens_per_s / plain if plain else None,
        ttft_ms=one.ttft_ms,
    )


def _evaluation(setting: _Setting, server: ServedModel, *, plain: bool) -> Evaluation:
    """The evaluation without its results."""
    cfg = setting.cfg
    assert cfg.questions is not None
    return Evaluation(
        head="" if plain else setting.head.name,
        head_digest="" if plain else setting.head.digest(),
        target=setting.target.model,
        engine=server.engine,
        mode="live",
        benchmark=benchmark_of(cfg.questions),
        depth=0 if plain else server.depth,
        topk=1 if plain else server.topk,
        draft_tokens=0 if plain else server.draft_tokens,
        prompts_digest=digest_of(setting.questions),
        sampling={"temperature": cfg.temperature, "seed": cfg.seed, "max_new_tokens": cfg.max_new_tokens},
        versions={
            "eyas": importlib.metadata.version("eyas"),
            server.engine: server.version,
            "model": server.name,  # as the server names it
        },
        command=setting.command,
        results=(),
    )


def _check_head(server: ServedModel, setting: _Setting) -> list[str]:
    """What is not known of the server's drafter and target.

    Raises:
        ConfigError: it runs another drafter.
    """
    notes: list[str] = []
    if not server.draft:
        notes.append("the server does not tell which drafter it runs")
    elif (Path(server.draft) / CONFIG_FILE).is_file():
        theirs, ours = Head.find(server.draft).digest(), setting.head.digest()
        if theirs and ours and theirs != ours:
            hint = f"its weights are not those of {setting.head.model}: start the server with this one, or name the "
            hint += "exported folder, whose weights may be of another dtype"
            raise ConfigError("the server runs another drafter", f"{server.where}: {server.draft}", hint)
    elif server.draft != setting.head.model:
        notes.append(f"the server names its drafter {server.draft}; whether it is this one is not known")
    return [*notes, *_check_target(server, setting)]


def _check_target(server: ServedModel, setting: _Setting) -> list[str]:
    """What is not known of the server's model."""
    if server.name == Path(setting.target.model).name:
        return []
    return [f"the server names its model {server.name}, the drafter's target is {setting.target.model}"]


def _check_in_process(wanted: EvaluateConfig) -> None:
    """Raises ConfigError where something is set that only drafting in this process knows."""
    for name in _IN_PROCESS:
        if getattr(wanted, name) != EvaluateConfig.model_fields[name].default:
            what = f"a server drafts as it was started: {name} is of this process"
            raise ConfigError(what, f"evaluate.{name}", "leave it out, or measure without --server")


def _check_plan(server: ServedModel, wanted: EvaluateConfig) -> None:
    """Raises ConfigError where a draft was asked for that is not the server's."""
    for name in _SERVED:
        asked, served = getattr(wanted, name), getattr(server, name)
        if name in wanted.model_fields_set and asked not in (None, served):
            what = f"the server drafts with {name} {served}, not {asked}"
            raise ConfigError(what, f"evaluate.{name}", "a server drafts as it was started: leave it out")
