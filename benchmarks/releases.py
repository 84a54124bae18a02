"""Which SGLang releases are supported: runs the contract suite against each on CPU and writes docs/releases.md.

    make releases            both releases; about 15 minutes on two cores, the second environment another 3 and 1.6 GB
    python benchmarks/releases.py --only 0.5.21
    python benchmarks/releases.py --page      print the page from the results at hand and run nothing

The contract suite is `pytest -m contract`: real servers, every row of the store against transformers' recomputation
with its controls (neighbouring layers, the pre-norm state, rows shifted by one), and every refusal by its name. A
release that does not pass has the failures in the table. Which way the states are taken is what the server itself says.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
PAGE: Final = ROOT / "docs" / "releases.md"
SUITE: Final = ("-m", "contract", "tests/capture/test_sglang_server.py", "tests/test_end_to_end.py")
#: Release -> its environment and the versions frozen in it. Each has its own transformers, which SGLang pins.
RELEASES: Final[Mapping[str, tuple[str, str]]] = {
    "0.5.21": (".venv-sglang-0.5.21", "constraints/sglang-cpu-0.5.21.txt"),
    "0.5.23": (".venv-sglang", "constraints/sglang-cpu.txt"),
}
ASK: Final = """
import importlib.metadata, json, platform
packages = {name: importlib.metadata.version(name) for name in ("sglang", "torch", "transformers")}
print(json.dumps({"python": platform.python_version(), **packages}))
"""


def environment(release: str, base_python: str) -> Path:
    """The interpreter of a release's environment, made where it is missing or older than what it is made from."""
    folder, constraints = (ROOT / name for name in RELEASES[release])
    ready = folder / "ready"
    sources = [constraints, ROOT / "pyproject.toml"]
    if not ready.exists() or any(source.stat().st_mtime > ready.stat().st_mtime for source in sources):
        print(f"== SGLang {release} on CPU, every version frozen, in {folder.name}", flush=True)
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([base_python, "-m", "venv", str(folder)], check=True)
        subprocess.run([*pip, "-r", str(constraints)], check=True)
        subprocess.run([*pip, "-e", str(ROOT)], check=True)
        ready.touch()
    return folder / "bin" / "python"


def run_suite(release: str, python: Path) -> dict[str, Any]:
    """The contract suite against one release.

    Returns:
        The release's entry of the result file.

    Raises:
        SystemExit: the suite did not run at all, or ran against another release than the one named.
    """
    asked = subprocess.run([python, "-c", ASK], check=True, capture_output=True, text=True)
    versions: dict[str, str] = json.loads(asked.stdout)
    if versions["sglang"] != release:
        raise SystemExit(f"{python} has SGLang {versions['sglang']}, not {release}")
    # In CI a server that cannot be started is a failure; a skipped suite must not count as a passed one.
    env = {**os.environ, "EYAS_SGLANG_PYTHON": str(python), "CI": "1", "PYTHONPATH": str(ROOT / "src")}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *SUITE, f"--junitxml={report}", "-o", "junit_family=xunit1"]
        began = time.monotonic()
        status = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
        if status not in (0, 1) or not report.exists():
            raise SystemExit(f"pytest ended with {status}: nothing is known about {release}")
        tests, said = read_report(report.read_text())
    if said.get("sglang", release) != release:
        raise SystemExit(f"the servers of the suite were SGLang {said['sglang']}, not {release}")
    return {
        "release": release,
        "path": said.get("capture", "unknown"),
        **{name: versions[name] for name in ("python", "torch", "transformers")},
        "device": "CPU",
        "passed": sum(outcome == "passed" for outcome in tests.values()),
        "failed": sum(outcome != "passed" for outcome in tests.values()),
        "tests": tests,
        "seconds": round(time.monotonic() - began),
        "date": today(),
        "commit": _commit(),
        "command": f"EYAS_SGLANG_PYTHON={RELEASES[release][0]}/bin/python pytest {' '.join(SUITE)}",
    }


def read_report(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Outcomes by test (`passed`, or what else and why), and the properties that tests recorded.

    Args:
        text: a JUnit XML report of pytest.
    """
    tests, properties = {}, {}
    for case in ET.fromstring(text).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        bad = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if bad is None else f"{bad.tag}: {(bad.get('message') or '').splitlines()[0][:160]}"
        if tests.get(name, "passed") == "passed":  # a test that passed may still fail at its end, as a second entry
            tests[name] = outcome
        properties |= {one.get("name", ""): one.get("value", "") for one in case.iter("property")}
    return tests, properties


def _commit() -> str:
    """What was tested: the commit, and whether files differed from it."""
    git = ("git", "-C", str(ROOT))
    named = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True)
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--untracked-files=no", "src", "tests"],
        check=False,
        capture_output=True,
        text=True,
    )
    return (named.stdout.strip() or "unknown") + (" and changes" if changed.stdout.strip() else "")


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


# --- the page ---------------------------------------------------------------------------------------------------------


def page() -> str:
    """docs/releases.md, from the newest result of each release on CPU and the results of the GPU contract."""
    entries = newest(sorted(RESULTS.glob("releases-cpu-*.json")))
    gpu = list(gpu_rows(sorted(RESULTS.glob("c*-h200*.json"))))
    lines = [
        "# Supported SGLang releases",
        "",
        "Made by `make docs` from `benchmarks/results`; `make releases` runs the contract suite anew on CPU.",
        "Eyas is written for 0.5.17 and newer. Supported means here: it was run, and every test of the suite passed.",
        "*Server flags*: the server's own flags bring the states. *Hooks*: the release has no such flags, two more",
        "hooks of the plugin take them ([which](capture-contract.md#sglang-releases)). Releases between those of the",
        "table were not run.",
        "",
        "| SGLang | states by | device | Python | torch | passed | failed | date |",
        "|---|---|---|---|---|---|---|---|",
        *gpu,
        *(
            f"| {one['release']} | {one['path']} | {one['device']} | {one['python']} | {one['torch']} "
            f"| {one['passed']} tests | {one['failed']} | {one['date']} |"
            for one in entries
        ),
        "",
        "## On CPU: the contract suite",
        "",
        "Tiny Llama and DeepSeek-V3 models and SmolLM2-135M, in float32 and bfloat16, chunked prefill, 16 in flight,",
        "prefix cache off and on, two tensor-parallel ranks, requests taken back, aborts, quotas; every row against",
        "transformers, every control rejected.",
        "",
        *(
            f"- {one['release']}: `{one['command']}` ({one['seconds']} s, commit {one['commit']}, "
            f"transformers {one['transformers']} in the server)"
            for one in entries
        ),
        "",
        "| test | " + " | ".join(one["release"] for one in entries) + " |",
        "|---|" + "---|" * len(entries),
    ]
    names = dict.fromkeys(name for one in entries for name in one["tests"])
    lines += [
        f"| {_cell(name)} | " + " | ".join(_cell(one["tests"].get(name, "not run")) for one in entries) + " |"
        for name in names
    ]
    return "\n".join(lines) + "\n"


def newest(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The newest entry of each release, by release; later files are newer."""
    entries = {one["release"]: one for file in files for one in json.loads(file.read_text())["releases"]}
    return [entries[release] for release in sorted(entries, key=_number)]


def gpu_rows(files: Sequence[Path]) -> Iterator[str]:
    """Table rows of what `benchmarks/contract_gpu.py` found: of each release and kind of machine its newest result."""
    newest_of: dict[tuple[str, str], tuple[dict[str, Any], list[dict[str, Any]], re.Match[str]]] = {}
    results = [result for file in files if isinstance(result := json.loads(file.read_text()), dict)]
    for result in sorted(results, key=lambda one: str(one.get("date"))):
        rows = [row for row in result.get("rows", ()) if row.get("mismatches") is not None]
        found = re.search(r"sglang (\S+), torch (\S+), Python (\S+)", result.get("versions", ""))
        if rows and found:
            machine = result["hardware"].removeprefix("1 x ")
            newest_of[found[1], machine] = (result, rows, found)
    for (release, machine), (result, rows, found) in newest_of.items():
        bad = sum(row["failed"] + row["mismatches"] for row in rows)
        path = "server flags" if _number(release) >= (0, 5, 23) else "hooks"
        right = f"{sum(row['rows'] for row in rows)} rows in {len(rows)} cases (`contract_gpu.py`)"
        yield f"| {release} | {path} | {machine} | {found[3]} | {found[2]} | {right} | {bad} | {result['date']} |"


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:3])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=RELEASES, help="one release; the others keep their last result")
    parser.add_argument("--python", default="python3.11", help="interpreter that makes the environments")
    parser.add_argument("--page", action="store_true", help="print the page and run nothing")
    args = parser.parse_args()
    if args.page:
        print(page(), end="")
        return
    path = RESULTS / f"releases-cpu-{today()}.json"
    entries = {one["release"]: one for one in newest([path])} if path.exists() else {}
    for release in [args.only] if args.only else RELEASES:
        entries[release] = run_suite(release, environment(release, args.python))
        result = {
            "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()})",
            "command": "make releases",
            "releases": [entries[one] for one in sorted(entries, key=_number)],
        }
        path.write_text(json.dumps(result, indent=1) + "\n")
        PAGE.write_text(page(), encoding="utf-8")
        print(f"{release}: {entries[release]['passed']} passed, {entries[release]['failed']} failed", flush=True)
    print(f"written to {path.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}")
    if any(one["failed"] for one in entries.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
