"""Sections -> one HTML file that loads nothing: styles, plots and its few lines of script are inside.

Everything is escaped, and a content policy lets the browser run that one script and nothing else, whatever got in.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any, Final

import jinja2
from markupsafe import Markup

from eyas.data.names import visible
from eyas.events import versions
from eyas.report.sections import Section

#: How a page of ours begins; a file that does not is not written over.
GENERATOR: Final = '<meta name="generator" content="eyas report">'


def render(title: str, subtitle: str, command: str, sections: Sequence[Section]) -> str:
    """The page; the same sections give the same bytes.

    Args:
        title: its heading. subtitle: one line below it.
        command: what made it.
        sections: in their order; empty ones are told under what is missing.
    """
    shown = [section for section in sections if not section.empty]
    pages = _environment()
    css = pages.get_template("page.css.j2").render()
    script = _source(pages, "page.js")
    told = dict.fromkeys((who, text) for section in sections for who, text in section.versions if text)
    policy = {
        "default-src": "'none'",
        "style-src": _allowed(css),
        "script-src": _allowed(script),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return pages.get_template("page.html.j2").render(
        title=title,
        subtitle=subtitle,
        command=command,
        keys=[key for section in sections for key in section.keys],
        sections=shown,
        missing=[one for section in sections for one in section.missing],
        versions=list(told),
        policy="; ".join(f"{key} {value}" for key, value in policy.items()),
        css=Markup(css),
        script=Markup(script),
        eyas=versions().get("eyas", ""),
    )  # fmt: skip


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("eyas.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_seen,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _seen(value: Any) -> Any:
    """Text as it can be seen: no character drives the reader's screen, and all of them are Unicode."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _source(pages: jinja2.Environment, name: str) -> str:
    assert pages.loader is not None
    return pages.loader.get_source(pages, name)[0]


def _allowed(text: str) -> str:
    """A content policy's word for this very text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
