"""`eyas regenerate`: every assistant turn of the inputs answered anew by the target, on any OpenAI-compatible server.

    sources/ -> conversation.py -> server_pool.py -> openai_client.py
      rows         what is asked       which server      one streamed answer

run.py ties them together, answers.py keeps what came, budget.py counts what it cost.

A killed run goes on where it was: what was answered is never asked again. See docs/regenerate.md.
"""

from __future__ import annotations

import asyncio
import difflib
import glob
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from eyas.config import RegenerateConfig, SourceConfig
from eyas.data.regenerate.answers import Answers, paths_of
from eyas.data.regenerate.budget import ZERO, Budget, Prices
from eyas.data.regenerate.openai_client import Listing, OpenAIClient
from eyas.data.regenerate.report import RegenerateReport, RunView
from eyas.data.regenerate.run import Job, Run
from eyas.data.regenerate.server_pool import ServerPool
from eyas.data.sources import Input, open_sources
from eyas.errors import ConfigError, EngineError, Interrupted, StoreError

__all__ = ["RegenerateReport", "regenerate"]

#: Fields of a request that the run itself sets.
_OURS: Final = ("model", "messages", "tools", "functions", "stream", "stream_options", "n", "best_of", "prompt")
#: Fields that have a setting of their own.
_SETTINGS: Final = ("temperature", "top_p", "max_tokens", "seed")
_MILLION: Final = 10**6


def regenerate(
    inputs: Sequence[SourceConfig | Path | str],
    out: Path,
    *,
    servers: Sequence[str] = (),
    model: str | None = None,
    cfg: RegenerateConfig = RegenerateConfig(),  # noqa: B008  frozen
    retry_failed: bool = False,
    console: Console | None = None,
) -> RegenerateReport:
    """Answers the chats of `inputs` into `out`, in input order; goes on with what is there.

    Args:
        inputs: what `open_sources` takes; weights are not applied.
        out: JSON lines; a journal, failed rows and a summary are kept beside it.
        servers: base URLs; default: those of `cfg`.
        model: the name the servers know the target by; default: that of `cfg`, or the only one they list.
        cfg: settings. All that shapes an answer must be as before when a run is resumed.
        retry_failed: ask rows again that failed in earlier sessions.
        console: where progress goes; standard error when not given.

    Raises:
        ConfigError: an input, setting, model or budget that cannot be; nothing is asked then.
        EngineError: no server answers, or they refuse us.
        StoreError: the disk is full, or another process writes there.
        Interrupted: Ctrl-C or SIGTERM, after answers in flight had their time.
    """
    urls = list(servers or cfg.servers)
    if not inputs:
        raise ConfigError("no input is named", "regenerate.sources", "for example: eyas regenerate chats.jsonl")
    if not urls:
        raise ConfigError("no server is named", "regenerate.servers", "--server http://localhost:30000/v1")
    session = _Session(out, cfg, model or cfg.model, retry_failed)
    session.check_settings()
    _check_out(out, inputs)
    opened = open_sources([*inputs])
    key = os.environ.get(cfg.api_key_env, "").strip()
    clients = [OpenAIClient(url, key) for url in dict.fromkeys(urls)]
    began, report = time.monotonic(), RegenerateReport()
    with Answers(out) as answers, RunView(console or Console(stderr=True), report) as view:
        pool = ServerPool(clients, cfg.away_s, view.say, cfg.retry_wait_s)
        try:
            run = asyncio.run(session.work(opened, answers, pool, report, view))
            if report.complete:
                report.others = answers.arrange(bytes(run.order))
        except (EngineError, StoreError, Interrupted) as error:
            kept = f"{len(answers):,} rows are answered, and the same command goes on"
            error.hint = f"{error.hint}; {kept}" if error.hint else kept
            error.where = error.where or str(out)
            raise
        finally:
            report.totals, report.seconds = answers.totals, time.monotonic() - began
            if not answers.worthless:
                with suppress(OSError):  # a full disk has been told of
                    report.write(paths_of(out)[3])
    if report.complete and not report.finished - report.skipped.total():
        first = next((f"; the first: {texts[0]}" for texts in report.examples.values()), "")
        reasons = ", ".join(f"{reason} {count}" for reason, count in report.skipped.most_common()) or "no rows"
        where = ", ".join(one.path for one in opened)
        raise ConfigError("no row can be asked", where, f"read {report.read}; skipped: {reasons}{first}")
    return report


@dataclass(slots=True)
class _Session:
    """What the settings mean, before and after the servers are known."""

    out: Path
    cfg: RegenerateConfig
    model: str | None
    retry_failed: bool
    budget: Budget | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    listing: Listing | None = None

    @property
    def longest_answer(self) -> int:
        """Tokens; reasoning models of some servers know the limit by another name."""
        return self.cfg.extra_body.get("max_completion_tokens", self.cfg.max_tokens)

    def check_settings(self) -> None:
        """Raises ConfigError for fields of `extra_body` that are not for it."""
        for name in self.cfg.extra_body:
            if name in _OURS:
                raise ConfigError(f"extra_body may not hold {name}", "regenerate.extra_body", "the run sets it")
            if name in _SETTINGS:
                raise ConfigError(f"extra_body may not hold {name}", "regenerate.extra_body", f"set regenerate.{name}")
        longest = self.cfg.extra_body.get("max_completion_tokens", 1)
        if type(longest) is not int or longest < 1:
            raise ConfigError("max_completion_tokens is a number of tokens", "regenerate.extra_body", str(longest))

    async def work(
        self, inputs: list[Input], answers: Answers, pool: ServerPool, report: RegenerateReport, view: RunView
    ) -> Run:
        """The session, from the first question to the last answer."""
        cfg = self.cfg
        try:
            self.model = self.model or answers.settings.get("model")
            if self.model is None:
                self.listing = await pool.listing()
                self.model = _only(self.listing)
            answers.check_settings(self._shape())
            report.model = self.model
            self.fields |= self._fields()
            limit = None if cfg.max_cost is None else Decimal(str(cfg.max_cost))
            self.budget = Budget(_prices(cfg, None), answers.totals, limit)

            async def prove() -> None:
                await self._prove(pool)

            job = Job(
                inputs,
                answers,
                pool,
                self.budget,
                cfg,
                self.fields,
                self.longest_answer,
                prove,
                report,
                view,
                self.retry_failed,
            )
            run = Run(job)
            await run.work()
            return run
        finally:
            await pool.close()

    async def _prove(self, pool: ServerPool) -> None:
        """Before the first request: the servers are there, know the model, and its price is known if it must be."""
        assert self.model is not None and self.budget is not None
        listing = self.listing or await pool.listing()
        _check_model(self.model, listing)
        self.budget.prices = _prices(self.cfg, (listing.prices or {}).get(self.model))
        if self.budget.limit is not None and not self.budget.prices:
            hint = "set regenerate.price_prompt and regenerate.price_completion, in dollars per million tokens"
            raise ConfigError("max_cost needs prices, and the server lists none", "regenerate.max_cost", hint)

    def _shape(self) -> dict[str, Any]:
        """All that shapes an answer; must not change between sessions of one output."""
        cfg = self.cfg
        return {
            "model": self.model,
            "temperature": cfg.temperature,
            "top_p": cfg.top_p,
            "max_tokens": cfg.max_tokens,
            "on_length": cfg.on_length,
            "seed": cfg.seed,
            "system": cfg.system,
            "extra_body": cfg.extra_body,
        }

    def _fields(self) -> dict[str, Any]:
        cfg = self.cfg
        named = {"model": self.model, "temperature": cfg.temperature, "top_p": cfg.top_p, "seed": cfg.seed}
        if "max_completion_tokens" not in cfg.extra_body:
            named["max_tokens"] = cfg.max_tokens
        return {name: value for name, value in named.items() if value is not None} | cfg.extra_body


def _prices(cfg: RegenerateConfig, listed: tuple[Decimal, Decimal, Decimal] | None) -> Prices:
    """The settings' prices, else the server's."""
    prompt, completion = (Decimal(str(price)) / _MILLION for price in (cfg.price_prompt, cfg.price_completion))
    if prompt or completion:
        return Prices(prompt, completion)
    return Prices(*listed) if listed else Prices(ZERO, ZERO)


def _only(listing: Listing) -> str:
    if len(listing.names) == 1:
        return listing.names[0]
    names = ", ".join(listing.names[:8]) + (", ..." if len(listing.names) > 8 else "")
    told = f"it lists {len(listing.names):,}: {names}" if names else "it lists none"
    raise ConfigError("which of the server's models is the target?", "--model", told)


def _check_model(model: str, listing: Listing) -> None:
    """Servers of one model answer under any name: a wrong one would be stored with the answers."""
    names = listing.names
    base = model.split(":", maxsplit=1)[0]  # OpenRouter's variants, such as :free
    if not names or model in names or base in names or any("*" in name for name in names):
        return
    near = difflib.get_close_matches(model, names, n=3, cutoff=0.3) or names[:3]
    raise ConfigError("the server does not know the model", model, f"it lists {', '.join(near)}")


def _check_out(out: Path, inputs: Sequence[SourceConfig | Path | str]) -> None:
    """The output is a file of its own, also once it is there."""
    if out.suffix != ".jsonl":
        raise ConfigError("the output is JSON lines", out, "name it .jsonl")
    if out.is_dir():
        raise ConfigError("the output is a folder", out, "name a file")
    for one in inputs:
        given = one.path if isinstance(one, SourceConfig) else str(one)
        if any(_reads(given, path.resolve()) for path in paths_of(out)):
            raise ConfigError("the output is among the inputs", given, "name another --out, or other inputs")


def _reads(given: str, path: Path) -> bool:
    """Whether an input, a folder or a pattern would take `path` for data."""
    try:
        spec = Path(given).expanduser().resolve()
    except (RuntimeError, ValueError, OSError):  # whoever opens it says what is wrong with it
        return False
    if "**" in given:
        return fnmatch(str(path), str(spec).replace("**/", "*"))
    return any(spec == one or (glob.has_magic(given) and one.match(str(spec))) for one in (path, *path.parents))
