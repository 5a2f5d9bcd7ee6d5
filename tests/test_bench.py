"""The benchmarks measure what they say, alone and sharded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import explorer
from explorer.bench import force, texts, train
from explorer.bench.__main__ import main as bench
from explorer.data import read, split
from explorer.errors import ExplorerError
from explorer.evaluation import evaluate
from explorer.generate import greedy
from explorer.lm import ModelSpec, freeze
from explorer.models import load
from explorer.training import FitConfig
from tests.tiny import tiny_checkpoint, tiny_model

ROOT = Path(__file__).parents[1]
SENTENCES = """\
the cat sat on the mat and the dog ran in the rain , but the fish was cold .
a big bird made a good song and the old team said no , but the star was hot .
we saw the sun , the moon and the sea but not the road to the bank .
small red stone here , black snow there and white fire down the tree , but why .
the news of the game and the price of the shop was bad , but the ball came up .
"""


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grid")
    (folder / "sentences.txt").write_text(SENTENCES)
    model = tiny_checkpoint(folder / "model", "qwen3")
    grid = "--endings and,comma --in-len 3,6 --out-len 1,3 --per-group 3 --keys kernel,aligned"
    more = "--repeat 1,90 --baselines"
    sentences = str(folder / "sentences.txt")
    return ["--model", model, "--sentences", sentences, *grid.split(), *more.split()]


@pytest.fixture(scope="module")
def report(arguments, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "grid.json"
    assert force.main([*arguments, "--json", str(out)]) == 0
    return json.loads(out.read_text())


def test_the_grid_has_every_cell_and_kernel_keys_fill_it(report):
    variants = {"kernel", "aligned r=1", "aligned r=90", *force.BASELINES}
    assert {cell["variant"] for cell in report["cells"]} == variants
    assert len(report["cells"]) == len(variants) * 2 * 2 * 2
    assert all(cell["pairs"] == 6 for cell in report["cells"])
    assert report["mean"]["kernel"]["all"] == 1.0
    assert report["mean"]["none"]["all"] < 1.0


def test_sharded_over_two_processes_it_is_the_same(arguments, report, tmp_path):
    out = tmp_path / "sharded.json"
    launch = "-m accelerate.commands.launch --num_processes 2 --cpu --num_cpu_threads_per_process 1"
    command = [sys.executable, *launch.split(), "-m", "explorer.bench", "force", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, "--json", str(out)], cwd=ROOT, check=True, env=environment, capture_output=True
    )
    assert json.loads(out.read_text())["cells"] == report["cells"]


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_prompts_read_together_are_answered_as_each_alone(name):
    lm = freeze(tiny_model(name), None)
    order = [5, 9, 11, 23, 8, 40, 7]
    prompts = [[*order, *rest] for rest in ([3, 4, 5], [3, 4, 5, 6, 7, 8, 9, 30, 31], [50])]
    alone = [greedy(lm, torch.tensor([one]), 6) for one in prompts]
    assert torch.equal(force.continued(lm, prompts, 6), torch.cat(alone))
    assert torch.equal(force.continued(lm, prompts[:1], 6), alone[0])  # all of it is in common


def test_too_few_sentences_are_one_sentence(arguments):
    with pytest.raises(ExplorerError, match="hold only"):
        force.main([*arguments, "--per-group", "50"])


def test_random_ids_are_said_after_prompts_of_any_length(arguments):
    lm = load(ModelSpec(arguments[1]))
    (one,) = texts.any_length(lm, 12, longest=60)
    assert one.exact == one.prompts == 12
    (one,) = texts.random_ids(lm, [20])
    assert one.exact == one.prompts == 2


def test_what_can_be_mended_is_one_sentence_on_the_command_line(capsys):
    assert bench(["train", "--model", "a name with blanks"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("python -m explorer.bench train: a name with blanks is neither")
    assert "hub id" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--endings", "foo"], "no ending called foo"),
        (["--keys", "kernal"], "no keys called kernal"),
        (["--per-group", "1"], "two windows"),
        (["--out-len", "0"], "at least 1"),
        (["--sentences", "/nowhere/at/all"], "cannot be read"),
        (["--json", "/nowhere/at/all.json"], "cannot be written"),
    ],
)
def test_arguments_that_make_no_grid_are_refused_before_the_first_cell(
    arguments, capsys, more, said
):
    assert bench(["force", *arguments, *more]) == 1
    assert said in capsys.readouterr().err


def test_a_report_that_is_none_is_refused_and_kept(arguments, tmp_path, capsys):
    file = tmp_path / "notes.json"
    for odd in ("{", "[]", '{"cells": [{"x": 1}]}'):
        file.write_text(odd)
        assert bench(["force", *arguments, "--json", str(file)]) == 1
        assert "report of another run" in capsys.readouterr().err
        assert file.read_text() == odd


ROWS = {
    "cat": ("the cat sat", "a cat ran by the sea", "the black cat", "cat on the mat", "small cat"),
    "house": ("the sun was hot here", "snow", "the moon and the sea", "hot sun", "cold rain"),
}


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """Model and data of a tiny comparison, as on the command line."""
    folder = tmp_path_factory.mktemp("training")
    lines = [f"{text},{label}" for label, texts in ROWS.items() for text in texts]
    (folder / "rows.csv").write_text("\n".join(["text,label", *lines]))
    model = tiny_checkpoint(folder / "model")
    return ["--model", model, "--data", str(folder / "rows.csv"), "--batch", "4"]


def test_a_comparison_continues_and_has_the_numbers_that_python_gives(training, tmp_path):
    """As if it had been stopped after half of its runs, in the middle of the trials."""
    out = tmp_path / "report.json"
    what = "--shots 3 --trials 2 --steps 3 --held-out 4 --choose-on 4 --rates 1 3 --methods"
    arguments = [*training, *what.split(), "PMT, elu", "LoRA", "--json", str(out)]
    assert train.main(arguments) == 0
    report = json.loads(out.read_text())
    (column,) = report["table"].values()
    assert list(column) == ["no adapter", "PMT, elu", "LoRA"]
    assert all(row["trials"] == 2 for row in column.values())
    assert len(report["runs"]) == 2 * 2 + 2 * 3
    out.write_text(json.dumps(report | {"runs": report["runs"][:6]}))
    assert train.main(arguments) == 0
    again = json.loads(out.read_text())
    for first, second in zip(report["runs"], again["runs"], strict=True):
        assert first | {"seconds": 0} == second | {"seconds": 0}

    run = next(r for r in report["runs"] if (r["label"], r["seed"]) == ("LoRA", 1))
    lm = load(ModelSpec(training[1]))
    rows = split(read(training[3]), shots=3, held_out=4, seed=1)
    fitting = FitConfig(steps=3, learning_rate=run["rate"], batch_size=4)
    steps = list(explorer.train(lm, rows, method="lora", fitting=fitting, seed=1))
    assert run["loss"] == steps[-1].loss
    found = evaluate(lm, rows.held_out, steps[-1].adapter, classes=rows.classes)
    assert (run["accuracy"], run["held_out_loss"]) == (found.accuracy, found.loss)


@pytest.mark.filterwarnings("ignore")  # of peft itself
def test_the_race_against_peft_is_over_the_same_tokens(training, tmp_path, monkeypatch):
    losses = {"ours": [], "theirs": []}
    cross_entropy, loss_of = train.F.cross_entropy, train.loss_of

    def theirs(*args, **how):
        losses["theirs"].append(cross_entropy(*args, **how))
        return losses["theirs"][-1]

    def ours(lm, adapter, batch):
        loss = loss_of(lm, adapter, batch)
        losses["ours"].append(loss / batch.n_tokens)
        return loss

    monkeypatch.setattr(train, "F", SimpleNamespace(cross_entropy=theirs, pad=train.F.pad))
    monkeypatch.setattr(train, "loss_of", ours)
    out = tmp_path / "speed.json"
    arguments = [*training, "--shots", "3", "--speed", "--repeats", "2", "--json", str(out)]
    assert train.main(arguments) == 0
    report = json.loads(out.read_text())
    tokens = report["tokens a batch"]
    assert tokens["texts"] <= tokens["packed"] < tokens["padded"]
    assert set(report["seconds"]) >= {"PMT, elu", "LoRA", "peft LoRA", "peft prefix", "nothing"}
    assert all(seconds > 0 for seconds in report["seconds"].values())
    for key in ("steps a second, over peft's LoRA", "bytes kept for backward, over peft's LoRA"):
        assert report[key]["peft LoRA"] == 1 and all(ratio > 0 for ratio in report[key].values())
    # In the first round nothing has been learnt: both LoRAs start silent, on the same batch.
    silent = losses["ours"][0].item(), losses["ours"][3].item(), losses["theirs"][0].item()
    assert silent == pytest.approx((silent[0],) * 3, rel=1e-4)
