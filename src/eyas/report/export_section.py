"""The section on the exported folder, which servers load."""

from __future__ import annotations

from eyas.rates import human_bytes
from eyas.report.logs import read_document, read_list, read_object, read_text
from eyas.report.places import Places
from eyas.report.sections import Missing, Section


def export_section(places: Places) -> Section:
    """The section; empty with a note where nothing was exported."""
    section = Section("export", "Exported drafter")
    if places.exported is None:
        command = f"eyas export {places.quoted('train')} --out exported"
        section.missing.append(Missing("an exported drafter", "", command))
        return section
    try:
        config = read_document(places.exported / "config.json")
        files = sorted((path.name, path.stat().st_size) for path in places.exported.iterdir() if path.is_file())
    except (OSError, ValueError) as error:
        section.problems.append(f"The exported folder cannot be read: {error}.")
        return section
    ours = read_object(config, "eyas")
    vocabulary = f"draft vocabulary {read_text(config, 'draft_vocab_size')} of {read_text(config, 'vocab_size')}"
    section.facts += [
        ("folder", str(places.exported)),
        ("files", ", ".join(f"{name} ({human_bytes(size)})" for name, size in files)),
        ("architecture", ", ".join(map(str, read_list(config, "architectures")))),
        ("shape", f"hidden size {read_text(config, 'hidden_size')}, {vocabulary}, {read_text(config, 'dtype')}"),
        ("layers it reads", ", ".join(map(str, read_list(ours, "aux_layers"))) or "as its config names them"),
        ("target", read_text(ours, "target") or "not known"),
    ]
    exported = places.quoted("exported")
    section.commands += [f"eyas export --check {exported}", f"eyas serve MODEL --draft {exported}"]
    return section
