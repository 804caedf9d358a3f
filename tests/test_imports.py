"""The core stands alone: nothing of the pipeline or its frameworks is imported by it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {"hydra", "omegaconf", "lightning", "pytorch_lightning", "wandb", "pipeline"}
FILES = sorted((ROOT / "treegraft_core").rglob("*.py"))


def imported(source: str) -> set[str]:
    """Return the top-level names of absolute imports anywhere in a module, also by string."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            if called.endswith(("import_module", "__import__")):
                names.add(str(node.args[0].value).split(".")[0])
    return names


def test_the_check_itself_sees_imports() -> None:
    """Plain, inside functions, and by name."""
    source = """
import torch, wandb.sdk
def f():
    from hydra.utils import instantiate
    importlib.import_module("pipeline.run")
from . import tree
"""
    assert imported(source) == {"torch", "wandb", "hydra", "pipeline"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_no_file_of_the_core_imports_the_pipeline(path: Path) -> None:
    """By syntax tree, function bodies included."""
    assert not imported(path.read_text(encoding="utf-8")) & FORBIDDEN


def test_the_core_was_found() -> None:
    """The file list above is not empty."""
    assert {"tree.py", "decoder.py", "artifact.py"} <= {p.name for p in FILES}


def test_importing_the_core_loads_none_of_them() -> None:
    """In a fresh interpreter, by what is loaded afterwards."""
    code = "import json, sys, treegraft_core; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in json.loads(run.stdout.splitlines()[-1])}
    assert {"treegraft_core", "torch"} <= loaded
    assert not loaded & FORBIDDEN


def test_every_public_name_exists() -> None:
    """``__all__`` of the core can be imported."""
    import treegraft_core

    assert len(set(treegraft_core.__all__)) == len(treegraft_core.__all__)
    for name in treegraft_core.__all__:
        assert getattr(treegraft_core, name) is not None
