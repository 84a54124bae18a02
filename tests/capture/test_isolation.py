"""The plugin lives in the server's environment: it may need nothing the server does not bring."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import eyas

SOURCE = Path(eyas.__file__).parent
FILES = sorted((SOURCE / "capture").glob("*.py"))
SERVERS = {"sglang": "sglang_plugin.py"}  # a server's own package, in its adapter alone


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_imports_are_stdlib_torch_xxhash_or_our_own(path: Path) -> None:
    for name in imported(path):
        root = name.partition(".")[0]
        allowed = root in sys.stdlib_module_names or root in ("torch", "xxhash") or name.startswith("eyas.capture.")
        assert allowed or SERVERS.get(root) == path.name, name


def test_it_imports_where_only_torch_and_xxhash_are_installed() -> None:
    """Isolated interpreter in which every other dependency of this project fails to import."""
    modules = [f"eyas.capture.{path.stem}" for path in FILES if path.name not in (*SERVERS.values(), "__init__.py")]
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {{"pydantic", "httpx", "pyarrow", "safetensors", "transformers", "yaml", "rich",
                                      "typer", "stamina", "jinja2", "huggingface_hub", "tokenizers"}}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
sys.path.insert(0, {str(SOURCE.parent)!r})
for module in {modules!r}:
    __import__(module)
print(sorted(m for m in sys.modules if m.startswith("eyas")))
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(ast.literal_eval(done.stdout)) == {"eyas", "eyas.capture", *modules}
