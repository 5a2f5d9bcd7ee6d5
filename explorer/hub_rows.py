"""Rows of a data set on the hub, by its name, where a hub can be reached."""

from __future__ import annotations

import re
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from explorer.data import BYTES
from explorer.errors import ExplorerError

_KINDS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")


def is_hub_name(text: str) -> bool:
    """Whether a text can be a data set's name: owner/name"""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", text) is not None


def fetched(name: str) -> Path:
    """The file of a hub data set that holds its rows to learn from, fetched unless it is here.

    Raises ExplorerError where there is none, it is too large, or no hub answers.
    """
    try:
        files = HfApi().list_repo_tree(name, repo_type="dataset", recursive=True)
        sizes = {file.path: file.size for file in files if hasattr(file, "size")}
        chosen = choose(sizes)
        if chosen is None:
            raise ExplorerError(
                f"{name} has no table that can be read here.",
                f"Wanted is a file of one of the kinds {', '.join(_KINDS)}.",
            )
        if sizes[chosen] > BYTES:
            raise ExplorerError(
                f"{name} has {sizes[chosen] / 1e6:.0f} MB in {chosen}; the limit is "
                f"{BYTES / 1e6:.0f} MB.",
                "Take a part of it and upload that.",
            )
        return Path(hf_hub_download(name, chosen, repo_type="dataset"))
    except GatedRepoError as error:
        raise ExplorerError(
            f"{name} asks its users to accept terms first.",
            f"Accept them at https://huggingface.co/datasets/{name}, set HF_TOKEN, start again.",
        ) from error
    except RepositoryNotFoundError as error:
        raise ExplorerError(f"The hub has no data set {name}.", "Check the spelling.") from error
    except (httpx2.HTTPError, OSError) as error:
        raise ExplorerError(
            f"{name} cannot be fetched: no hub answers.", "Upload a file, or take a bundled set."
        ) from error


def choose(sizes: dict[str, int]) -> str | None:
    """The table most likely meant: of the training part, of the simplest kind, the first."""
    tables = [path for path in sizes if path.lower().endswith(_KINDS)]

    def rank(path: str) -> tuple[bool, int, str]:
        kind = next(i for i, end in enumerate(_KINDS) if path.lower().endswith(end))
        return "train" not in path.lower(), kind, path

    return min(tables, key=rank, default=None)
