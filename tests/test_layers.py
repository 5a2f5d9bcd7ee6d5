"""Imports point one way. This list is the architecture; change it on purpose or not at all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "explorer"

# A module may import what stands above it, and its own folder.
ORDER = [
    "errors",
    "tensorfile",
    "download",
    "conversion",
    "sources",
    "lm",
    "attention",
    "presets",
    "models",
    "text",
    "prefix",
    "positions",
    "projections",
    "recomputation",
    "shares",
    "rows",
    "heads",
    "generate",
    "trajectory",
    "methods",
    "replay",
    "forcing",
    "detection",
    "contenders",
    "gated",
    "tradeoff",
    "data",
    "hub_rows",
    "examples",
    "training",
    "evaluation",
    "conversation",
    "spectra",
    "adapters",
    "lessons",
    "jobs",
    "zero_gpu",
    "plots",
    "plots_lessons",
    "plots_look",
    "plots_tradeoff",
    "plots_training",
    "session",
    "bench",
    "ui",
]
# These know nothing of models, although models stand above them.
ALONE = {"jobs": {"errors"}, "plots": {"errors"}, "data": {"errors"}}
# Libraries that only these layers may know.
ONLY = {
    "gradio": {"ui"},
    "spaces": {"zero_gpu"},
    "plotly": {"plots", "plots_training", "plots_lessons", "plots_look", "plots_tradeoff", "ui"},
    "peft": {"methods", "bench"},
    "gguf": {"conversion"},
    "bitsandbytes": {"models", "projections"},
    "transformers": {
        "conversion",
        "lm",
        "attention",
        "presets",
        "models",
        "text",
        "prefix",
        "positions",
        "projections",
        "generate",
        "evaluation",
    },
}
FILES = sorted(PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Dotted names of everything a file imports, `explorer.…` for the package's own."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "explorer":
                yield from (f"explorer.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_stands_above_it(path):
    layer = layer_of(path)
    if layer == "__init__":
        return
    assert layer in ORDER, f"{layer} has no place in the order"
    above = ALONE.get(layer, set(ORDER[: ORDER.index(layer)])) | {layer}
    for name in imports(path):
        top, *rest = name.split(".")
        if top == "explorer" and rest:
            assert rest[0] in above, f"{path.name} imports {name}"
        assert layer in ONLY.get(top, {layer}), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_import_inside_a_function_dodges_a_cycle(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ast.walk(node):
                name = getattr(inner, "module", None) or ""
                inside = isinstance(inner, ast.ImportFrom) and name.split(".")[0] == "explorer"
                assert not inside, f"{path.name}: {node.name} imports {name}"


def test_a_method_knows_no_other_method():
    files = [path for path in FILES if layer_of(path) == "methods" and path.stem != "__init__"]
    for path in files:
        for name in imports(path):
            assert not name.startswith("explorer.methods."), f"{path.name} imports {name}"


def test_modules_are_named_after_things_of_the_field():
    banned = {"utils", "helpers", "common", "misc", "base", "core", "manager", "engine", "handler"}
    assert not banned & {path.stem for path in FILES}


def test_the_app_stays_short():
    assert len((ROOT / "app.py").read_text(encoding="utf-8").splitlines()) <= 120
