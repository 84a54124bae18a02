"""Nothing that Eyas reads can run code: no pickle in our formats, no eval, no shell.

What is pickled is what the standard library's multiprocessing passes between a parent and the workers that it starts
itself (prepare's rows, extract's job and reports), over pipes that nobody else can open: neither a file nor a socket.
"""

from __future__ import annotations

import ast
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import eyas
from security.hostile import HELLO, extract_fake, make_corpus, recorder, rid, send, wait_for

CODE = Path(eyas.__file__).parent
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.spawnl", "commands.getoutput"}
MUST_NOT = {"allow_pickle": True, "shell": True, "trust_remote_code": True}


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def faults(text: str) -> list[str]:
    """What in a source could run code from data."""
    tree, found = ast.parse(text), []
    used = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle"
    }
    errors_only = bool(used) and used <= {"UnpicklingError"}  # torch raises it for what it refuses to load
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        fine = {"pickle"} if errors_only and isinstance(node, ast.Import) else set()
        found += [f"import {name}" for name in names if name.split(".")[0] in MODULES - fine]
    for call in calls(tree):
        name = ast.unparse(call.func)
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        constants = {key: value.value for key, value in given.items() if isinstance(value, ast.Constant)}
        if name in CALLS:
            found.append(f"{call.lineno}: {name}()")
        if name.endswith(("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load")):
            found.append(f"{call.lineno}: {name}()")
        if name.endswith(("torch.load", "jit.load")) and constants.get("weights_only") is not True:
            found.append(f"{call.lineno}: {name} without weights_only=True")
        found += [f"{call.lineno}: {key}={value}" for key, value in MUST_NOT.items() if constants.get(key) is value]
    return found


@pytest.mark.parametrize("path", sorted(CODE.rglob("*.py")), ids=lambda path: str(path.relative_to(CODE)))
def test_no_source_can_run_what_it_reads(path: Path) -> None:
    assert faults(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle; pickle.loads(data)",
        "import pickle; pickle.loads(data); pickle.UnpicklingError",
        "from pickle import loads",
        "import cloudpickle as c",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "eval(text)",
        "exec(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_the_search_finds_them(text: str) -> None:
    assert faults(text)


def safetensors_header(data: bytes) -> dict[str, object]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])


def plain(path: Path) -> None:
    """Read a file with json, struct and pyarrow alone, to its last byte."""
    data = path.read_bytes()
    match path.suffix:
        case ".json":
            assert isinstance(json.loads(data), dict)
        case ".jsonl":
            assert all(isinstance(json.loads(line), dict) for line in data.splitlines())
        case ".journal":
            assert all(isinstance(json.loads(line.partition(b" ")[2]), dict) for line in data.splitlines())
        case ".failed":
            assert set(json.loads(data)) == {"reason", "detail"}
        case ".safetensors" | ".part":
            header = safetensors_header(data)
            stops = [value["data_offsets"][1] for key, value in header.items() if key != "__metadata__"]  # type: ignore[index]
            assert len(data) == 8 + struct.unpack("<Q", data[:8])[0] + max(stops)
        case ".parquet":
            pq.read_table(path)
        case _:
            raise AssertionError(f"{path.name}: what is this?")


def test_all_that_a_run_writes_is_json_safetensors_and_parquet(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus.parquet")
    extract_fake(corpus, tmp_path / "store")
    with recorder(tmp_path / "spool") as to:
        to.spool.write_hello(HELLO.to_json())
        send(to, rid(0))
        wait_for(tmp_path / "spool" / f"{rid(0)}.safetensors")
        to.spool.fail(rid(1), "write-failed", "x")  # type: ignore[arg-type]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".jsonl", ".failed", ".safetensors", ".parquet"}
    for path in files:
        plain(path)
        assert b"\x80\x04\x95" not in path.read_bytes()[:16]  # how a pickle begins
