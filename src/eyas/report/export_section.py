"""The section on the exported folder, which servers load."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from eyas.logs import read_list, read_number, read_object, read_text
from eyas.rates import human_bytes
from eyas.report.documents import read_document
from eyas.report.places import Places
from eyas.report.sections import Key, Missing, Section, Table

#: What `eyas export --check` found, where somebody kept it beside the folder, as the demo does: `tensors` as in the
#: folder's own record, `lines` of (name, text), `refused` and `unproven` in numbers.
CHECK: Final = "check.json"


def export_section(places: Places) -> Section:
    """The section; empty with a note where nothing was exported."""
    section = Section("export", "Exported drafter")
    if places.exported is None:
        command = f"eyas export {places.quoted('train')} --out exported"
        section.missing.append(Missing("an exported drafter", "", command))
        return section
    exported = places.quoted("exported")
    section.commands += [f"eyas export --check {exported}", f"eyas serve MODEL --draft {exported}"]
    try:
        config = read_document(places.exported / "config.json")
        files = sorted(
            (str(path.relative_to(places.exported)), path.stat().st_size) for path in _files(places.exported)
        )
    except (OSError, ValueError) as error:
        section.problems.append(f"The exported folder cannot be read: {error}.")
        return section
    ours = read_object(config, "eyas")
    record = read_object(ours, "export")
    vocabulary = f"draft vocabulary {read_text(config, 'draft_vocab_size')} of {read_text(config, 'vocab_size')}"
    section.facts += [
        ("folder", str(places.exported)),
        ("files", ", ".join(f"{name} ({human_bytes(size)})" for name, size in files)),
        ("architecture", ", ".join(map(str, read_list(config, "architectures")))),
        ("shape", f"hidden size {read_text(config, 'hidden_size')}, {vocabulary}, {read_text(config, 'dtype')}"),
        ("layers it reads", ", ".join(map(str, read_list(ours, "aux_layers"))) or "as its config names them"),
        ("target", read_text(read_object(record, "target"), "name") or read_text(ours, "target") or "not known"),
        ("capture", read_text(record, "spec_id") or "not known"),
    ]
    _check(section, places.exported.parent / CHECK, read_text(record, "tensors"), f"eyas export --check {exported}")
    return section


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


def _check(section: Section, path: Path, tensors: str, command: str) -> None:
    """What a check of these very weights found."""
    try:
        found: Any = read_document(path)
    except (OSError, ValueError):
        found = None
    if not tensors or read_text(found, "tensors") != tensors:
        why = "it was checked when it was exported, and the findings were not kept" if tensors else ""
        section.missing.append(Missing("a check of the exported folder", why, command))
        return
    refused = read_number(found, "refused")
    unproven = read_number(found, "unproven") or 0
    if refused != 0:
        section.problems.append("The exported folder is refused: servers would not serve it as it was trained.")
    note = f"{unproven:,.0f} parts not proven" if unproven else "by the rules of SGLang and vLLM"
    section.keys.append(Key("exported folder", "refused" if refused != 0 else "passed", note, refused == 0))
    rows = []
    for pair in read_list(found, "lines"):
        if isinstance(pair, list) and len(pair) == 2:
            verdict, _, text = str(pair[1]).partition("  ")
            rows.append((str(pair[0]), verdict, text.strip()))
    section.tables.append(Table("What eyas export --check found", ("part", "verdict", "why"), rows))
