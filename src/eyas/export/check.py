"""Would SGLang and vLLM serve this folder as the drafter that was trained? Looked at before a server does.

What files alone tell: the names each loader would find, skip and miss; the layers each would read; the maps; the
values; the record. What the probe tells without the target: whether these weights are those that were exported. What
the target tells: whether its outputs at the layers that a server would read are the ones the drafter was trained on,
and, on texts of its own, whether any other input would suit the drafter better. Whatever could not be told is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from eyas.config import ExportConfig
from eyas.errors import ConfigError, IntegrityError, first_line
from eyas.export.documents import Answers
from eyas.export.engines import TESTED, TITLES, layers_read, loads, named_ids, shape_faults, weight_files
from eyas.export.findings import CheckReport
from eyas.export.judge import drafter_of, judge_acceptance
from eyas.export.probe import PROBE, Probe
from eyas.export.record import Record, digest_bytes, settings_digest, tensors_digest
from eyas.export.states import compare_states
from eyas.target.checkpoint import Target, find_folder, read_config
from eyas.target.embeddings import input_embeddings
from eyas.target.weights import weight_map
from eyas.train.checkpoint_format import CONFIG_FILE, FILES, PICKLED, DraftCheckpoint, stored_tensors

Say = Callable[[str], None]
_EMBEDDING: Final = "embed_tokens.weight"
_NEVER_ZERO: Final = ("fc.weight", "lm_head.weight", "norm.weight")
_ANEW: Final = "export it anew"
_SPECULATORS: Final = "speculators_model_type"


@dataclass(frozen=True, slots=True)
class Subject:
    """What is checked.

    Attributes:
        folder: of the draft.
        config: its config.json.
        tensors: by their stored names.
        record: of its export, if any.
        target: named by the user, else a stand-in by the record.
        is_here: whether the target's files can be read.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    record: Record | None
    target: Target
    is_here: bool

    @property
    def family(self) -> str:
        return str(self.target.config.get("model_type", ""))


def check_draft(draft: str | Path, cfg: ExportConfig | None = None, *, say: Say = lambda text: None) -> CheckReport:
    """Hold a draft's folder against the loaders of SGLang and vLLM, against its own record and probe, and, where a
    target is named, against the target.

    Args:
        draft: folder or hub id, of an export or of anybody's EAGLE-3 head.
        cfg: `target`, `questions`, `engines` and what the target is run in.
        say: is told what takes a while.

    Returns:
        What was found; `CheckReport.check` raises if anything was refused.

    Raises:
        ConfigError: no such folder or target, or a head without a record and no target named.
        EngineError: the target cannot be loaded.
    """
    cfg = cfg or ExportConfig()
    if cfg.questions is not None and cfg.target is None:
        raise ConfigError("whose answers?", f"--questions {cfg.questions}", "name the --target")
    report = CheckReport(str(draft))
    subject = _open(draft, cfg, report)
    if subject is None:
        return report
    try:
        _check_order(subject, report)
        _check_names(subject, cfg, report)
        checkpoint = None if report.refused else _import_back(subject, report)
        if checkpoint is None:
            return report
        _check_layers(subject, checkpoint, cfg, report)
    except (TypeError, ValueError, AttributeError, KeyError) as error:  # anybody may have written it
        report.refuse("import", f"config.json holds values of other types: {first_line(error)}")
        return report
    _check_values(subject, report)
    _check_record(subject, report)
    _check_embeddings(subject, checkpoint, cfg, report)
    probe = _check_weights(subject, checkpoint, report)
    if report.refused:
        return report
    if probe is not None:
        _check_target(subject, checkpoint, probe, cfg, report, say)
    _check_acceptance(subject, checkpoint, probe, cfg, report, say)
    return report


# --- files ------------------------------------------------------------------------------------------------------------


def _open(draft: str | Path, cfg: ExportConfig, report: CheckReport) -> Subject | None:
    folder = find_folder(str(draft), [*FILES, PROBE])
    config = read_config(folder)
    try:
        record = Record.of(config, folder / CONFIG_FILE)
    except IntegrityError as error:
        report.refuse("record", error.what, error.hint)
        return None
    if cfg.target is not None:
        target = Target.load(cfg.target, trust_remote_code=cfg.trust_remote_code, weights=cfg.run_target)
    elif record is not None:
        target = record.target.stand_in()
    else:
        raise ConfigError("whose draft is this? It has no record of an export", folder, "name the --target")
    try:
        tensors = stored_tensors(folder)
    except ConfigError as error:
        report.refuse("names", error.what, error.hint)
        return None
    return Subject(folder, config, tensors, record, target, cfg.target is not None)


def _check_order(subject: Subject, report: CheckReport) -> None:
    """Ids in ascending order: in whatever order they are written, servers read a set."""
    for place, ids in named_ids(subject.config).items():
        if ids != sorted(set(ids)):
            what = f"{place} is {ids}, but servers hand layers on in ascending order"
            report.refuse("layers", what, "order the blocks of fc.weight likewise, and the ids")


def _check_names(subject: Subject, cfg: ExportConfig, report: CheckReport) -> None:
    """What each engine's loader would make of the files and the names in them."""
    ours = set(weight_map(subject.folder).values()) or {PICKLED}
    for engine in cfg.engines:
        title, config = TITLES[engine], subject.config
        theirs = weight_files(engine, subject.folder)
        if strays := sorted(theirs - ours):
            how = f"too, beside {min(ours)}" if ours <= theirs else f"instead of {min(ours - theirs)}"
            report.refuse("files", f"{title} would load {strays[0]} {how}", "move it elsewhere")
        if _SPECULATORS in config:
            if engine == "sglang":
                report.refuse("names", f"{title} cannot read the layout of speculators", "eyas export rewrites it")
                continue
            config = {**(config.get("transformer_layer_config") or {}), **config}
        elif faults := shape_faults(engine, config):
            report.refuse("names", faults[0], "eyas export rewrites it")
        found = loads(engine, config, subject.tensors)
        if found.missing:
            skipped = f", and skips {found.skipped[0]}" if found.skipped else ""
            count = f" and {len(found.missing) - 1} more" if len(found.missing) > 1 else ""
            what = f"{title} finds no {found.missing[0]}{count}{skipped}"
            report.refuse("names", what, "a name was lost or changed")
        elif wrong := [*found.refused, *found.skipped]:
            does = "skips it without a word" if wrong[0] in found.skipped else "ends over it"
            report.refuse("names", f"{title} knows no {wrong[0]} and {does}", "eyas export rewrites it")
    if not report.refused:
        said = " and ".join(f"{TITLES[engine]} {TESTED[engine]}" for engine in cfg.engines)
        report.passed("names", f"{len(subject.tensors)} tensors, all in their places by the loaders of {said}")


def _import_back(subject: Subject, report: CheckReport) -> DraftCheckpoint | None:
    """The folder read as a checkpoint: every name, shape, map and setting."""
    try:
        checkpoint = DraftCheckpoint.load(subject.folder, subject.target)
    except ConfigError as error:
        report.refuse("import", error.what, error.hint)
        return None
    size, whole = len(checkpoint.vocab), checkpoint.vocab.vocab_size
    report.passed("import", f"read back: every shape, and a map of {size:,} of {whole:,} tokens")
    return checkpoint


def _check_layers(subject: Subject, checkpoint: DraftCheckpoint, cfg: ExportConfig, report: CheckReport) -> None:
    """The layers that each engine would read, by each of its ways to read the config."""
    wanted, num_layers = checkpoint.config.aux_layers, subject.target.num_layers
    readers = _readers(subject, cfg)
    for name, layers in readers.items():
        if layers is None:
            report.refuse("layers", f"no layers are named, and {name}'s default is for larger targets", _ANEW)
        elif layers != wanted:
            what = f"{name} would read the outputs of layers {list(layers)}, the draft was made for {list(wanted)}"
            report.refuse("layers", what, "eyas export writes the ids that each server needs")
        elif layers[0] < 0 or layers[-1] > num_layers - 2:
            what = f"{name} cannot read layers {list(layers)} of a target of {num_layers}"
            report.refuse("layers", what, f"layers 0 to {num_layers - 2}")
        else:
            continue
        return
    report.passed("layers", f"{', '.join(readers)} read the outputs of layers {list(wanted)} of {num_layers}")


def _readers(subject: Subject, cfg: ExportConfig) -> dict[str, tuple[int, ...] | None]:
    """Server, by each of its ways to read the config -> the layers it would read."""
    found: dict[str, tuple[int, ...] | None] = {}
    for engine in cfg.engines:
        found |= layers_read(engine, subject.config, subject.target.num_layers, subject.family)
    return found


def _check_values(subject: Subject, report: CheckReport) -> None:
    """Numbers, in one dtype, the one that the config names."""
    said = subject.config.get("dtype") or subject.config.get("torch_dtype")
    dtypes = set[str]()
    for name, tensor in subject.tensors.items():
        if not tensor.is_floating_point():
            continue
        dtypes.add(str(tensor.dtype).removeprefix("torch."))
        if not bool(torch.isfinite(tensor).all()):
            report.refuse("values", f"{name} has values that are no numbers", "train again, or export an earlier step")
            return
        if name.endswith(_NEVER_ZERO) and not bool(tensor.any()):
            report.refuse("values", f"{name} is all zeros", "these weights were never written")
            return
    if len(dtypes) > 1 or (said is not None and dtypes != {str(said)}):
        what = f"weights in {', '.join(sorted(dtypes))}, the config says {said}"
        report.refuse("values", what, "eyas export writes them in one dtype")
        return
    report.passed("values", f"all of them numbers, in {min(dtypes)}")


def _check_record(subject: Subject, report: CheckReport) -> None:
    """Whether the folder is as it was exported."""
    record = subject.record
    if record is None:
        report.leave_open("record", "not an export of eyas", "eyas export makes one of it")
        return
    found = {
        "config.json": (settings_digest(subject.config), record.settings),
        "the weights": (tensors_digest(subject.tensors), record.tensors),
        PROBE: (_digest_of(subject.folder / PROBE), record.probe),
    }
    for what, (now, then) in found.items():
        if now != then:
            report.refuse("record", f"{what} changed since the export", _ANEW)
            return
    report.passed("record", f"nothing changed since the export; spec {record.spec_id[:8] or 'unknown'}")


def _digest_of(path: Path) -> str:
    return digest_bytes(path.read_bytes()) if path.is_file() else ""


def _check_embeddings(subject: Subject, checkpoint: DraftCheckpoint, cfg: ExportConfig, report: CheckReport) -> None:
    """Embeddings of its own must be the target's: vLLM drafts with these, SGLang with the target's."""
    own, config = checkpoint.embed_tokens, checkpoint.config
    if own is None:
        report.passed("embeddings", "none of its own: servers take the target's")
    elif config.hidden_size != config.target_hidden_size:
        report.passed("embeddings", "its own, as it is of another width than the target")
    elif not subject.is_here:
        report.refuse("embeddings", "it brings some, which SGLang does not use and vLLM does", "--target compares them")
    elif tuple(own.shape) != (config.vocab_size, config.hidden_size):
        report.refuse("embeddings", f"they are {list(own.shape)}")
    else:
        try:
            theirs = input_embeddings(subject.target)
        except ConfigError as error:
            if cfg.run_target:
                raise
            what = f"it brings some, and whether they are the target's cannot be told here: {error.what}"
            report.leave_open("embeddings", what, error.hint)
            return
        if torch.equal(theirs.to(own.dtype), own):
            report.passed("embeddings", "its own are the target's, bit for bit")
        else:
            rows = int((theirs.to(own.dtype) != own).any(-1).sum())
            what = f"{rows:,} of {len(own):,} rows are not the target's: SGLang would draft with others than vLLM"
            report.refuse("embeddings", what, "remove embed_tokens if it was trained on the target's")


# --- the probe, and the target ----------------------------------------------------------------------------------------


def _check_weights(subject: Subject, checkpoint: DraftCheckpoint, report: CheckReport) -> Probe | None:
    """The weights on the recorded states: the recorded drafts."""
    path = subject.folder / PROBE
    if not path.is_file():
        if subject.record is None or not subject.record.probe:
            report.leave_open("weights", "no probe to try them on", "eyas export makes one from a store or questions")
        return None
    try:
        probe = Probe.load(path)
    except IntegrityError as error:
        report.refuse("weights", error.what, error.hint)
        return None
    config = checkpoint.config
    if probe.documents[0].aux.shape[1] != config.aux_size or probe.embed.shape[1] != config.hidden_size:
        report.refuse("weights", "the probe's states are of another width than the draft's", _ANEW)
        return None
    wrong, error = probe.differences(drafter_of(checkpoint, probe.embed_ids, probe.embed).run(probe.documents))
    total = int((probe.drafts >= 0).sum())
    if wrong:
        what = f"{wrong:,} of {total:,} drafts on the probe are not the recorded ones"
        hint = "other weights, vocabulary map, RoPE, norm_output or order of layers than at the export"
        report.refuse("weights", what, hint)
        return None
    report.passed("weights", f"{total:,} drafts on the probe as recorded (largest error of a logit {error:.0e})")
    return probe


def _check_target(
    subject: Subject, checkpoint: DraftCheckpoint, probe: Probe, cfg: ExportConfig, report: CheckReport, say: Say
) -> None:
    """The target's embeddings and states against the probe's."""
    if not subject.is_here:
        hint = "eyas export --check DRAFT --target MODEL recomputes the probe's states"
        report.leave_open("states", "whether the layers that servers read are the ones it was trained on", hint)
        return
    if checkpoint.config.hidden_size == checkpoint.config.target_hidden_size:
        try:
            theirs = input_embeddings(subject.target, probe.embed_ids)
        except ConfigError as error:
            if cfg.run_target:
                raise
            report.leave_open("states", f"the target's embeddings cannot be read here: {error.what}")
            return
        if not torch.equal(theirs.to(probe.embed.dtype), probe.embed):
            report.refuse("states", "the target's embeddings are not those of the probe: another target")
            return
    if not cfg.run_target:
        report.leave_open("states", "the target was not run", "eyas export --check DRAFT --target MODEL runs it")
        return
    readers = {name: layers for name, layers in _readers(subject, cfg).items() if layers is not None}
    say(f"loading {subject.target.model} to recompute {len(probe.documents)} texts of the probe")
    drafter = drafter_of(checkpoint, probe.embed_ids, probe.embed)
    compare_states(subject.target, drafter, checkpoint.config.aux_layers, probe, readers, cfg, report)


def _check_acceptance(
    subject: Subject, checkpoint: DraftCheckpoint, probe: Probe | None, cfg: ExportConfig, report: CheckReport, say: Say
) -> None:
    """Acceptance on the target's own answers, as served and on every alternative."""
    if cfg.questions is None or not subject.is_here:
        if probe is None:
            hint = "--target MODEL --questions FILE measures as served against the alternatives"
            what = "ids off by one, layers in another order, pre-norm training and a map of another run leave no trace"
            report.leave_open("acceptance", f"{what} in names", hint)
        return
    say(f"answering questions of {cfg.questions} by {subject.target.model}, to draft on")
    texts = Answers.to(cfg.questions, subject.target, cfg).with_states(checkpoint.config.aux_layers)
    judge_acceptance(checkpoint, subject.target, texts, report)
