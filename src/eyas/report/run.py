"""`eyas report`: from a run's files to its page."""

from __future__ import annotations

import contextlib
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from eyas.config import Config
from eyas.disk import is_folder_there, is_there
from eyas.errors import ConfigError, StoreError
from eyas.rates import human_bytes
from eyas.report.corpus_section import corpus_section
from eyas.report.evaluation_sections import evaluation_section, live_section
from eyas.report.evaluations import read_evaluations
from eyas.report.export_section import export_section
from eyas.report.extraction import read_extraction
from eyas.report.page import GENERATOR, render
from eyas.report.places import Places, find
from eyas.report.sections import Missing, Section, moment
from eyas.report.store_sections import extraction_section, store_section, verification_section
from eyas.report.training_section import training_section

PAGE: Final = "report.html"


@dataclass(frozen=True, slots=True)
class ReportSummary:
    """A page that was written.

    Attributes:
        path: the page.
        shown: titles of the sections in it.
        missing: what it could not show.
        problems: what it says is wrong.
        bytes: its size.
    """

    path: Path
    shown: tuple[str, ...]
    missing: tuple[Missing, ...]
    problems: tuple[str, ...]
    bytes: int

    def lines(self) -> list[tuple[str, str]]:
        """The closing table, name and text."""
        lines = [("shown", ", ".join(self.shown))]
        lines += [("missing", f"{one.what}{f' ({one.why})' if one.why else ''}") for one in self.missing]
        lines += [("problem", text) for text in self.problems]
        return [*lines, ("page", f"{self.path} ({human_bytes(self.bytes)})")]


def write_report(run: Path | None = None, *, out: Path | None = None, cfg: Config | None = None) -> ReportSummary:
    """Write one self-contained HTML page on a run; the same files give the same bytes.

    Args:
        run: its folder: one that holds corpus, store, training run, exported drafter and evaluations, or one of these.
        out: the page; default: `report.out`, else report.html in the run's folder.
        cfg: section `report` says where parts lie that are elsewhere; what it leaves out is looked for where section
            `train` and the training run's own settings say.

    Raises:
        ConfigError: nothing to report on, two of a kind, or `out` is a file that is no report.
        StoreError: it cannot be written.
    """
    cfg = cfg or Config()
    places = find(run, cfg)
    path = out or cfg.report.out or _beside(places)
    _check(path)
    extraction = read_extraction(places.store) if places.store else None
    training = places.log if places.train else None
    evaluations = read_evaluations(places.evaluations)
    sections = [
        corpus_section(places),
        store_section(places),
        extraction_section(places, extraction),
        verification_section(places, extraction),
        training_section(places, training),
        evaluation_section(places, evaluations),
        live_section(places, evaluations),
        export_section(places),
    ]
    times = [
        *(s.began for s in (extraction.sittings if extraction else ())),
        *(at for _, at in (training.starts if training else ())),
    ]
    text = render(
        cfg.report.title or _title(places),
        _subtitle(sections, times),
        shlex.join(["eyas", "report", str(places.run)]),
        sections,
    )
    data = text.encode()
    _write(path, data)
    return ReportSummary(
        path,
        tuple(section.title for section in sections if not section.empty),
        tuple(one for section in sections for one in section.missing),
        tuple(text for section in sections for text in section.problems),
        len(data),
    )


def _title(places: Places) -> str:
    return places.run.resolve().name or str(places.run)


def _subtitle(sections: list[Section], times: list[float]) -> str:
    facts = {name: text for section in sections for name, text in reversed(section.facts) if name == "target"}
    began = moment(min(times)) if times else ""
    return " · ".join(filter(None, (f"target {facts['target']}" if facts else "", f"begun {began}" if began else "")))


def _beside(places: Places) -> Path:
    run = places.run
    return (run if is_folder_there(run) else run.parent) / PAGE


def _check(path: Path) -> None:
    """Raises ConfigError where something lies that is no page of ours: it is not written over."""
    if is_folder_there(path):
        raise ConfigError("--out is a file, and this is a folder", path, f"for example --out {path / PAGE}")
    if is_there(path):
        try:
            with path.open("rb") as file:
                ours = GENERATOR.encode() in file.read(1024)
        except OSError as error:
            raise ConfigError("cannot write there", path, error.strerror or "") from error
        if not ours:
            raise ConfigError("a file that is no report lies there", path, "name another --out, or remove it")


def _write(path: Path, data: bytes) -> None:
    """The whole page or none."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise StoreError("cannot write the report", path, error.strerror or str(error)) from error
