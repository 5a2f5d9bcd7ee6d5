"""Rows: what is read, what is refused and in which words, and how rows are divided."""

from __future__ import annotations

import csv
import io

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from explorer import data, hub_rows
from explorer.data import Dataset, Row, bundled, read, split
from explorer.errors import ExplorerError
from explorer.examples import (
    WIDEST,
    Example,
    Wording,
    answer_ids,
    collate,
    drawn,
    example,
    examples,
    packing,
    shuffled,
    worded,
)
from explorer.lm import freeze
from explorer.text import plain
from tests.tiny import tiny_model, tiny_tokenizer

CSV = "text,label\nthe cat sat,animal\nrain and snow,weather\nthe dog ran,animal\n"


@pytest.fixture
def write(tmp_path):
    def write(content: str | bytes, name: str = "rows.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture(scope="module")
def lm():
    return freeze(tiny_model("llama"), tiny_tokenizer())


@pytest.mark.parametrize("name", bundled())
def test_the_bundled_sets_are_balanced_and_without_repeats(name):
    found = read(name)
    counts = {label: sum(row.answer == label for row in found.rows) for label in found.classes}
    assert len(set(counts.values())) == 1 and len(counts) >= 4
    assert len({row.text for row in found.rows}) == len(found.rows) >= 48


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (CSV, "rows.csv"),
        (CSV.replace(",", ";"), "rows.csv"),
        (CSV.replace(",", "\t"), "rows.tsv"),
        ("\ufeff" + CSV, "rows.csv"),
        (CSV.replace("text,label", "Utterance, Intent "), "rows.csv"),
        (CSV.replace("text,label", "category,sentence"), "swapped.csv"),
        (
            '{"text": "the cat sat", "label": "animal"}\n\n'
            '{"text": "rain and snow", "label": "weather"}\n'
            '{"text": "the dog ran", "label": "animal"}\n',
            "rows.jsonl",
        ),
    ],
)
def test_common_forms_of_a_table_are_understood(write, content, name):
    found = read(write(content, name))
    if name == "swapped.csv":
        assert found.rows[0] == Row("animal", "the cat sat")
    else:
        assert found.rows[0] == Row("the cat sat", "animal")
        assert found.classes == ("animal", "weather")
    assert len(found.rows) == 3 and len(found.sha256) == 64


def test_quotes_line_breaks_and_numbers_survive(write):
    found = read(write('text,label\n"one, ""two""\nthree",1\nfour,2\n'))
    assert found.rows == (Row('one, "two"\nthree', "1"), Row("four", "2"))


def test_columns_can_be_named(write):
    path = write("a,b,text\nx,1,ignored\ny,2,ignored\n")
    assert read(path, text="a", answer="B").rows[0] == Row("x", "1")


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        ("text,kind\na,b\n", "rows.csv", "no label column; its columns are text, kind"),
        ("label,kind\na,b\n", "rows.csv", "no text column"),
        ("", "rows.csv", "is empty"),
        ("text,label\n", "rows.csv", "a header and no rows"),
        ("text,label\na,x\nb,x\n", "rows.csv", "Every row of rows.csv has the label x"),
        ("text,label\na,x\nb,NaN\nc,y\n", "rows.csv", "no text or no label in line 3"),
        ("text,label\na,x\n ,y\nc\n", "rows.csv", "in line 3, 4"),
        ("text,label\nsch\xf6n,x\nb,y\n".encode("latin-1"), "rows.csv", "not UTF-8"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "rows.csv", "not UTF-8"),
        ('{"text": "a", "label": NaN}\n{"text": "b", "label": 1}', "r.jsonl", "in line 1"),
        ('{"text": "a", "label": 1}\n{"text": ', "r.jsonl", "line 2 is not a JSON object"),
        ("[1, 2]", "r.jsonl", "line 1 is not a JSON object"),
        ("text,label\n" + "".join(f"a,{n}\n" for n in range(300)), "r.csv", "300 different labels"),
        (b"PAR1", "rows.parquet", "arquet"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_sentence(write, content, name, said):
    with pytest.raises(ExplorerError, match=said) as refused:
        read(write(content, name))
    assert refused.value.hint and str(refused.value).count(".") <= 4


def test_a_parquet_file_gives_the_rows_of_the_same_csv(tmp_path, write):
    table = [(f'row {n} ,\n"ü"', ("yes", "no")[n % 2]) for n in range(2500)]
    path = tmp_path / "rows.parquet"
    columns = dict(zip(("text", "label"), zip(*table, strict=True), strict=True))
    arrow = pyarrow.table({"id": range(len(table)), **{k: list(v) for k, v in columns.items()}})
    parquet.write_table(arrow, path, row_group_size=700)
    lines = io.StringIO(newline="")
    csv.writer(lines).writerows([("text", "label"), *table])
    found = read(path)
    assert found.rows == read(write(lines.getvalue())).rows and found.classes == ("yes", "no")


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["x", None, "y"], "no text or no label in line 2"),
        ([["x"], ["y", "z"], []], "no text or no label in line 1, 2, 3"),
    ],
)
def test_cells_of_a_parquet_file_that_hold_no_label_are_named(tmp_path, labels, said):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "b", "c"], "label": labels}), path)
    with pytest.raises(ExplorerError, match=said):
        read(path)


def test_a_parquet_file_cut_short_is_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "b"] * 99, "label": ["x", "y"] * 99}), path)
    whole = path.read_bytes()
    for kept in (5, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:kept])
        with pytest.raises(ExplorerError, match="not a Parquet file"):
            read(path)
    damaged = bytearray(whole)
    damaged[-60:-20] = bytes(40)
    path.write_bytes(damaged)
    with pytest.raises(ExplorerError, match="not a Parquet file"):
        read(path)


def test_a_missing_file_and_a_huge_one_are_refused(tmp_path):
    with pytest.raises(ExplorerError, match=r"no file away\.csv"):
        read(tmp_path / "away.csv")
    huge = tmp_path / "huge.csv"
    with huge.open("wb") as file:
        file.truncate(data.BYTES + 1)
    with pytest.raises(ExplorerError, match="67 MB; the limit is 67 MB"):
        read(huge)


def test_a_million_rows_are_drawn_from_without_being_held(write):
    path = write("text,label\n" + "".join(f"row {n},{n % 3}\n" for n in range(1_000_000)))
    found = read(path)
    assert len(found.rows) == data.ROWS
    assert found.notes == ("20,000 of 1,000,000 rows are used, drawn at random.",)
    late = sum(int(row.text.split()[1]) >= 500_000 for row in found.rows)
    assert 0.45 < late / data.ROWS < 0.55


def test_no_text_is_both_learnt_from_and_tested_on():
    rows = tuple(Row(f"row {n % 20}", "ab"[n % 2]) for n in range(40))
    parts = split(Dataset("rows", "classes", rows, ("a", "b"), ""), shots=3, held_out=10)
    assert not {row.text for row in parts.train} & {row.text for row in parts.held_out}
    assert [sum(row.answer == name for row in parts.train) for name in "ab"] == [3, 3]
    assert [sum(row.answer == name for row in parts.held_out) for name in "ab"] == [5, 5]


def test_a_split_follows_its_seed():
    found = read("requests")
    assert split(found, seed=1) == split(found, seed=1)
    assert split(found, seed=1).train != split(found, seed=2).train


def test_a_split_says_what_it_could_not_do():
    rows = tuple(Row(f"row {n}", "a" if n else "b") for n in range(9))
    parts = split(Dataset("rows", "classes", rows, ("b", "a"), ""), shots=4)
    assert parts.notes == ("b has fewer than 4 rows; all of them are learnt from.",)
    with pytest.raises(ExplorerError, match="No rows are left"):
        split(Dataset("rows", "classes", rows, ("b", "a"), ""), shots=9)


def test_prompt_and_answer_are_encoded_on_their_own(lm):
    one = example(lm, Row("the cat sat", "mat"), Wording("{text} ."))
    tokens = lm.tokenizer
    assert one.prompt == tuple(plain(tokens, "the cat sat ."))
    assert one.answer == (*plain(tokens, "mat"), tokens.eos_token_id)


def test_text_cannot_turn_into_control_tokens(lm):
    row = Row("the cat </s> <|end|> sat", "mat")
    one = example(lm, row, Wording("{text} :"))
    assert not set(one.prompt) & set(lm.tokenizer.all_special_ids) - {3}
    chat = example(lm, row, Wording("{text}", chat=True))
    clean = example(lm, Row("the cat", "mat"), Wording("{text}", chat=True))
    special = set(lm.tokenizer.all_special_ids) - {3}
    assert sum(i in special for i in chat.prompt) == sum(i in special for i in clean.prompt)


def test_a_long_text_is_cut_and_its_template_is_not(lm):
    row = Row(" ".join(["cat dog"] * 200), "mat")
    one = example(lm, row, Wording("{text} what ?", limit=20))
    assert len(one.prompt) == 20
    assert one.prompt[-2:] == tuple(plain(lm.tokenizer, "what ?"))
    with pytest.raises(ExplorerError, match="template alone"):
        example(lm, row, Wording("{text}" + " what" * 30, limit=20))
    with pytest.raises(ExplorerError, match=r"no \{text\}"):
        Wording("what ?")


def test_loss_is_asked_for_at_the_answer_and_the_end_of_text_only(lm):
    end = lm.tokenizer.eos_token_id
    some = [Example((5, 6, 7), (8, end)), Example((9,), (10, 11, end)), Example((12,), (13,))]
    batch = collate(some)
    assert batch.ids.tolist() == [[5, 6, 7, 8], [9, 10, 11, 12]]
    assert batch.positions.tolist() == [[0, 1, 2, 3], [0, 1, 2, 0]]
    assert batch.shared
    assert batch.asked.tolist() == [2, 3, 4, 5, 6, 7]
    assert batch.targets.tolist() == [8, end, 10, 11, end, 13]
    assert batch.n_tokens == 6


def test_texts_are_packed_into_no_more_room_than_padding_would_take():
    random = np.random.default_rng(0)
    for _ in range(300):
        lengths = random.integers(1, random.integers(2, 60), random.integers(1, 20)).tolist()
        rows, width = packing(lengths)
        assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
        assert max(sum(lengths[i] for i in row) for row in rows) == width
        assert max(lengths) <= width <= 2 * max(lengths)
        assert len(rows) * width <= len(lengths) * max(lengths)
        assert packing(lengths) == (rows, width)
        batch = collate([Example((1,) * length, (2,)) for length in lengths])
        assert batch.positions.max() == max(lengths) - 1  # padding does not go beyond
        assert len(batch.targets) == len(lengths)
    assert packing([7] * 5) == ([[0], [1], [2], [3], [4]], 7)  # nothing to gain, nothing moved
    for alike in ([1000, 990], [240, 258, 251, 247, 244, 256, 249, 253], [500, 390]):
        assert packing(alike) == ([[i] for i in range(len(alike))], max(alike))
    assert packing([600, 10, 10])[1] <= WIDEST
    assert packing([1500, 10, 20]) == ([[0], [1], [2]], 1500)
    few_shot = [9, 12, 13, 14, 18, 20, 28, 42]
    rows, width = packing(few_shot)
    assert len(rows) * width < 1.1 * sum(few_shot)
    assert not collate([Example((1,) * n, (2,)) for n in (4, 4)]).shared
    assert not collate([Example((1,) * n, (2,)) for n in few_shot], share=False).shared


def test_padding_that_is_the_end_of_text_never_hides_the_end_of_text():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    lm = freeze(tiny_model("llama"), tokenizer)
    rows = [Row("the cat", "mat"), Row("the cat sat on the mat", "red house")]
    batch = collate(examples(lm, rows, Wording("{text} :")))
    assert (batch.targets == tokenizer.eos_token_id).sum() == 2


def test_answers_and_plain_texts_are_rows_too(write, lm):
    found = read(
        write('{"instruction": "the cat ?", "output": "a mat"}\n', "a.jsonl"), kind="answers"
    )
    assert found.rows == (Row("the cat ?", "a mat"),) and found.classes == ()
    texts = read(write("text\nthe cat sat\n"), kind="text")
    assert texts.rows == (Row("", "the cat sat"),)
    one = example(lm, texts.rows[0], Wording())
    assert one.prompt == (lm.tokenizer.bos_token_id,)
    assert one.answer == answer_ids(lm, "the cat sat", Wording())


def test_every_example_comes_once_before_any_comes_again():
    some = [Example((n,), (n,)) for n in range(7)]
    stream = drawn(some, 3, seed=0)
    epochs = [sorted(one.prompt[0] for _ in range(3) for one in next(stream)) for _ in "ab"]
    assert epochs == [list(range(7))] * 2
    again = shuffled(some, 3, seed=0)
    assert sorted(next(again).ids[:, 0].tolist()) == sorted(
        one.prompt[0] for one in next(drawn(some, 3, seed=0))
    )
    again = shuffled(some, 3, seed=0)
    assert next(again).ids.tolist() == next(shuffled(some, 3, seed=0)).ids.tolist()


def test_a_row_can_be_shown_as_the_model_reads_it(lm):
    read_as, said = worded(lm, Row("the cat", "mat"), Wording("{text} :", chat=True))
    assert "<|user|>" in read_as and "the cat" in read_as and said.endswith("</s>")


def test_of_a_hub_set_the_plainest_training_table_is_taken():
    sizes = {"README.md": 1, "test.csv": 1, "data/train.parquet": 1, "train.jsonl": 1}
    assert hub_rows.choose(sizes) == "train.jsonl"
    assert hub_rows.choose({"test.csv": 1, "a.csv": 1}) == "a.csv"
    assert hub_rows.choose({"a.bin": 1}) is None


def test_a_hub_that_does_not_answer_is_said_so(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ExplorerError, match="no hub answers"):
        hub_rows.fetched("somebody/rows")
    assert hub_rows.is_hub_name("somebody/rows") and not hub_rows.is_hub_name("/etc/passwd")


def test_more_cells_than_column_names_are_refused_and_empty_ones_are_not(tmp_path):
    """A comma that nobody quoted would make the end of a sentence its label."""
    file = tmp_path / "rows.csv"
    file.write_text("text,label\nI am happy, really,joy\nso so,none\n")
    with pytest.raises(ExplorerError, match=r"line 2 has 3 cells under 2") as refused:
        read(file)
    assert "quotes" in refused.value.hint
    file.write_text("text,label\nglad,joy,,\nso so,none, ,\n")
    assert read(file).classes == ("joy", "none")


def test_settings_that_make_no_run_are_one_sentence(tmp_path):
    with pytest.raises(ExplorerError, match="kind klasses"):
        read("requests", kind="klasses")
    with pytest.raises(ExplorerError, match="no file"):
        read("a" * 5000)
    rows = read("requests")
    for odd in (dict(shots=0), dict(shots=-1), dict(held_out=0), dict(held_out=-1)):
        with pytest.raises(ExplorerError, match="do not make a run"):
            split(rows, **odd)
