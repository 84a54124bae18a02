from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from eyas.data.prepare.encode import Kept
from eyas.data.prepare.samples import LONG_TOKENS, render_sample
from eyas.data.rows import Chat
from eyas.data.template import Encoded, Rejected, Template


@pytest.fixture(scope="module")
def template(smollm2_dir: Path) -> Template:
    return Template.load(str(smollm2_dir))


def rendered(template: Template, *texts: str, file: str = "a.jsonl", **options: object) -> str:
    console = Console(file=io.StringIO(), width=80, **options)  # type: ignore[arg-type]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    rows = template.encode(Chat("row-1", messages, file, 12))
    assert not isinstance(rows, Rejected)
    kept = Kept("row-1", "a", file, 12, tuple(len(row.tokens) for row in rows))
    console.print(render_sample(template, kept, list(rows), console), highlight=False, markup=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_trained_tokens_are_marked_where_there_is_no_colour(template: Template) -> None:
    text = rendered(template, "[bold]Hi[/bold]", "Hello.", "x", "Bye.")
    assert "user\n[bold]Hi[/bold]<|im_end|>\n" in text
    assert "assistant\n⟦Hello.<|im_end|>⟧\n" in text
    assert "assistant\n⟦Bye.<|im_end|>⟧\n" in text
    assert "\x1b" not in text
    head = text.split("\n")[0]
    assert head.startswith("── row-1  a.jsonl:12  ")
    assert "trained" in head


def test_they_are_coloured_on_a_terminal(template: Template) -> None:
    text = rendered(template, "Hi", "Hello.", force_terminal=True, color_system="standard", _environ={})
    assert "\x1b[1;32mHello.<|im_end|>\x1b[0m" in text
    assert "⟦" not in text


def test_a_text_cannot_drive_the_terminal(template: Template) -> None:
    assert r"a\x1b[2Jb\u202ec" in rendered(template, "a\x1b[2Jb\u202ec", "Hello.")


def test_lines_fit_the_screen(template: Template) -> None:
    text = rendered(template, "word " * 100, "another " * 100, file="a/very/long/path/" * 6 + "chats.jsonl")
    assert max(map(len, text.split("\n"))) <= 80
    assert "…/chats.jsonl:12" in text


def test_long_texts_keep_their_head_and_tail(template: Template) -> None:
    text = rendered(template, "Hi", "First. " + "word " * 2_000 + "Last.")
    assert "First." in text
    assert "Last." in text
    assert " tokens … " in text
    assert len(text) < 3_000


def test_a_cut_through_a_character_shows_no_rubbish(template: Template) -> None:
    for pad in range(4):
        assert "\ufffd" not in rendered(template, "Hi", "x" * pad + "🜁" * 2_000)


def test_long_conversations_are_shortened(template: Template) -> None:
    texts = [f"text {i}." for i in range(60)]
    text = rendered(template, *texts)
    assert "text 0." in text
    assert "text 59." in text
    assert "text 30." not in text
    assert "stretches of turns" in text


def test_several_rows_of_one_conversation(template: Template) -> None:
    console = Console(file=io.StringIO(), width=80)
    pieces = [Encoded(np.array([1, 9, 9], np.int32), np.array([0, 1, 1], np.uint8))] * 2
    text = render_sample(template, Kept("r", "a", "a.jsonl", 1, (3, 3)), pieces, console).plain
    assert text.count("── r ") == 2
    assert LONG_TOKENS > 100
