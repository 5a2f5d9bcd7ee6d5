"""safetensors files: written whole or not at all, and looked at before anything is believed."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from explorer.errors import ExplorerError

BYTES = 1 << 30  # largest file that is opened
_HEADER = 1 << 20  # largest header; ours have a few kB


def write(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
    """Write a file; an older one is replaced only when the new one is whole.

    Raises ExplorerError where the folder or the disk does not take it.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), partial, dict(metadata))
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise ExplorerError(
            f"{path.name} cannot be written: {getattr(error, 'strerror', None) or error}.",
            "Free some space, or choose another folder.",
        ) from error
    return path


def header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file, checked against the file's length.

    Its "__metadata__" is there, if empty.
    """
    if not os.path.isfile(path):  # of a name too long for the disk as well
        raise ExplorerError(f"There is no file {path.name}.", "Choose it again.")
    size = path.stat().st_size
    if size > BYTES:
        raise ExplorerError(
            f"{path.name} has {size / 1e9:.1f} GB; one of ours has at most 1 GB.",
            "Choose the adapter or prefix, not the model.",
        )
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        raw = file.read(length) if 2 <= length <= min(_HEADER, size) else b""
    try:
        header = json.loads(raw)
        if not isinstance(header, dict):
            raise ValueError
        described = header.pop("__metadata__", {})
        ends = [int(entry["data_offsets"][1]) for entry in header.values()]
        header["__metadata__"] = dict(described)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ExplorerError(
            f"{path.name} is not a safetensors file.",
            "Other formats, such as pickles, can run code and are never opened.",
        ) from error
    if 8 + length + max(ends, default=0) != size:
        raise ExplorerError(
            f"{path.name} is cut off or has something added.", "Download or copy it again."
        )
    return header
