"""A whole run, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_runs import make_whole


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whole(tmp_path_factory.mktemp("report") / "whole")
