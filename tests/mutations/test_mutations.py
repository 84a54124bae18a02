"""Every corruption of the catalogue is injected for real, and seen by the check and under the name it must be."""

from __future__ import annotations

from collections import Counter

import pytest

from mutations.catalogue import CATALOGUE, OPEN, SHARDS, WIRE
from mutations.judge import Judged
from mutations.judging import judge_all
from mutations.mutation import Check, Mutation

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Judged]:
    return judge_all(tmp_path_factory.mktemp("mutations"))


@pytest.mark.parametrize("mutation", CATALOGUE, ids=lambda mutation: f"{mutation.stage}: {mutation.name}")
def test_it_is_seen_by_its_name_and_what_it_touched_ends_right(mutation: Mutation, judged: dict[str, Judged]) -> None:
    found = [v for stage in judged.values() for v in stage.verdicts if v.mutation is mutation]
    assert len(found) == 1
    assert found[0].detected, found[0].seen
    assert found[0].right_again


def test_nothing_else_was_refused(judged: dict[str, Judged]) -> None:
    """Rows and shards between them, and controls that went through all the machinery."""
    assert {name: stage.control for name, stage in judged.items()} == {name: [] for name in judged}


def test_the_catalogue_is_one_of_distinct_mutations_of_every_kind() -> None:
    names = Counter((mutation.stage, mutation.name) for mutation in CATALOGUE)
    assert max(names.values()) == 1
    assert len(WIRE) >= 30
    assert len(OPEN) + len(SHARDS) >= 30
    assert {mutation.seen_by for mutation in CATALOGUE} >= set(Check) - {Check.LOGITS}
