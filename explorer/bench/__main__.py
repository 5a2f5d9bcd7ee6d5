"""`python -m explorer.bench NAME …`: each sibling module measures one thing."""

from __future__ import annotations

import argparse
import importlib
import logging
import pkgutil
import sys
from pathlib import Path

import explorer.bench
from explorer.errors import ExplorerError


def _check_report(arguments: list[str]) -> None:
    """Refuse a place for the report now, and not when hours of work are to be written there."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--json", type=Path)
    path = parser.parse_known_args(arguments)[0].json
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ExplorerError(
            f"The report cannot be written to {path}.", "Name a file in a folder that is there."
        )


def main(arguments: list[str]) -> int:
    names = [m.name for m in pkgutil.iter_modules(explorer.bench.__path__) if m.name[0] != "_"]
    if not arguments or arguments[0] not in names:
        sys.stderr.write(f"usage: python -m explorer.bench {{{','.join(names)}}} …\n")
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    name, *rest = arguments
    try:
        _check_report(rest)
        return importlib.import_module(f"explorer.bench.{name}").main(rest)
    except ExplorerError as error:
        sys.stderr.write(f"python -m explorer.bench {name}: {error} {error.hint}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
