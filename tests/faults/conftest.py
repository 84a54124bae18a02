"""What every fault test has: a tiny target, faults to inject, and other users of the file's own `server`."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults_support import Injector, Neighbours
from servers import Server
from sglang_cpu.models import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def injector(tmp_path_factory: pytest.TempPathFactory) -> Injector:
    return Injector(tmp_path_factory.mktemp("faults") / "control.json")


@pytest.fixture(scope="module")
def neighbours(server: Server) -> Neighbours:
    return Neighbours(server)
