"""`python -m explorer.bench NAME …`: each sibling module measures one thing."""

from __future__ import annotations

import importlib
import logging
import pkgutil
import sys

import explorer.bench
from explorer.errors import ExplorerError


def main(arguments: list[str]) -> int:
    names = [m.name for m in pkgutil.iter_modules(explorer.bench.__path__) if m.name[0] != "_"]
    if not arguments or arguments[0] not in names:
        sys.stderr.write(f"usage: python -m explorer.bench {{{','.join(names)}}} …\n")
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    name, *rest = arguments
    try:
        return importlib.import_module(f"explorer.bench.{name}").main(rest)
    except ExplorerError as error:
        sys.stderr.write(f"python -m explorer.bench {name}: {error} {error.hint}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
