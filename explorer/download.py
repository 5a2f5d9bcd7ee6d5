"""Fetch one file whose size and checksum are known: resumable, and verified or not there at all.

Bytes arrive in a `.part` file beside the target. An interrupted download, in this process or in
an earlier one, goes on where it stopped; only a file with the right checksum gets its real name.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import time
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from explorer.errors import ExplorerError

Progress = Callable[[str, float | None], None]  # what is happening, and which share of it is done

ATTEMPTS = 4
PAUSE_SECONDS = 0.25  # before the second attempt; doubled before each further one
TIMEOUT_SECONDS = 30
_BLOCK = 1 << 20
_AGAIN = "Check the network and load again: the download goes on from there."


def silent(text: str, fraction: float | None) -> None:
    """The progress callback of those who do not watch."""


def fetch(url: str, target: Path, *, size: int, sha256: str, progress: Progress = silent) -> None:
    """Make `target` the file of `size` bytes with this checksum; returns at once if it is there.

    The address, proxies and certificates are those of urllib, that is of the environment.
    Raises ExplorerError when the network, the server or the disk fails; what has arrived by then
    is kept, unless its checksum is wrong.
    """
    if target.is_file():  # it was verified before it got this name
        return
    require_space(target.parent, size)
    part = target.with_name(target.name + ".part")
    _complete(url, part, size, lambda done: progress(_told(target.name, done, size), done / size))
    if part.stat().st_size != size or file_sha256(part) != sha256:
        part.unlink()
        raise ExplorerError(
            f"The download of {target.name} was damaged on the way and has been deleted.",
            "Load again to fetch it afresh.",
        )
    part.replace(target)


def file_sha256(path: Path) -> str:
    """Checksum of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_space(folder: Path, size: int) -> None:
    """Raise ExplorerError unless `size` bytes fit into `folder`, with some room to breathe."""
    free = shutil.disk_usage(folder).free
    if free < size * 1.05:
        raise ExplorerError(
            f"There is no room on the disk: {size / 1e6:,.0f} MB are needed in {folder}, "
            f"{free / 1e6:,.0f} MB are free.",
            "Free some space, or set EXPLORER_CACHE to a folder on another disk.",
        )


def _complete(url: str, part: Path, size: int, arrived: Callable[[int], None]) -> None:
    """Append to `part` until it has `size` bytes, over as many connections as ATTEMPTS allows."""
    cause: Exception | None = None
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))
        try:
            _append(url, part, size, arrived)
        except HTTPError as error:
            if error.code == 416:  # nothing follows what we have: the server's file is shorter
                part.unlink(missing_ok=True)
                raise ExplorerError(
                    f"The server's {part.stem} is shorter than it should be.",
                    "Load again later, or name a local folder or a GGUF file instead.",
                ) from error
            if error.code < 500:
                raise ExplorerError(
                    f"The server refused {part.stem} (HTTP {error.code}).",
                    "The address may have changed: name a local folder or a GGUF file instead.",
                ) from error
            cause = error
        except (OSError, HTTPException) as error:  # refused, unknown host, reset, timed out
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise ExplorerError(
                    f"The disk became full while {part.stem} was downloaded.",
                    "Free some space and load again: the download goes on from there.",
                ) from error
            cause = error
        if _size(part) >= size:
            return
    done = _size(part)
    if done:
        raise ExplorerError(
            f"The download of {part.stem} stopped at {done / 1e6:.1f} of {size / 1e6:.1f} MB.",
            _AGAIN,
        ) from cause
    raise ExplorerError(f"Cannot reach the server that holds {part.stem}.", _AGAIN) from cause


def _append(url: str, part: Path, size: int, arrived: Callable[[int], None]) -> None:
    """One connection's worth of bytes, appended to `part`."""
    done = _size(part)
    if done >= size:
        return
    request = Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    with urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        range_given = response.headers.get("Content-Range", "")
        if not range_given.startswith(f"bytes {done}-"):
            done = 0  # the server sends the whole file
        with part.open("r+b" if done else "wb") as file:
            file.seek(done)
            # One byte more than expected is enough to know that this is another file.
            while block := response.read(min(_BLOCK, size + 1 - done)):
                file.write(block)
                done += len(block)
                arrived(min(done, size))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _told(name: str, done: int, size: int) -> str:
    return f"Downloading {name}: {done / 1e6:.0f} of {size / 1e6:.0f} MB"
