"""`eyas export`: one folder that SGLang and vLLM load, with a probe to check it by, a record and a model card.

It is written under a temporary name beside its place, checked by the same code as `--check`, synced and renamed; a
folder that would be refused never gets its name. The same drafter gives the same bytes.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from eyas.config import ExportConfig
from eyas.disk import fsync_dir, is_file_there
from eyas.errors import ConfigError, EyasError, first_line
from eyas.export.card import CARD, CardFacts, card
from eyas.export.check import check_draft
from eyas.export.documents import Answers, Texts, of_store
from eyas.export.evidence import FEWEST
from eyas.export.findings import CheckReport
from eyas.export.judge import drafter_of, embeddings_for, judge_acceptance
from eyas.export.probe import PROBE, Probe
from eyas.export.record import TargetFacts, tensors_digest, with_record
from eyas.export.source import RunFacts, find_run, read_run
from eyas.store.documents import read_store_info
from eyas.store.files import disk_errors
from eyas.target.checkpoint import Target, read_config
from eyas.target.weights import SINGLE
from eyas.train.checkpoint_format import (
    ARCHITECTURE,
    CONFIG_FILE,
    SECTION,
    DraftCheckpoint,
    save_checkpoint,
    stored_tensors,
)

Say = Callable[[str], None]
GENERATION: Final = "generation_config.json"
_DTYPES: Final = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_ROWS_CUT: Final = 8192
_SPECULATORS: Final = "speculators_model_type"


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """What was exported.

    Attributes:
        folder: where it is.
        bytes: of all its files.
        report: of the check it passed.
    """

    folder: Path
    bytes: int
    report: CheckReport

    def lines(self) -> list[tuple[str, str]]:
        """The closing table, name and text."""
        return [*self.report.lines(), ("folder", f"{self.folder}, {self.bytes:,} bytes")]


def export_draft(
    source: str | Path,
    out: Path,
    cfg: ExportConfig | None = None,
    *,
    force: bool = False,
    say: Say = lambda text: None,
) -> ExportSummary:
    """Write a drafter's folder for SGLang and vLLM.

    Args:
        source: a run's folder, a draft's folder of eyas, SpecForge, speculators or EAGLE, or a hub id.
        out: the folder to make; a link there stays, and what it leads to is made.
        cfg: `target`, `store`, `questions`, `dtype`, `aux_layers` and how large the probe is.
        force: replace a draft's folder that is there; no other.
        say: is told what takes a while.

    Returns:
        What was written, and the check it passed.

    Raises:
        ConfigError: no such draft, no target, a folder in the way, or a head that is not as it should be.
        IntegrityError: the check refused it; nothing was written.
        StoreError: the disk.
    """
    cfg, named = cfg or ExportConfig(), out
    out = _resolved(out)
    _tidy(out)
    draft, run_folder = find_run(source)
    run = read_run(run_folder) if run_folder is not None else None
    _refuse_place(out, draft, force=force)
    target = _target(draft, run, cfg)
    checkpoint = _loaded(draft, target, cfg)
    texts, why_not = _texts(checkpoint, target, run, cfg, say)
    report = CheckReport(str(source))
    if texts is not None and len(texts.documents) >= FEWEST:
        say(f"trying the drafter on {texts.source}, as served and otherwise")
        judge_acceptance(checkpoint, target, texts, report)
        report.check()
    probe = _probe(checkpoint, target, texts, cfg) if texts is not None and texts.documents else None
    size, checked = _make(out, named, checkpoint, target, probe, run, cfg)
    for finding in report.findings:
        checked.findings.append(finding)
    if why_not:
        checked.findings = [one for one in checked.findings if one.name not in ("weights", "acceptance")]
        checked.leave_open("probe", why_not, "--questions FILE makes one by the target's own answers")
    return ExportSummary(named, size, checked)


def _refuse_place(out: Path, draft: str, *, force: bool) -> None:
    if str(out) == os.path.realpath(draft):
        raise ConfigError("the draft would be written over itself", out, "name another --out")
    try:
        if not out.exists():
            return
        is_empty = out.is_dir() and not any(out.iterdir())
    except OSError as error:
        raise ConfigError(f"cannot look there ({error.strerror})", out, "name another --out") from error
    if is_empty:
        return
    if not _is_draft(out):
        raise ConfigError("something else is in the way", out, "name another --out: only a draft is ever replaced")
    if not force:
        raise ConfigError("the folder is there already", out, "--force replaces it")


def _resolved(out: Path) -> Path:
    """The place itself: without dots, which give no name to write beside, and behind links, which stay."""
    try:
        return out.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise ConfigError("no such place", out, first_line(error)) from error


def _is_draft(folder: Path) -> bool:
    """Whether the folder holds a draft, ours or another's; a target's has a config.json too."""
    if not is_file_there(folder / CONFIG_FILE):
        return False
    try:
        config = read_config(folder)
    except ConfigError:
        return False
    classes = config.get("architectures")
    return SECTION in config or _SPECULATORS in config or (isinstance(classes, list) and ARCHITECTURE in classes)


def _target(draft: str, run: RunFacts | None, cfg: ExportConfig) -> Target:
    """The target: the one that is named, else the run's, else the draft's own word."""
    name = cfg.target or (run.target if run else None) or _target_of(draft)
    if name is None:
        raise ConfigError("whose draft is this?", draft, "name the --target")
    return Target.load(name, trust_remote_code=cfg.trust_remote_code)


def _target_of(draft: str) -> str | None:
    """The target that an exported draft names, where that is a hub id: of a folder it has the name alone."""
    try:
        section = read_config(Path(draft)).get("eyas") or {}
        name = section["export"]["target"]["name"]
    except (EyasError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) and "/" in name else None


def _loaded(draft: str, target: Target, cfg: ExportConfig) -> DraftCheckpoint:
    """The checkpoint in the dtype of the export; embeddings of its own that are the target's are left out."""
    found = DraftCheckpoint.load(draft, target, cfg.aux_layers)
    found.build(target)  # refuses embeddings that are not the target's
    dtype = _DTYPES[cfg.dtype]
    tensors = {name: tensor.to(dtype) for name, tensor in found.tensors.items()}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            whole = bool(torch.isfinite(found.tensors[name]).all())
            hint = "its values are beyond f16's: --set export.dtype=bf16" if whole else "export an earlier checkpoint"
            raise ConfigError(f"{name} has values that are no numbers", draft, hint)
    own = found.embed_tokens if found.config.hidden_size != found.config.target_hidden_size else None
    return DraftCheckpoint(found.folder, found.config, found.vocab, tensors, None if own is None else own.to(dtype))


# --- what it is tried on ----------------------------------------------------------------------------------------------


def _texts(
    checkpoint: DraftCheckpoint, target: Target, run: RunFacts | None, cfg: ExportConfig, say: Say
) -> tuple[Texts | None, str]:
    """Texts to try the drafter on; or none, and why."""
    layers = checkpoint.config.aux_layers
    if cfg.questions is not None:
        say(f"answering questions of {cfg.questions} by {target.model}")
        return Answers.to(cfg.questions, target, cfg).with_states(layers), ""
    store = cfg.store or (run.store if run else None)
    if store is None:
        return None, "no store and no questions to try it on, so no probe goes with it"
    spec = read_store_info(store).spec
    if spec.layers != layers:
        what = f"the store holds layers {list(spec.layers)}, the draft reads {list(layers)}"
        raise ConfigError(what, store, "name its own store: --set export.store=DIR, or --questions FILE")
    mine = target.fingerprint()
    if mine is not None and mine != spec.model:
        raise ConfigError("the store was captured from another model than the target", store, f"not {target.model}")
    settings: Mapping[str, Any] = run.settings if run else {}
    longest = min(_ROWS_CUT, int(settings.get("batch_tokens") or _ROWS_CUT))
    say(f"reading rows of {store}")
    return of_store(store, target, cfg, float(settings.get("eval_share") or 0.0), longest), ""


def _probe(checkpoint: DraftCheckpoint, target: Target, texts: Texts, cfg: ExportConfig) -> Probe:
    ids = torch.cat([document.tokens for document in texts.documents]).unique()
    rows = embeddings_for(checkpoint, target, ids)
    drafter = drafter_of(checkpoint, ids, rows)
    return Probe.make(texts, drafter, ids, rows, tokens=cfg.probe_tokens, nbytes=cfg.probe_bytes)


# --- files ------------------------------------------------------------------------------------------------------------


def _make(
    out: Path,
    named: Path,
    checkpoint: DraftCheckpoint,
    target: Target,
    probe: Probe | None,
    run: RunFacts | None,
    cfg: ExportConfig,
) -> tuple[int, CheckReport]:
    """Write the folder beside its place, check it, and give it its name; its size and the check it passed."""
    part = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write(part, checkpoint, target, probe, run, cfg)
        checked = check_draft(part, ExportConfig(engines=cfg.engines))
        checked.folder = str(named)
        checked.check()
        with disk_errors(out):
            size = sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
            _publish(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return size, checked


def _write(
    part: Path,
    checkpoint: DraftCheckpoint,
    target: Target,
    probe: Probe | None,
    run: RunFacts | None,
    cfg: ExportConfig,
) -> None:
    dtype, config = _DTYPES[cfg.dtype], checkpoint.config
    facts = TargetFacts.of(target, _public_name(target))
    save_checkpoint(
        part, config, checkpoint.tensors, checkpoint.vocab, target, dtype=dtype, embed_tokens=checkpoint.embed_tokens
    )
    data = probe.to_bytes() if probe is not None else None
    sealed = with_record(
        read_config(part),
        spec_id=run.spec_id if run else "",
        target=facts,
        tensors=tensors_digest(stored_tensors(part)),
        probe=data,
    )
    size = sum(tensor.numel() for tensor in checkpoint.tensors.values())
    about = CardFacts(facts, target.fingerprint() or "", config, checkpoint.vocab, size, dtype)
    files = {
        CONFIG_FILE: _json(sealed),
        GENERATION: _json(_generation(target)),
        CARD: card(about, run).encode(),
    }
    with disk_errors(part):
        if data is not None:
            (part / PROBE).parent.mkdir()
            files[PROBE] = data
        mode = (part / CONFIG_FILE).stat().st_mode
        for name, content in files.items():
            (part / name).write_bytes(content)
            (part / name).chmod(mode)
        for name in (SINGLE, *files):
            with (part / name).open("rb+") as file:
                os.fsync(file.fileno())
        for folder in {part, *(part / name for name in files)}:
            fsync_dir(folder if folder.is_dir() else folder.parent)


def _publish(part: Path, out: Path) -> None:
    """Give the folder its name; one that is there steps aside first, and is removed last."""
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    if out.exists():
        out.rename(old)
    try:
        part.rename(out)
    except BaseException:
        if old.exists():
            old.rename(out)
        raise
    fsync_dir(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _tidy(out: Path) -> None:
    """Remove what killed exports to this place left half written; one that was on its way out comes back."""
    for left in out.parent.glob(f".{glob.escape(out.name)}.*.*"):
        match = re.fullmatch(rf"\.{re.escape(out.name)}\.(\d+)\.(tmp|old)", left.name)
        # Our own number on it is of a process before us: in a container all have the same.
        if match is None or (int(match[1]) != os.getpid() and Path(f"/proc/{match[1]}").exists()):
            continue
        if match[2] == "old" and not out.exists():
            left.rename(out)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _public_name(target: Target) -> str:
    """A hub id as it is; of a folder its name: paths of this machine are nobody else's business."""
    return target.model if target.is_hub_model else Path(target.model).resolve().name


def _generation(target: Target) -> dict[str, Any]:
    """The target's generation_config.json; where it has none, what its config says of ends."""
    path = target.dir / GENERATION
    if is_file_there(path):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError("unreadable generation config", path, str(error)) from error
        if isinstance(found, dict):
            return found
    return {key: target.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in target.config}


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
