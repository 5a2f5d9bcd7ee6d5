"""A GGUF file → a folder that transformers opens in a tenth of a second.

transformers reads GGUF by dequantising every tensor in Python, which takes 15 to 60 s for the
small models here and happens again at each start; so the result is kept as safetensors.

It is kept in float32: a GGUF value is (4 to 8 bits) × a float16 scale + a float16 offset, and does
not fit into 16 bits. Rounding the two bundled models to bfloat16 changed 82 and 88 % of the
weights and moved log-probabilities by up to 0.18 and 0.44 on one paragraph (float16: 0.04), with
the same argmax everywhere. The price is disk: 538 and 1072 MB instead of half of it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from gguf import GGUFReader, LlamaFileType
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from explorer.download import Progress, require_space, silent
from explorer.errors import ExplorerError

MARKER = "complete.json"  # written last: what the file was quantised to, and every file's size
_SAMPLE = "The cat's 2 naïve friends  said: “Hello, 世界!”\n"


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a finished conversion with none of its files missing or cut short."""
    marker = folder / MARKER
    if not marker.is_file():
        return False
    sizes = json.loads(marker.read_text(encoding="utf-8"))["sizes"]
    return all((folder / n).is_file() and (folder / n).stat().st_size == sizes[n] for n in sizes)


def quantised_to(folder: Path) -> str | None:
    """The lossy format, e.g. "Q4_1", of the GGUF file that `folder` was made from, if it was."""
    marker = folder / MARKER
    return json.loads(marker.read_text(encoding="utf-8"))["quantised"] if marker.is_file() else None


def dequantise(gguf: Path, folder: Path, progress: Progress = silent) -> None:
    """Write config, tokenizer and float32 weights of `gguf` to `folder`, verified by reloading.

    The folder appears under its name in one step, when all of it is right. The caller keeps
    others from converting into the same folder meanwhile.
    """
    n_weights, quantised = _contents(gguf)
    require_space(folder.parent, 4 * n_weights)
    progress(f"Unpacking {gguf.name}: the first time takes up to a minute", None)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (ValueError, KeyError, IndexError, OSError, NotImplementedError) as error:
        # What transformers raises for architectures and tokenizers it cannot rebuild from GGUF.
        raise ExplorerError(
            f"{gguf.name} is a GGUF file of a kind that transformers cannot open.",
            "Take the model's own folder or hub id instead.",
        ) from error
    if info["missing_keys"]:  # transformers fills them with random numbers, with only a log line
        raise ExplorerError(
            f"{gguf.name} lacks {len(info['missing_keys'])} of the model's tensors.",
            "A model split over several GGUF files must be merged into one first.",
        )
    _forget_quantiser(model)
    progress(f"Writing and checking the unpacked {gguf.name}", None)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    _check(partial, model, tokenizer(_SAMPLE).input_ids, gguf.name)
    sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    made = json.dumps({"quantised": quantised, "sizes": sizes}, indent=1)
    (partial / MARKER).write_text(made, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.replace(folder)


def _contents(gguf: Path) -> tuple[int, str | None]:
    """How many numbers the file holds, and in which lossy format, if it is one.

    This also is the check that the file is GGUF and whole.
    """
    try:
        # Cut files fail in numpy while the tensors are laid out, foreign ones on the magic number.
        reader = GGUFReader(gguf)
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise ExplorerError(
            f"{gguf.name} is not a whole GGUF file.",
            "Check that the download finished, and that it is a GGUF file.",
        ) from error
    kind = reader.get_field("general.file_type")
    name = LlamaFileType(kind.contents()).name.removeprefix("MOSTLY_") if kind else "unknown"
    exact = name in {"ALL_F32", "F16", "BF16"}
    return sum(int(tensor.n_elements) for tensor in reader.tensors), None if exact else name


def _forget_quantiser(model: PreTrainedModel) -> None:
    """The weights are plain tensors now; with these marks left, save_pretrained refuses."""
    model.hf_quantizer = None
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    for name in ("is_quantized", "quantization_method"):
        if name in model.__dict__:
            delattr(model, name)


def _check(folder: Path, model: PreTrainedModel, sample_ids: list[int], name: str) -> None:
    """Raise unless what lies in `folder` loads as exactly this model and tokenizer."""
    saved = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    wanted = model.state_dict()
    same = saved.keys() == wanted.keys() and all(torch.equal(saved[k], wanted[k]) for k in wanted)
    if not same or AutoTokenizer.from_pretrained(folder)(_SAMPLE).input_ids != sample_ids:
        shutil.rmtree(folder)
        raise ExplorerError(
            f"What was unpacked from {name} does not read back as it was written.",
            "The disk may be faulty: set EXPLORER_CACHE to a folder on another one.",
        )
