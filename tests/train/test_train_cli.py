"""`eyas train` by its command: settings from a file, one message an error, the same command resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from train_runs import SETTINGS, events, make_inputs
from typer.testing import CliRunner, Result

from eyas.cli import app
from eyas.data.corpus import Corpus, CorpusWriter


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"), rows=16)


@pytest.fixture
def run(inputs: Path, tmp_path: Path) -> Callable[..., Result]:
    path = tmp_path / "run.yaml"
    places = {"store": str(inputs / "store"), "corpus": str(inputs / "corpus.parquet"), "out": str(tmp_path / "out")}
    path.write_text(yaml.safe_dump({"train": {**SETTINGS, **places, "max_steps": 3}}))

    def command(*words: object) -> Result:
        result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["train", str(path), *map(str, words)])
        assert "Traceback" not in result.output
        return result

    return command


def test_a_file_of_settings_is_enough_and_the_same_command_resumes(run: Callable[..., Result], tmp_path: Path) -> None:
    first = run()
    assert first.exit_code == 0, first.output
    for part in ("steps     3", "accepted", "untrained", f"draft     {tmp_path / 'out' / 'draft'}"):
        assert part in first.output
    again = run()
    assert (again.exit_code, "nothing left to do" in again.output) == (0, True), again.output
    assert [event["step"] for event in events(tmp_path / "out", "start")] == [0, 3]


def test_the_log_tells_places_whole_and_a_run_goes_on_from_elsewhere(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started by relative places in one folder, gone on with by others in another."""
    (tmp_path / "elsewhere").mkdir()
    for folder, out in ((tmp_path, "run"), (tmp_path / "elsewhere", "../run")):
        monkeypatch.chdir(folder)
        for name in ("store", "corpus.parquet"):
            Path(name).symlink_to(inputs / name)
        places = {"store": "store", "corpus": "corpus.parquet", "out": out}
        Path("run.yaml").write_text(yaml.safe_dump({"train": {**SETTINGS, **places, "max_steps": 1}}))
        done = CliRunner().invoke(app, ["train", "run.yaml", "--set", "train.eval_share=0"])
        assert done.exit_code == 0, done.output
    first, second = (event["settings"] for event in events(tmp_path / "run", "start"))
    assert (first["store"], first["out"]) == (str(tmp_path / "store"), str(tmp_path / "run"))
    assert second["corpus"] == str(tmp_path / "elsewhere" / "corpus.parquet")
    assert Path(second["target"]).is_absolute()


def test_flags_win_over_the_file(run: Callable[..., Result], tmp_path: Path) -> None:
    assert run("--out", tmp_path / "other", "--set", "train.max_steps=1").exit_code == 0
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "other" / "checkpoints" / "step-00000001").is_dir()


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("--target", "no/such-model-anywhere"), 2, "no/such-model-anywhere"),
        (("--corpus", "{tmp}/other.parquet"), 2, "not of"),
        (("--set", "train.vocab_size=1000000"), 2, "a draft vocabulary of 1000000 tokens"),
        (("--set", "train.draft={width: 3}"), 2, "width"),
        (("--set", "train.draft={hidden_size: 48}"), 2, "embed"),
        (("--set", "train.init_from={tmp}"), 2, "{tmp}"),
        (("--set", "train.batch_tokens=20", "--set", "train.accumulate=1000"), 2, "train.accumulate"),
        (("--set", "train.tensorboard=true"), 2, "eyas[tensorboard]"),
        (("--set", "train.disk_budget=1GiB"), 2, "train.follow"),
        (("--set", "train.mask=classic"), 2, "last: all"),
        (("--out", "{tmp}/run.yaml"), 5, "run.yaml"),
        (("--out", "/proc/nowhere"), 5, "/proc/nowhere"),
    ],
)
def test_each_error_is_one_message_and_leaves_nothing(
    run: Callable[..., Result], inputs: Path, words: tuple[str, ...], code: int, expected: str, tmp_path: Path
) -> None:
    corpus = Corpus.open(inputs / "corpus.parquet")
    with CorpusWriter(tmp_path / "other.parquet", corpus.meta) as writer:
        for row in corpus.rows(0, 3):
            writer.add(row.id, row.tokens, row.loss_mask)
    before = sorted(tmp_path.rglob("*"))
    result = run(*(word.replace("{tmp}", str(tmp_path)) for word in words))
    assert result.exit_code == code, result.output
    assert expected.replace("{tmp}", str(tmp_path)) in result.output
    assert [line[:6] for line in result.output.splitlines()].count("error ") == 1
    assert sorted(tmp_path.rglob("*")) == before, "an error must leave nothing behind"


def test_a_damaged_checkpoint_is_named(run: Callable[..., Result], tmp_path: Path) -> None:
    assert run().exit_code == 0
    torn = tmp_path / "out" / "checkpoints" / "step-00000003" / "weights.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    result = run()
    assert result.exit_code == 4
    assert str(torn) in result.output
    assert "remove it" in result.output


def test_other_settings_are_refused_by_name(run: Callable[..., Result]) -> None:
    assert run().exit_code == 0
    result = run("--set", "train.seed=9")
    assert result.exit_code == 2
    assert "seed was 0, is 9" in result.output


def test_a_loss_that_is_no_number_has_an_exit_code_of_its_own(run: Callable[..., Result], tmp_path: Path) -> None:
    words = ["train.lr=1e300", "train.clip=null", "train.warmup_share=0", "train.save_every=1"]
    result = run(*(word for text in words for word in ("--set", text)), "--out", tmp_path / "bad")
    assert result.exit_code == 7, result.output
    assert "corpus rows" in result.output
