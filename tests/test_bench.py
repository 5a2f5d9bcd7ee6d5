"""The benchmarks measure what they say, alone and sharded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from explorer.bench import force, texts
from explorer.bench.__main__ import main as bench
from explorer.errors import ExplorerError
from explorer.generate import greedy
from explorer.lm import ModelSpec, freeze
from explorer.models import load
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
