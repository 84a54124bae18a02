"""Settings of what makes a corpus: `prepare` and `regenerate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from eyas.config.fields import Section


def _parse_source(value: object) -> object:
    return {"path": str(value)} if isinstance(value, str | Path) else value


class SourceConfig(Section):
    """One input: a path as plain text, or these keys."""

    path: str
    """A file, a folder, a glob such as `data/*.jsonl.gz`, or a Hugging Face data set: `hf:NAME` or `hf:NAME:SPLIT`."""
    name: str | None = None
    """Label in the statistics; default: the file's name without its suffixes."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """How often its rows are seen: 0.5 keeps a seeded half, 2 gives each row twice."""
    max_rows: Annotated[int, Field(ge=1)] | None = None
    """At most so many rows are read, the first ones."""
    field: str | None = None
    """Key of the list of rows inside a JSON object, such as `data` or `result.rows`."""
    subset: str | None = None
    """Configuration name of a Hugging Face data set."""


Source = Annotated[SourceConfig, BeforeValidator(_parse_source)]


class PrepareConfig(Section):
    """Chats to corpus."""

    target: str | None = None
    """The model whose tokenizer and chat template are used: a folder or hub id."""
    sources: tuple[Source, ...] = ()
    """Inputs, read in this order: paths, or `{path, name, weight, max_rows, field, subset}`."""
    max_tokens: Annotated[int, Field(ge=2)] | None = None
    """Longest row in tokens."""
    too_long: Literal["cut", "drop"] = "cut"
    """What happens to a longer row; a cut row gets no invented end token."""
    template_options: dict[str, Any] = {}
    """Passed to the chat template at every rendering, as the server will: `{enable_thinking: false}`."""
    rewritten_turns: Literal["context", "split", "drop"] = "context"
    """Earlier answers that the template renders otherwise once more turns follow (thoughts stripped): context, not
    trained; or each in a row of its own, as it was given; or the whole conversation is dropped."""
    empty_prompt: Literal["keep", "drop"] = "keep"
    """What happens to a conversation with a blank user turn."""
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = {}
    """Further role names: `{my_model_v2: assistant}`."""
    dedupe: Literal["off", "conversation", "prompt"] = "off"
    """Drop rows whose whole conversation, or whose user turns, equal an earlier row's (case, spacing and punctuation
    apart)."""
    decontaminate: tuple[str, ...] = ()
    """Evaluation sets (files, folders or globs): rows that share 13 words in a row with one of them are dropped."""
    shuffle: bool = False
    """Mix the rows of all inputs; else they keep their order."""
    seed: int = 0
    """Of shuffle, weights and holdout."""
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of conversations set aside in `holdout.parquet`; the same ones whatever else is prepared with them."""
    strict: bool = False
    """Stop at the first row that cannot be used."""
    workers: Annotated[int, Field(ge=1)] | None = None
    """Processes; default: one a core, at most 16. The corpus does not depend on it."""
    trust_remote_code: bool = False
    """Run the tokenizer code that the model's folder ships."""


class RegenerateConfig(Section):
    """Answers by the target itself, from any OpenAI-compatible server."""

    sources: tuple[Source, ...] = ()
    """Inputs, as for prepare."""
    servers: tuple[str, ...] = ()
    """Base URLs, such as `http://localhost:30000/v1`; requests go to the one with the fewest in flight."""
    model: str | None = None
    """Name the server knows the target by; default: the only one it lists."""
    in_flight: Annotated[int, Field(ge=1)] = 64
    """Conversations asked at once, over all servers."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest wait for one answer."""
    stream: bool = True
    """Answers come piece by piece, and the server stops where nobody listens any more. Whole ones cost less work here,
    which tells from about 10,000 tokens/s."""
    attempts: Annotated[int, Field(ge=1)] = 6
    """Tries of one request before its conversation is recorded as failed."""
    retry_wait_s: Annotated[float, Field(gt=0)] = 1.0
    """Pause before the second try; it doubles with each further one, up to a minute, with jitter. A server's
    `Retry-After` goes first."""
    away_s: Annotated[float, Field(ge=0)] = 300.0
    """How long all servers may refuse connections before the run stops."""
    drain_s: Annotated[float, Field(ge=0)] = 30.0
    """How long Ctrl-C waits for answers in flight; a second Ctrl-C does not wait."""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 2048
    """Longest answer; one that is cut there gets no invented end token."""
    on_length: Literal["keep", "drop"] = "keep"
    """What happens to an answer that was cut at max_tokens."""
    seed: int | None = None
    system: str | None = None
    """System prompt for conversations that have none."""
    extra_body: dict[str, Any] = {}
    """Further fields of each request, as the server takes them: `{top_k: 20}`, `{reasoning: {effort: high}}`,
    `{provider: {order: [deepinfra]}}`."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; a server without keys needs none."""
    price_prompt: Annotated[float, Field(ge=0)] = 0.0
    """Dollars per million prompt tokens; default: what the server lists. A reply that states its cost is believed."""
    price_completion: Annotated[float, Field(ge=0)] = 0.0
    """Dollars per million answer tokens."""
    max_cost: Annotated[float, Field(gt=0)] | None = None
    """Dollars, over all sessions of one output; requests that could pass it are not sent."""
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = {}
    """Further role names: `{my_model_v2: assistant}`."""
