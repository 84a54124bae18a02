from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from report_runs import copied, evaluation, make_training, write_evaluation

from eyas.config import Config, load
from eyas.data.corpus import Corpus
from eyas.errors import ConfigError, StoreError
from eyas.report import write_report
from eyas.report.places import Places, find
from eyas.train.vocab import DraftVocab
from run_logs import start_event, write_log


def test_a_run_has_all_its_parts(whole_run: Path) -> None:
    found = find(whole_run, Config())
    assert found.corpus == whole_run / "corpus" / "corpus.parquet"
    assert (found.store, found.train, found.exported) == tuple(whole_run / n for n in ("store", "train", "exported"))
    kinds = ("live-vllm", "offline-decoded-transformers", "offline-simulated-store")
    assert [path.name for path in found.evaluations] == [f"evaluation-{kind}.json" for kind in kinds]


@pytest.mark.parametrize("part", ["corpus", "store", "train", "exported"])
def test_a_part_is_a_run_too(whole_run: Path, part: str) -> None:
    found = find(whole_run / part, Config())
    assert getattr(found, part) is not None
    if part == "train":  # its settings say where the others are
        assert (found.store, found.corpus) == (whole_run / "store", whole_run / "corpus" / "corpus.parquet")
    else:
        assert [getattr(found, name) for name in ("corpus", "store", "train", "exported")].count(None) == 3


def test_the_parquet_file_is_a_corpus(whole_run: Path) -> None:
    assert find(whole_run / "corpus" / "corpus.parquet", Config()).corpus is not None


def test_parts_elsewhere_are_named(whole_run: Path, tmp_path: Path) -> None:
    make_training(tmp_path / "run" / "train")
    cfg = load(
        overrides=[f"report.store={whole_run / 'store'}", f"report.evaluations=[{next(whole_run.glob('*.json'))}]"]
    )
    found = find(tmp_path / "run", cfg)
    assert (found.store, found.train, found.corpus) == (whole_run / "store", tmp_path / "run" / "train", None)
    assert len(found.evaluations) == 1


def test_a_yaml_of_a_training_is_enough(whole_run: Path) -> None:
    cfg = load(overrides=[f"train.store={whole_run / 'store'}", f"train.out={whole_run / 'train'}"])
    found = find(None, cfg)
    assert (found.store, found.train, found.run) == (whole_run / "store", whole_run / "train", whole_run / "train")


def test_what_the_settings_name_may_be_gone(tmp_path: Path) -> None:
    run = make_training(tmp_path / "run", store="/gone/store", corpus=str(tmp_path))
    found = find(run, Config())
    assert (found.store, found.corpus) == (None, None)
    assert found.lost == (("corpus", tmp_path), ("store", Path("/gone/store")))
    assert "the training's settings name /gone/store, which is not there" in found.missing("store", "x").why


def test_places_of_an_older_log_may_be_anothers(
    whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says them as they were typed, and where the report is made the same words name the parts of another run."""
    train = make_training(tmp_path / "run", store="store", corpus="corpus")
    monkeypatch.chdir(whole_run)
    digest = Corpus.open(Path("corpus")).digest
    for known, expected in ((digest, (Path("store"), Path("corpus/corpus.parquet"))), ("5" * 64, (None, None))):
        vocab = DraftVocab(torch.arange(8), 300, corpus_digest=known)
        vocab.save(train / "vocab.safetensors")
        found = find(train, Config())
        assert (found.store, found.corpus) == expected
    assert found.lost == (("corpus", Path("corpus")), ("store", Path("store")))
    assert "the training's settings name store, which is of another corpus" in found.missing("store", "x").why
    assert find(train, load(overrides=["train.store=store"])).store == Path("store")  # named by the user


def test_a_trainings_own_copy_is_no_export(whole_run: Path, tmp_path: Path) -> None:
    run = copied(whole_run, tmp_path / "run")
    (run / "exported").rename(run / "train" / "draft")
    assert find(run, Config()).exported is None


def test_two_of_a_kind_are_refused_by_name(whole_run: Path, tmp_path: Path) -> None:
    run = copied(whole_run, tmp_path / "run")
    copied(run / "store", run / "second")
    with pytest.raises(ConfigError, match="two stores in one run") as caught:
        find(run, Config())
    assert "report.store" in caught.value.hint
    assert find(run, load(overrides=[f"report.store={run / 'second'}"])).store == run / "second"


def test_hidden_folders_and_links_are_not_followed(whole_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_training(run / "train")
    (run / "link").symlink_to(whole_run)
    (run / "loop").symlink_to(run)
    copied(whole_run / "store", run / ".store")
    assert find(run, Config()).store is None


@pytest.mark.parametrize("part", ["corpus", "store", "train", "exported", "evaluations"])
def test_a_named_part_must_be_there(whole_run: Path, part: str) -> None:
    value = "[/nowhere]" if part == "evaluations" else "/nowhere"
    with pytest.raises(ConfigError, match="/nowhere"):
        find(whole_run, load(overrides=[f"report.{part}={value}"]))


def test_nothing_to_report_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for run in (tmp_path, tmp_path / "file", tmp_path / "none", None):
        with pytest.raises(ConfigError) as caught:
            find(run, Config())
        assert caught.value.hint


def test_an_evaluation_alone_is_a_run(tmp_path: Path) -> None:
    write_evaluation(tmp_path, "x", evaluation("live", "vllm"))
    assert len(find(tmp_path, Config()).evaluations) == 1


def test_commands_can_be_pasted() -> None:
    places = Places(Path("a b"), corpus=Path("a b/corpus.parquet"), store=Path("s"))
    assert [places.quoted(part) for part in ("corpus", "store", "train")] == ["'a b'", "s", "TRAIN"]


# --- what may not be looked at ----------------------------------------------------------------------------------------

LONG = "n" * 300
PARTS = ("corpus", "store", "train", "exported")


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that this user may not look into, though its names can be listed; root would be let in anywhere."""
    folder, stat = tmp_path / "closed", os.stat
    (folder / "inside").mkdir(parents=True)

    def checked(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if not isinstance(path, int) and folder in Path(os.fsdecode(path)).parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", checked)
    with pytest.raises(PermissionError):
        (folder / "inside").is_dir()
    return folder


@pytest.mark.parametrize("part", ["corpus", "store"])
@pytest.mark.parametrize("hidden", ["closed", "long"])
def test_what_settings_name_and_nobody_may_see_is_lost(tmp_path: Path, closed: Path, part: str, hidden: str) -> None:
    path = closed / "inside" if hidden == "closed" else tmp_path / LONG
    logged = make_training(tmp_path / "run")
    write_log(logged, "b", [start_event(step=100, t=2e9, **{part: str(path)})])
    told = make_training(tmp_path / "told")
    for run, cfg in ((logged, Config()), (told, load(overrides=[f"train.{part}={path}"]))):
        assert find(run, cfg).lost == ((part, path),)
        assert "not to be read" in find(run, cfg).missing(part, "x").why
        assert write_report(run, cfg=cfg).path.is_file()


@pytest.mark.parametrize("part", [*PARTS, "evaluations"])
@pytest.mark.parametrize("hidden", ["closed", "long"])
def test_a_named_part_that_nobody_may_see_is_one_clear_error(
    tmp_path: Path, closed: Path, part: str, hidden: str
) -> None:
    path = closed / "inside" if hidden == "closed" else tmp_path / LONG
    value = f"[{path}]" if part == "evaluations" else path
    with pytest.raises(ConfigError, match=f"report.{part}"):
        find(make_training(tmp_path / "run"), load(overrides=[f"report.{part}={value}"]))


def test_a_run_or_a_page_that_nobody_may_see_is_one_clear_error(tmp_path: Path, closed: Path) -> None:
    run = make_training(tmp_path / "run")
    for path in (closed / "inside", tmp_path / LONG):
        with pytest.raises(ConfigError, match="no such run"):
            find(path, Config())
        with pytest.raises(ConfigError, match="nothing to report on"):
            find(None, load(overrides=[f"train.out={path}"]))
    with pytest.raises(StoreError, match="cannot write the report"):
        write_report(run, out=tmp_path / LONG)


def test_a_closed_folder_in_a_run_is_passed_over(tmp_path: Path, closed: Path) -> None:
    make_training(tmp_path / "train")
    write_evaluation(tmp_path, "x", evaluation("live", "vllm"))
    (closed / "inside" / "checkpoints").mkdir(parents=True)
    found = find(tmp_path, Config())
    assert (found.train, len(found.evaluations)) == (tmp_path / "train", 1)
    assert write_report(tmp_path).path.is_file()


def test_the_trainings_log_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be large, and places and section go by the same."""
    run = make_training(tmp_path / "run", store="/gone/store")
    write_log(run, "b", [start_event(step=100, t=2e9, store="/gone/other")])
    read: list[str] = []
    opened = os.open

    def counted(path: Any, *args: Any, **kwargs: Any) -> int:
        read.append(str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", counted)
    summary = write_report(run)
    assert sorted(Path(path).name for path in read if path.endswith(".jsonl")) == ["a.jsonl", "b.jsonl"]
    assert any("/gone/other" in one.why for one in summary.missing)
    assert "Training" in summary.shown
