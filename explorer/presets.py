"""Where a model's weights are: presets with sources in order, hub ids, folders, GGUF files."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig

from explorer import sources
from explorer.download import Progress
from explorer.errors import ExplorerError
from explorer.lm import ModelSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preset:
    """A model with a short name.

    repo: its hub id    parameters: how many    licence: what its users agree to
    bundle: the same weights inside packages of the Python index, for machines without a hub
    """

    repo: str
    parameters: int
    licence: str
    bundle: sources.Bundle | None = None
    note: str = ""


PRESETS: dict[str, Preset] = {
    "smollm2-135m": Preset(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        134_515_008,
        "Apache-2.0",
        sources.SMOLLM2_135M,
        "small, answers questions, first choice",
    ),
    "gemma3-270m": Preset(
        "google/gemma-3-270m",
        268_098_176,
        "Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        sources.GEMMA3_270M,
        "QK-norm and sliding windows; continues text",
    ),
    "gpt2": Preset("openai-community/gpt2", 124_439_808, "MIT", note="learned positions"),
    "qwen3-0.6b": Preset("Qwen/Qwen3-0.6B", 596_049_920, "Apache-2.0", note="QK-norm"),
    "llama-3.2-1b": Preset(
        "meta-llama/Llama-3.2-1B-Instruct",
        1_235_814_400,
        "Llama 3.2 Community License, https://www.llama.com/llama3_2/license",
        note="needs an accepted licence and a token",
    ),
    "qwen3-4b": Preset("Qwen/Qwen3-4B", 4_022_468_096, "Apache-2.0", note="wants a GPU"),
}


@dataclass(frozen=True)
class Found:
    """where: what from_pretrained is given; source, licence: in words"""

    where: str
    source: str
    licence: str


def locate(spec: ModelSpec, progress: Progress) -> Found:
    """Find what a spec names, fetching a bundle where the hub does not answer."""
    name = spec.name.strip()
    if not name:
        raise ExplorerError("No model is named.", "Choose one from the list or type a hub id.")
    preset = PRESETS.get(name)
    if preset is not None:
        return _of_preset(preset, spec.revision, progress)
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ExplorerError(f"There is no file {name}.", "Check the path of the GGUF file.")
        folder = sources.convert_gguf(path, progress)
        return Found(str(folder), f"file {path.name}", "see the file's own")
    if os.path.isdir(path):  # of a name too long for the disk as well
        return Found(str(path), f"folder {path.name}", "see the folder's own")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ExplorerError(
            f"{name} is neither a preset, a hub id, a folder nor a GGUF file.",
            "A hub id looks like HuggingFaceTB/SmolLM2-135M-Instruct.",
        )
    page = f"see https://huggingface.co/{name}"
    return Found(name, f"hub: {name}@{spec.revision}", page)


def _of_preset(preset: Preset, revision: str, progress: Progress) -> Found:
    on_hub = Found(preset.repo, f"hub: {preset.repo}@{revision}", preset.licence)
    # What is already here comes first: the hub's weights if they were ever fetched, else the
    # bundle's; asking the network before every start would cost seconds and fail without one.
    bundle = preset.bundle
    if bundle is None or _fetched(preset.repo, revision):
        return on_hub
    folder = sources.converted(bundle)
    if folder is None and not _offline():
        try:
            progress(f"Asking the hub for {preset.repo}", None)
            AutoConfig.from_pretrained(preset.repo, revision=revision)
            return on_hub
        except OSError as error:  # no network, gated, unknown: the bundle has the same weights
            log.info("hub does not answer for %s: %s", preset.repo, error)
    if folder is None:
        folder = sources.local_weights(bundle, progress)
    return Found(str(folder), f"package {bundle.package}", bundle.licence)


def _fetched(repo: str, revision: str) -> bool:
    """Whether the hub's own weights are in its cache, whole and not only the config."""
    files = "config.json", "model.safetensors"
    found = (try_to_load_from_cache(repo, file, revision=revision) for file in files)
    return all(isinstance(path, str) for path in found)


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"}
