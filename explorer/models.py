"""Load a model in full or reduced precision, freeze it, prove the seam.

A model is named by a preset, a hub id, a local folder, or a GGUF file (see `presets`); what
answered is named in `LoadedModel.origin`. One model is loaded in a process: loading another frees
the first before it allocates.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from explorer import sources
from explorer.attention import self_test
from explorer.download import Progress, silent
from explorer.errors import ExplorerError
from explorer.lm import (
    Dtype,
    Geometry,
    LoadedModel,
    ModelSpec,
    Origin,
    Quantization,
    bytes_of,
    freeze,
)
from explorer.presets import PRESETS, Found, Preset, locate

__all__ = [
    "PRESETS",
    "Dtype",
    "Geometry",
    "LoadedModel",
    "MemoryEstimate",
    "ModelSpec",
    "Origin",
    "Preset",
    "Quantization",
    "current",
    "estimate",
    "fetch",
    "freeze",
    "load",
    "unload",
]

log = logging.getLogger(__name__)
# int8 says so at every layer of every pass.
logging.getLogger("bitsandbytes.autograd._functions").addFilter(
    lambda record: "inputs will be cast" not in record.getMessage()
)

_current: LoadedModel | None = None
_guard = threading.RLock()


def current() -> LoadedModel | None:
    """The model this process holds, if any."""
    return _current


def unload() -> None:
    """Drop the loaded model and give its memory back."""
    global _current
    with _guard:
        _current = None
        gc.collect()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def load(
    spec: ModelSpec | str = ModelSpec(),  # noqa: B008 (frozen)
    progress: Progress = silent,
    **options,
) -> LoadedModel:
    """Fetch, quantise, freeze and check the model of `spec`; at once if it is the loaded one.

    spec: a ModelSpec, or its name with further fields as keywords: load("gpt2", dtype="float32")
    progress: called with what is happening and, where it is known, how much of it is done (0–1)

    Raises ExplorerError for anything a visitor can mend: a wrong name, a gated repository, no
    network, a family that cannot be looked into, not enough memory. The model loaded before is
    gone then (memory is freed first); load it again by its spec.
    """
    global _current
    if isinstance(spec, str):
        spec = ModelSpec(spec, **options)
    _refuse_unknown(spec)
    with _guard:
        if _current is not None and _current.spec == spec:
            return _current
        found = locate(spec, progress)
        config = _config(spec, found.where)
        _refuse_unsupported(spec, config)
        unload()
        progress("Loading the weights", None)
        model, tokenizer = _materialise(spec, found.where, config)
        lm = freeze(model, tokenizer, spec, _origin(model, spec, found))
        progress("Checking that every layer can be looked into", None)
        self_test(lm)
        _current = lm
        return lm


def fetch(spec: ModelSpec, progress: Progress = silent) -> None:
    """Bring the model's files to this machine and load nothing. Raises as `load` does."""
    _refuse_unknown(spec)
    found = locate(spec, progress)
    _refuse_unsupported(spec, _config(spec, found.where))
    if Path(found.where).is_dir():
        return
    progress(f"Fetching {found.where}", None)
    files = ["*.json", "*.safetensors", "*.txt", "*.model"]
    if spec.trust_remote_code:
        files.append("*.py")
    try:
        snapshot_download(
            found.where,
            revision=spec.revision,
            allow_patterns=files,
            ignore_patterns=["*/*"],  # in folders lie the same weights in other formats
        )
    except (OSError, ValueError) as error:
        raise _explained(error, spec) from error


def _config(spec: ModelSpec, where: str):
    try:
        return AutoConfig.from_pretrained(
            where, revision=spec.revision, trust_remote_code=spec.trust_remote_code
        )
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise _explained(error, spec) from error


def _explained(error: Exception, spec: ModelSpec) -> ExplorerError:
    """What transformers and the hub raise, in words a visitor can act on."""
    chain, cause = [], error
    while cause is not None:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    name, text = spec.name, str(error)
    if any(isinstance(one, GatedRepoError) for one in chain) or "gated repo" in text:
        return ExplorerError(
            f"{name} asks its users to accept a licence first.",
            f"Accept it at https://huggingface.co/{name}, set HF_TOKEN, and start again.",
        )
    missing = RepositoryNotFoundError, RevisionNotFoundError
    if any(isinstance(one, missing) for one in chain):
        return ExplorerError(
            f"The hub has no model {name} at revision {spec.revision}.",
            "Check the spelling; a private model needs HF_TOKEN.",
        )
    if "trust_remote_code" in text:
        return ExplorerError(
            f"{name} brings program code of its own.",
            "It runs only when the app was started with --trust-remote-code.",
        )
    if "model type" in text or "Unrecognized" in text or "model_type" in text:
        return ExplorerError(
            f"{name} is of a kind that the installed transformers does not know.",
            "Choose a causal language model, or a folder with a config.json.",
        )
    if "safetensors" in text:
        return ExplorerError(
            f"{name} has no weights in the safetensors format.",
            "Other formats can run code while they load; choose a model that has it.",
        )
    if os.path.isdir(Path(name).expanduser()):
        return ExplorerError(
            f"A file in the folder {name} is missing or damaged.",
            "It takes a config.json, the tokenizer's files and weights as safetensors.",
        )
    return ExplorerError(
        f"{name} cannot be reached: it is not on this machine and the hub does not answer.",
        "Check the name and the network, or choose smollm2-135m.",
    )


def _refuse_unknown(spec: ModelSpec) -> None:
    """Before anything is looked for: words that name no precision."""
    for value, known in ((spec.quantization, Quantization), (spec.dtype, Dtype)):
        if value not in get_args(known):
            raise ExplorerError(
                f"There is no precision called {value}.",
                f"Choose from {', '.join(get_args(known))}.",
            )


def _refuse_unsupported(spec: ModelSpec, config) -> None:
    """Before anything large is loaded: is this a causal model with the attention interface?"""
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in known:
        if spec.trust_remote_code:
            return  # its own class; the self-test decides
        raise ExplorerError(
            f"{spec.name} ({config.model_type}) is not a causal language model.",
            "Choose a model that writes text, such as SmolLM2, Gemma, Qwen or GPT-2.",
        )
    family = known[type(config)]
    if not family._supports_attention_backend and not family._can_set_attn_implementation():
        raise ExplorerError(
            f"{family.__name__} computes attention in its own way, which cannot be looked into.",
            "Choose a family that uses transformers' attention interface, such as Llama, Qwen, "
            "Gemma, Mistral, Phi, OLMo, GPT-2 or GPT-NeoX.",
        )
    if spec.dtype == "float16" and config.model_type.startswith("gemma"):
        raise ExplorerError(
            "Gemma's activations overflow float16 and turn into NaN.", "Choose bfloat16 or float32."
        )


def _device(spec: ModelSpec) -> str:
    if spec.device != "auto":
        return spec.device
    if os.environ.get("SPACES_ZERO_GPU"):  # there CUDA may only be touched inside a GPU call
        return "cuda"
    if torch.cuda.is_available():
        return "auto" if torch.cuda.device_count() > 1 else "cuda"
    if spec.quantization == "none" and torch.backends.mps.is_available():
        return "mps"
    return "cpu"


def _check_device(device: str) -> None:
    """Raises ExplorerError for a device that this machine has not."""
    if device == "auto":  # all GPUs
        return
    try:
        kind, index = torch.device(device).type, torch.device(device).index or 0
    except RuntimeError as error:
        raise ExplorerError(
            f"There is no device called {device}.", "Choose auto, cpu, cuda, cuda:1 or mps."
        ) from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ExplorerError("No NVIDIA GPU answers here.", "Choose the device cpu.")
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise ExplorerError(f"There is no {device} here.", "GPUs are counted from cuda:0.")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ExplorerError("No Apple GPU answers here.", "Choose the device cpu.")


def _dtype(spec: ModelSpec, config, device: str) -> torch.dtype:
    if spec.dtype != "auto":
        return getattr(torch, spec.dtype)
    own = config.get_text_config().dtype or config.dtype or torch.float32
    own = getattr(torch, own) if isinstance(own, str) else own
    if device != "cpu":
        # Gemma overflows float16 whatever its file says
        half = own == torch.float16 and config.model_type.startswith("gemma")
        return torch.bfloat16 if half else own
    # On a CPU float32 is the fastest and the most exact; above two billion weights memory decides.
    return torch.float32 if _parameters(config) < 2e9 else torch.bfloat16


def _materialise(spec: ModelSpec, where: str, config):
    device = _device(spec)
    _check_device(device)
    options = {
        "revision": spec.revision,
        "trust_remote_code": spec.trust_remote_code,
        "dtype": _dtype(spec, config, device),
        "device_map": device,
        "use_safetensors": True,
    }
    if spec.quantization != "none":
        options["quantization_config"] = _quantization(spec.quantization, options["dtype"])
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            where, revision=spec.revision, trust_remote_code=spec.trust_remote_code
        )
        model, told = AutoModelForCausalLM.from_pretrained(
            where, output_loading_info=True, **options
        )
    except torch.OutOfMemoryError as error:
        unload()
        raise ExplorerError(
            f"{spec.name} does not fit on {device}.", "Choose nf4, or a smaller model."
        ) from error
    except (ImportError, RuntimeError) as error:
        if "ignore_mismatched_sizes" in str(error):
            raise _unlike(spec, "other sizes") from error
        if spec.quantization == "none":
            raise
        log.exception("quantised load failed")
        raise ExplorerError(
            f"This machine's bitsandbytes cannot run {spec.quantization}.",
            "Choose the quantisation none.",
        ) from error
    except SafetensorError as error:
        raise ExplorerError(
            f"The weights of {spec.name} are damaged.", "Fetch them again, and load then."
        ) from error
    except (OSError, ValueError) as error:
        raise _explained(error, spec) from error
    if told["missing_keys"]:  # transformers fills them with random numbers
        raise _unlike(spec, f"no {min(told['missing_keys'])}")
    _check_tied(model)
    return model, tokenizer


def _unlike(spec: ModelSpec, what: str) -> ExplorerError:
    return ExplorerError(
        f"The weights of {spec.name} are not those that its config.json describes: it has {what}.",
        "Take config and weights from one place.",
    )


def _check_tied(model) -> None:
    """transformers may load an untied head although the config ties it; then say so."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight.data_ptr() == table.weight.data_ptr()
    if getattr(model.config.get_text_config(), "tie_word_embeddings", False) and not tied:
        log.warning("the config ties input and output embeddings, the loaded weights do not")


def _quantization(kind: Quantization, compute: torch.dtype) -> BitsAndBytesConfig:
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=compute
    )


def _origin(model, spec: ModelSpec, found: Found) -> Origin:
    precision = str(model.dtype).removeprefix("torch.")
    if spec.quantization != "none":
        precision = f"{spec.quantization} weights, {precision} activations"
    if lossy := sources.is_converted(found.where):
        precision += f", out of a file quantised to {lossy}"
    implementation = model.config._attn_implementation
    return Origin(found.source, found.licence, precision, implementation, bytes_of(model))


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the weights of a spec before they are loaded, and how many weights there are."""

    n_bytes: int
    parameters: int


def estimate(spec: ModelSpec) -> MemoryEstimate | None:
    """What the weights will take; None where even the config is not to be had without a download.

    Quantised linear layers take 1 byte (int8) or ½ byte plus scales (4 bit) a weight; embeddings
    and norms keep the activations' precision. Working memory comes on top.
    """
    preset = PRESETS.get(spec.name)
    config = None
    if preset is None or preset.bundle is None or sources.converted(preset.bundle):
        where = preset.repo if preset else spec.name
        if preset and preset.bundle:
            where = str(sources.converted(preset.bundle))
        try:
            config = AutoConfig.from_pretrained(
                where, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, StrictDataclassError):
            config = None
    if config is None:
        if preset is None:
            return None
        total, embedded = preset.parameters, preset.parameters // 4
        width = 4 if total < 2e9 and _device(spec) == "cpu" and spec.dtype == "auto" else 2
        if spec.dtype == "float32":
            width = 4
    else:
        total = _parameters(config)
        text = config.get_text_config()
        tied = getattr(text, "tie_word_embeddings", False)
        embedded = text.vocab_size * text.hidden_size * (1 if tied else 2)
        width = _dtype(spec, config, _device(spec)).itemsize
    linear = {"none": width, "int8": 1.0, "nf4": 0.56, "fp4": 0.56}[spec.quantization]
    return MemoryEstimate(round(embedded * width + (total - embedded) * linear), total)


def _parameters(config) -> int:
    """Number of weights of a causal model of this shape; nothing is allocated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())
