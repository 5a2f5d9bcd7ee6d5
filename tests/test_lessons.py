"""Lessons: the answers are computed, the cached numbers are not stale, the words are complete."""

from __future__ import annotations

import copy
import string
import time

import numpy as np
import pytest
from gradio_client import Client

from app import LAUNCH
from explorer import plots_lessons
from explorer.contenders import prefixes
from explorer.lessons import answer, cached, facts, lessons, result_of, start, stops
from explorer.lessons.recipes import RECIPES, SETTINGS, fingerprint
from explorer.lm import ModelSpec
from explorer.tradeoff import trade_off
from explorer.ui.build import build
from explorer.ui.learn_view import equation, feedback, question
from tests.tiny import tiny_checkpoint

NUMBERS = range(1, 6)


def everywhere(number):
    """Every place the sliders of a step can stand at."""
    first, second = stops(number, result_of(number))
    return [(x, y) for x in range(len(first)) for y in range(max(1, len(second)))]


def test_the_cached_results_were_computed_with_these_settings():
    assert cached()["settings"] == fingerprint(), "run: python -m explorer.bench lessons"
    assert sorted(cached()["results"]) == [str(number) for number in NUMBERS]
    assert "SmolLM2" in cached()["origin"]["source"] or cached()["model"] == "smollm2-135m"


def test_the_cached_results_are_what_the_code_measures_today(smollm2):
    row = RECIPES[0](smollm2)["rows"]
    for ours, kept in zip(row, result_of(1)["rows"], strict=True):
        assert ours["shares"] == pytest.approx(kept["shares"], abs=2e-3)
    size = SETTINGS["slots"][2]
    found = trade_off(
        smollm2, SETTINGS["prompts"], prefixes(smollm2, [size]), lengths=SETTINGS["lengths"][:2]
    )
    kept = next(curve for curve in result_of(2)["curves"] if curve["slots"] == size)
    assert np.allclose(found.curves[0].band()[0], kept["mean"][:2], atol=2e-3)
    assert np.allclose(found.curves[0].band("behind")[0], kept["behind"][:2], atol=2e-3)


@pytest.mark.parametrize("number", NUMBERS)
def test_every_question_has_an_answer_wherever_the_sliders_stand(number):
    lesson, result = lessons()[number - 1], result_of(number)
    assert len(lesson.text) == 3
    assert len(set(lesson.choices)) == len(lesson.choices) >= 2
    for x, y in everywhere(number):
        right = answer(number, result, x, y)
        assert 0 <= right < len(lesson.choices)
        assert "✓" in feedback(lesson, result, x, y, right, right)
        wrong = (right + 1) % len(lesson.choices)
        assert lesson.choices[right] in feedback(lesson, result, x, y, wrong, right)
        for told in (question(lesson, result, x, y), feedback(lesson, result, x, y, wrong, right)):
            assert "{" not in told
    assert start(number, result) in [(x, y) for x, y in everywhere(number)]


@pytest.mark.parametrize("number", NUMBERS)
def test_the_words_use_only_facts_that_exist(number):
    lesson = lessons()[number - 1]
    known = facts(number, result_of(number), 0, 0)
    for words in (lesson.question, lesson.feedback):
        used = {name for _, name, _, _ in string.Formatter().parse(words) if name}
        assert used <= set(known)
    assert all(symbol in equation(lesson) for symbol, _, _ in lesson.symbols)


def test_other_numbers_give_other_answers():
    first = copy.deepcopy(result_of(1))
    x, y = start(1, first)
    first["rows"][x]["shares"]["prefix"] = 0.05
    assert answer(1, first, x, y) == 0
    second = copy.deepcopy(result_of(2))
    second["curves"][0]["behind"] = [0.5] * len(second["lengths"])
    assert answer(2, second, 0, 0) == 3
    third = copy.deepcopy(result_of(3))
    third["gates"][2]["mean"][-1] = third["gates"][2]["mean"][0] / 3
    assert answer(3, third, 2, len(third["lengths"]) - 1) == 0
    fourth = copy.deepcopy(result_of(4))
    fourth["spectra"][0]["axes"] = fourth["head_dim"]
    assert answer(4, fourth, 0, 0) == 2
    fifth = copy.deepcopy(result_of(5))
    fifth["said"][1]["forced"] = False
    assert answer(5, fifth, 1, 0) == 1


@pytest.mark.parametrize("number", NUMBERS)
def test_a_figure_draws_the_numbers_and_says_them(number):
    result = result_of(number)
    for x, y in everywhere(number)[::5]:
        drawn = plots_lessons.figure(number, result, x, y)
        assert drawn.layout.height and drawn.layout.width is None
        assert any(sign.isdigit() for sign in drawn.layout.meta["alt"])
    if number == 2:
        x, y = start(2, result)
        lines = {trace.name: list(trace.y) for trace in plots_lessons.figure(2, result, x, y).data}
        assert lines["whole prefix α"] == result["curves"][x]["mean"]


def test_the_lessons_say_what_the_papers_say():
    softmax = result_of(2)["curves"][-1]
    assert softmax["behind"][0] > 2 * softmax["behind"][-1]  # a long text drowns the prefix
    gates = result_of(3)
    assert gates["silent"] == 0
    assert not any(gates["gates"][0]["mean"])
    spectra = {line["name"]: line for line in result_of(4)["spectra"]}
    for line in spectra.values():
        if line["slots"]:
            assert line["axes"] <= line["slots"] + 1e-6
    assert spectra["memory, trained"]["axes"] > spectra["4 slots"]["axes"]
    cache = result_of(5)
    assert all(one["forced"] and one["with"] == cache["target"] for one in cache["said"])


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    demo = build(ModelSpec(tiny_checkpoint(tmp_path_factory.mktemp("llama"))))
    _, url, _ = demo.launch(prevent_thread_lock=True, quiet=True, **LAUNCH)
    yield Client(url, verbose=False)
    demo.close()


def test_a_guess_is_judged_at_once(client):
    x, y = start(2, result_of(2))
    right = answer(2, result_of(2), x, y)
    client.predict(number=2, api_name="/learn_step")
    for guess in range(4):
        choices = lessons()[1].choices
        began = time.monotonic()
        _, said, figure, where = client.predict(
            number=2, x=x, y=y, guess=guess, api_name="/learn_guess"
        )
        assert time.monotonic() - began < 3
        assert ("✓" in said) == (guess == right)
        assert choices[right] in said or guess == right
        assert figure["layout"]["meta"]["alt"]
        assert f"?lesson=2&amp;x={x}&amp;y={y}" in where


def test_a_lesson_is_measured_on_the_loaded_model(client):
    values = client.predict(number=2, api_name="/learn_run")
    assert "done" in values[0]
    assert "Measured just now" in values[-1]
