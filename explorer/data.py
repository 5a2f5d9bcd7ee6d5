"""Labelled rows out of files, checked, and divided: a few to learn from, others to test on.

A file is read as a stream: whatever its size, no more than `ROWS` rows are held. What cannot be
used is refused with a sentence that says where and how to mend it.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from explorer.errors import ExplorerError

Kind = Literal["classes", "answers", "text"]

BYTES = 64 << 20  # largest file
ROWS = 20_000  # of a longer file so many are drawn
CLASSES = 200

BUNDLED = Path(__file__).parents[1] / "assets" / "data"

_TEXT = (
    "text sentence utterance query question prompt instruction input review comment message "
    "content document title body"
).split()
_LABEL = "label category class intent emotion sentiment topic target tag labels y".split()
_ANSWER = "answer response output completion reply target label".split()
_EMPTY = {"", "nan", "null"}


@dataclass(frozen=True)
class Row:
    """text: what is read    answer: what shall be said: a class's name, an answer, or the text"""

    text: str
    answer: str


@dataclass(frozen=True)
class Dataset:
    """Rows of one kind.

    name: for people    classes: names of the classes, in order of appearance; () for other kinds
    sha256: of the file    notes: what was left out or changed on the way, in sentences
    """

    name: str
    kind: Kind
    rows: tuple[Row, ...]
    classes: tuple[str, ...]
    sha256: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Split:
    """What is learnt from and what is tested on; no text is in both."""

    train: tuple[Row, ...]
    held_out: tuple[Row, ...]
    classes: tuple[str, ...]
    kind: Kind
    notes: tuple[str, ...] = ()


def bundled() -> dict[str, Path]:
    """The sets that come with the program, by name."""
    return {path.stem: path for path in sorted(BUNDLED.glob("*.csv"), reverse=True)}


def read(
    source: str | Path,
    *,
    kind: Kind = "classes",
    text: str | None = None,
    answer: str | None = None,
) -> Dataset:
    """Rows of a CSV, TSV, JSON-lines or Parquet file, or of a bundled set by its name.

    kind: "classes" wants a text and a label, "answers" a prompt and an answer, "text" a text only
    text, answer: names of the columns, where the usual ones do not find them

    Raises ExplorerError for a file that cannot be used, saying why.
    """
    if kind not in get_args(Kind):
        raise ExplorerError(
            f"There are no rows of the kind {kind}.", f"Choose from {', '.join(get_args(Kind))}."
        )
    path = bundled().get(str(source), Path(source))
    if not os.path.isfile(path):  # of a name too long for the disk as well
        raise ExplorerError(f"There is no file {path.name}.", "Upload it again.")
    size = path.stat().st_size
    if size == 0:
        raise ExplorerError(f"{path.name} is empty.", "It needs a header and at least two rows.")
    if size > BYTES:
        raise ExplorerError(
            f"{path.name} has {size / 1e6:.0f} MB; the limit is {BYTES / 1e6:.0f} MB.",
            "A few thousand rows are more than a run here will read.",
        )
    rows, count = _sample(_rows(path, kind, text, answer))
    notes = []
    if count > len(rows):
        notes.append(f"{len(rows):,} of {count:,} rows are used, drawn at random.")
    classes = tuple(dict.fromkeys(row.answer for row in rows)) if kind == "classes" else ()
    _check(path.name, rows, classes, kind)
    return Dataset(path.name, kind, tuple(rows), classes, _sha256(path), tuple(notes))


def split(dataset: Dataset, *, shots: int = 4, held_out: int = 60, seed: int = 0) -> Split:
    """`shots` rows of every class (or so many rows) to learn from, up to `held_out` others to test.

    Held-out rows are spread evenly over the classes. The same seed gives the same rows.
    """
    if shots < 1 or held_out < 1:
        raise ExplorerError(
            f"{shots} rows to learn from and {held_out} to test on do not make a run.",
            "Take at least one of each.",
        )
    draw = random.Random(seed)
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in dict.fromkeys(dataset.rows):  # each row once
        groups[row.answer if dataset.classes else ""].append(row)
    for group in groups.values():
        draw.shuffle(group)
    train = [row for group in groups.values() for row in group[:shots]]
    known = {row.text for row in train}
    rest = [[row for row in group[shots:] if row.text not in known] for group in groups.values()]
    test: list[Row] = []
    for rank in range(max(map(len, rest))):
        test += [group[rank] for group in rest if rank < len(group)]
    test = test[:held_out]
    draw.shuffle(train)
    notes = list(dataset.notes)
    short = [name for name, group in groups.items() if len(group) < shots]
    if dataset.classes and short:
        notes.append(f"{_listed(short)} has fewer than {shots} rows; all of them are learnt from.")
    if not test:
        raise ExplorerError(
            "No rows are left to test on.", "Take fewer examples per class, or a longer file."
        )
    return Split(tuple(train), tuple(test), dataset.classes, dataset.kind, tuple(notes))


def _rows(path: Path, kind: Kind, text: str | None, answer: str | None) -> Iterator[Row]:
    """The file's rows, one at a time. Raises ExplorerError at the first that cannot be used."""
    if path.suffix.lower() == ".parquet":
        records = _parquet(path)
    elif path.suffix.lower() in {".jsonl", ".ndjson", ".json"}:
        records = _json_lines(path)
    else:
        records = _csv(path)
    columns: tuple[str, str] | None = None
    bad: list[int] = []
    for line, record in records:
        if columns is None:
            columns = _columns(path.name, list(record), kind, text, answer)
        read, said = _cell(record.get(columns[0])), _cell(record.get(columns[1]))
        if read is None or said is None:
            bad.append(line)
            if len(bad) > 3:
                break
            continue
        yield Row("" if kind == "text" else read, said)
    if bad:
        lines = ", ".join(map(str, bad[:3])) + (" and more" if len(bad) > 3 else "")
        raise ExplorerError(
            f"{path.name}: no {' or no '.join(dict.fromkeys(columns))} in line {lines}.",
            "Fill in or delete the rows whose cells are empty or NaN.",
        )


def _columns(
    name: str, found: Sequence[str], kind: Kind, text: str | None, answer: str | None
) -> tuple[str, str]:
    """Which columns hold what is read and what shall be said."""
    by_name = {column.strip().lower(): column for column in found}

    def pick(wanted: str | None, usual: Iterable[str], what: str, taken: str | None = None) -> str:
        options = [wanted.strip().lower()] if wanted else usual
        for option in options:
            if option in by_name and by_name[option] != taken:
                return by_name[option]
        raise ExplorerError(
            f"{name} has no {what} column; its columns are {_listed(found)}.",
            "Name the columns text and label." if kind == "classes" else f"Name it {options[0]}.",
        )

    first = pick(text, _TEXT, "text")
    if kind == "text":
        return first, first
    if kind == "answers":
        return first, pick(answer, _ANSWER, "answer", first)
    return first, pick(answer, _LABEL, "label", first)


def _cell(value: object) -> str | None:
    """A cell as text; None where there is nothing."""
    if value is None or isinstance(value, (dict, list)):
        return None
    text = str(value).strip()
    return None if text.lower() in _EMPTY else text


def _csv(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            header = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=max(",;\t|", key=header.count))
            names = next(reader, [])
            for cells in reader:
                if cells:
                    if any(cell.strip() for cell in cells[len(names) :]):
                        raise ExplorerError(
                            f"{path.name}: line {reader.line_num} has {len(cells)} cells under "
                            f"{len(names)} column names.",
                            "A text that holds the separator itself stands in double quotes.",
                        )
                    cells += [""] * (len(names) - len(cells))
                    yield reader.line_num, dict(zip(names, cells, strict=False))
        except UnicodeDecodeError as error:
            raise _not_utf8(path) from error
        except csv.Error as error:
            raise ExplorerError(
                f"{path.name} cannot be read as a table: {error}.", "Save it as CSV, UTF-8."
            ) from error


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    line = 0
    with path.open(encoding="utf-8-sig") as file:
        try:
            for line, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                record = json.loads(text)
                if not isinstance(record, dict):
                    raise ValueError
                yield line, record
        except UnicodeDecodeError as error:
            raise _not_utf8(path) from error
        except (ValueError, RecursionError) as error:
            raise ExplorerError(
                f"{path.name}: line {line} is not a JSON object.",
                'Each line should look like {"text": "…", "label": "…"}.',
            ) from error


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    from pyarrow import ArrowException, parquet  # only here: it takes a moment to import

    line = 0
    try:
        for part in parquet.ParquetFile(path).iter_batches(1000):
            for record in part.to_pylist():
                line += 1
                yield line, record
    except (ArrowException, OSError) as error:
        raise ExplorerError(f"{path.name} is not a Parquet file.", "Save it again.") from error


def _sample(rows: Iterable[Row]) -> tuple[list[Row], int]:
    """At most ROWS of the rows, each equally likely (a reservoir). → rows, how many there were"""
    draw, kept, count = random.Random(0), [], 0
    for count, row in enumerate(rows, start=1):
        if len(kept) < ROWS:
            kept.append(row)
        else:
            place = draw.randrange(count)
            if place < ROWS:
                kept[place] = row
    return kept, count


def _check(name: str, rows: Sequence[Row], classes: Sequence[str], kind: Kind) -> None:
    if not rows:
        raise ExplorerError(f"{name} has a header and no rows.", "Add at least two rows.")
    if kind != "classes":
        return
    if len(classes) == 1:
        raise ExplorerError(
            f"Every row of {name} has the label {classes[0]}.",
            "To tell classes apart it takes at least two.",
        )
    if len(classes) > CLASSES:
        raise ExplorerError(
            f"{name} has {len(classes):,} different labels; the limit is {CLASSES}.",
            "If they are answers rather than classes, say so.",
        )


def _not_utf8(path: Path) -> ExplorerError:
    return ExplorerError(
        f"{path.name} is not UTF-8 text.", "Save it as CSV with the encoding UTF-8."
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(str(name) for name in names[:6]) + more


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
