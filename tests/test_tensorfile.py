"""Files that are not what their header says, and folders that take none."""

from __future__ import annotations

import json
import struct

import pytest
import torch

from explorer import tensorfile
from explorer.errors import ExplorerError


def file_with(path, header, body=b""):
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body)
    return path


@pytest.mark.parametrize(
    "header",
    [
        {"__metadata__": None},
        {"__metadata__": ["a"]},
        {"__metadata__": "text"},
        {"a": {"data_offsets": [0, "nine"]}},
        {"a": {"data_offsets": [0, None]}},
        {"a": {"data_offsets": 4}},
        {"a": [1]},
        ["a"],
    ],
)
def test_a_header_of_another_kind_is_refused_in_words(tmp_path, header):
    with pytest.raises(ExplorerError, match="not a safetensors file") as refused:
        tensorfile.header(file_with(tmp_path / "odd.safetensors", header))
    assert refused.value.hint


def test_a_header_without_metadata_has_an_empty_one(tmp_path):
    header = {"a": {"data_offsets": [0, 4]}}
    found = tensorfile.header(file_with(tmp_path / "bare.safetensors", header, b"1234"))
    assert found["__metadata__"] == {}


def test_a_name_too_long_for_the_disk_is_no_file(tmp_path):
    with pytest.raises(ExplorerError, match="There is no file"):
        tensorfile.header(tmp_path / ("a" * 5000))


def test_a_folder_that_takes_no_file_is_named(tmp_path):
    (tmp_path / "taken").write_text("a file, not a folder")
    with pytest.raises(ExplorerError, match="cannot be written") as refused:
        tensorfile.write(tmp_path / "taken" / "out.safetensors", {"a": torch.zeros(1)}, {})
    assert refused.value.hint
