"""Fixtures shared by all tests."""

from __future__ import annotations

import fcntl
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# GNU OpenMP's threads spin while they wait for each other: with other processes on the same cores, a forward of a small
# model takes twenty times as long. Read when torch is first imported, by servers started from tests too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Tests that name models which do not exist must not ask a hub about them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell's background jobs begin with Ctrl-C ignored, and so would every process that a test means to interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes tells of the machine, not of the code.
settings.register_profile("eyas", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("eyas")

REPO = Path(__file__).parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with real servers first, then those with other slow tests, each in their order.

    Workers take whole files in turn: what is left for the end is short, and they end together.
    """
    ranks: Counter[Path] = Counter()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        ranks[item.path] = max(ranks[item.path], 2 if marks & {"sglang", "vllm"} else int("slow" in marks))
    items.sort(key=lambda item: -ranks[item.path])


@pytest.fixture(scope="session", autouse=True)
def _right_at_the_first_call() -> None:
    """Tests compare with forwards of transformers that are not ours, too."""
    from eyas.target import cpu_math

    cpu_math.settle()


@pytest.fixture(scope="session")
def model_cache() -> Path:
    """Where converted models are kept: EYAS_CACHE, else .cache in the repository."""
    return Path(os.environ.get("EYAS_CACHE") or REPO / ".cache")


@pytest.fixture(scope="session")
def smollm2_dir(model_cache: Path) -> Path:
    """SmolLM2-135M-Instruct as a bf16 safetensors folder, converted when it is not there yet."""
    from eyas.smollm2 import smollm2_dir as prepared

    model_cache.mkdir(parents=True, exist_ok=True)
    with (model_cache / "smollm2.lock").open("w") as lock:  # test processes beside each other convert it once
        fcntl.flock(lock, fcntl.LOCK_EX)
        return prepared(model_cache)


@pytest.fixture(scope="session")
def qwen3_dir(model_cache: Path) -> Path:
    """Qwen3's tokenizer and chat template, as `make test` fetches them; in CI a skip would hide a failure."""
    path = model_cache / "qwen3"
    if not (path / "tokenizer.json").is_file():
        missing = f"no tokenizer in {path}; make test fetches it"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(missing)
        pytest.skip(missing)
    return path


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real chats and hostile shapes beside the repository; tests that want them are skipped elsewhere."""
    path = REPO.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("no shared data beside the repository")
    return path
