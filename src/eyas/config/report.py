"""Settings of `eyas report`."""

from __future__ import annotations

from pathlib import Path

from eyas.config.fields import Section


class ReportConfig(Section):
    """Where a run's parts lie, where they do not lie in one folder."""

    title: str | None = None
    """Default: the run's folder."""
    corpus: Path | None = None
    """What `eyas prepare` wrote."""
    store: Path | None = None
    """What `eyas extract` wrote."""
    train: Path | None = None
    """What `eyas train` wrote."""
    exported: Path | None = None
    """What `eyas export` wrote."""
    evaluations: tuple[Path, ...] = ()
    """Files of `eyas evaluate`; default: evaluation-*.json in the run's folders."""
    out: Path | None = None
    """The page; default: report.html in the run's folder; `--out`."""
