"""Lessons: the answers are computed, the cached numbers are not stale, the words are complete."""

from __future__ import annotations

import copy
import json
import string
import time

import numpy as np
import pytest
from gradio_client import Client

from app import LAUNCH
from explorer import plots_lessons
from explorer.contenders import BehindGate, order, prefixes
from explorer.detection import signs
from explorer.lessons import answer, cached, facts, lessons, of_slots, result_of, start, stops
from explorer.lessons import recipes as recipe
from explorer.lessons.recipes import RECIPES, SETTINGS, fingerprint
from explorer.lm import ModelSpec
from explorer.prefix import Prefix
from explorer.tradeoff import trade_off
from explorer.ui.build import build
from explorer.ui.learn_view import equation, feedback, question, verdict
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


SHORT = SETTINGS["lengths"][:2]


def again(lm, contenders):
    """The first two lengths of the curves of a lesson, measured now."""
    return trade_off(lm, SETTINGS["prompts"], contenders, lengths=SHORT)


def test_lesson_1_was_measured_as_the_code_measures_today(smollm2):
    for ours, kept in zip(RECIPES[0](smollm2)["rows"], result_of(1)["rows"], strict=True):
        assert ours["shares"] == pytest.approx(kept["shares"], abs=2e-3)
        assert ours["next"][0][0] == kept["next"][0][0]


def test_lesson_2_was_measured_as_the_code_measures_today(smollm2):
    size = SETTINGS["slots"][2]
    (curve,) = again(smollm2, prefixes(smollm2, [size])).curves
    kept = of_slots(result_of(2)["curves"], size)
    assert np.allclose(curve.band()[0], kept["mean"][:2], atol=2e-3)
    assert np.allclose(curve.band("behind")[0], kept["behind"][:2], atol=2e-3)


def test_lesson_3_was_measured_as_the_code_measures_today(smollm2):
    kept, opening = result_of(3), SETTINGS["openings"][3]
    prefix = Prefix.of_text(smollm2, order(smollm2, SETTINGS["gate slots"]))
    found = again(smollm2, {"soft": prefix, "gate": BehindGate(prefix, opening)})
    for name, line in (("soft", kept["one softmax"]), ("gate", kept["gates"][3])):
        curve = found.curve(name)
        assert np.allclose(curve.band("ratio")[0], line["mean"][:2], rtol=5e-3)
        assert np.allclose(curve.band("size")[0], line["size mean"][:2], rtol=5e-3)
    assert recipe.silence(smollm2) == kept["silent"]


def test_lesson_4_was_measured_as_the_code_measures_today(smollm2):
    kept = result_of(4)
    n = SETTINGS["spectra"][1]
    both = of_slots(kept["spectra"], n)
    spectra = [
        (recipe.in_front(smollm2, n), both["front"]),
        (recipe.poured_in(smollm2, n), both["poured"]),
        (recipe.trained(smollm2), kept["trained"]),
    ]
    for ours, theirs in spectra:
        assert ours["axes"] == pytest.approx(theirs["axes"], rel=0.02)
        assert np.allclose(ours["decay"][:5], theirs["decay"][:5], atol=5e-3)


def test_lesson_5_was_measured_as_the_code_measures_today(smollm2):
    kept, forced = result_of(5), recipe.solved(smollm2)
    assert forced.proof.forced
    assert forced.proof.gap == pytest.approx(kept["gap"], abs=0.05)
    assert recipe.answers(smollm2, forced, SETTINGS["asked"][-1]) == kept["said"][-1]
    ordinary = signs(smollm2, Prefix.of_text(smollm2, order(smollm2, SETTINGS["gate slots"])))
    theirs = kept["signs"]["ordinary prefix"]
    assert ordinary.covered == pytest.approx(theirs["covered"], rel=0.05)
    assert ordinary.prompt_effect == pytest.approx(theirs["prompt_effect"], abs=5e-3)


@pytest.mark.parametrize("number", NUMBERS)
def test_every_question_has_an_answer_wherever_the_sliders_stand(number):
    lesson, result = lessons()[number - 1], result_of(number)
    assert len(lesson.text) == 3
    assert len(set(lesson.choices)) == len(lesson.choices) >= 2
    for x, y in everywhere(number):
        right = answer(number, result, x, y)
        assert 0 <= right < len(lesson.choices)
        assert "✓" in verdict(lesson, right, right)
        wrong = (right + 1) % len(lesson.choices)
        assert lesson.choices[right] in verdict(lesson, wrong, right)
        for told in (question(lesson, result, x, y), feedback(lesson, result, x, y)):
            assert "{" not in told
    assert start(number, result) in [(x, y) for x, y in everywhere(number)]


@pytest.mark.parametrize("number", NUMBERS)
def test_the_words_use_only_facts_that_exist(number):
    lesson = lessons()[number - 1]
    known = facts(number, result_of(number), 0, 0)
    for words in (*lesson.text, lesson.question, lesson.feedback, lesson.notes):
        used = {name for _, name, _, _ in string.Formatter().parse(words) if name}
        assert used <= set(known)
    assert all(symbol in equation(lesson) for symbol, _, _ in lesson.symbols)


def test_other_numbers_give_other_answers():
    first = copy.deepcopy(result_of(1))
    x, y = start(1, first)
    of_slots(first["rows"], stops(1, first)[0][x])["shares"]["prefix"] = 0.05
    assert answer(1, first, x, y) == 0
    second = copy.deepcopy(result_of(2))
    of_slots(second["curves"], 2)["behind"] = [0.5] * len(second["lengths"])
    assert answer(2, second, 0, 0) == 3
    third = copy.deepcopy(result_of(3))
    third["gates"][2]["size mean"][-1] = third["gates"][2]["size mean"][0] / 3
    assert answer(3, third, 2, len(stops(3, third)[1]) - 1) == 0
    fourth = copy.deepcopy(result_of(4))
    fourth["spectra"][0]["front"]["axes"] = fourth["head_dim"]
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
        slots = stops(2, result)[0][x]
        assert lines["whole prefix α"] == of_slots(result["curves"], slots)["mean"]
    if number == 3:
        x, y = start(3, result)
        gate = plots_lessons.figure(3, result, x, y).data[-1]
        assert list(gate.y) == result["gates"][x]["size mean"]


def test_the_lessons_say_what_the_papers_say():
    softmax = result_of(2)["curves"][-1]
    assert softmax["behind"][0] > 2 * softmax["behind"][-1]  # a long text drowns the prefix
    gates = result_of(3)
    assert gates["silent"] == 0
    assert not any(gates["gates"][0]["mean"])
    for gate in gates["gates"][1:]:  # nobody competes with what is behind it
        assert max(gate["size mean"]) < 1.2 * min(gate["size mean"])
    soft = gates["one softmax"]["size mean"]
    assert soft[-1] < soft[0] / 2
    memory = result_of(4)
    for both in memory["spectra"]:
        for line in (both["front"], both["poured"]):
            assert line["axes"] <= both["slots"] + 1e-6
            assert len(line["decay"]) <= both["slots"]  # pouring adds no axis
            assert memory["trained"]["axes"] > line["axes"]
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
        _, judged, told, figure, where = client.predict(
            number=2, x=x, y=y, guess=guess, api_name="/learn_guess"
        )
        assert ("✓" in judged) == (guess == right)
        assert choices[right] in judged or guess == right
        assert told
        assert figure["layout"]["meta"]["alt"]
        assert f"?lesson=2&amp;x={x}&amp;y={y}" in where


@pytest.mark.parametrize("number", NUMBERS)
def test_a_lesson_opens_in_little_time_and_few_bytes(client, number):
    """Processor time of server and client together: what else the machine does is not counted."""
    for call in ({"number": number, "api_name": "/learn_step"},):
        client.predict(**call)
        began = time.process_time()
        opened = client.predict(**call)
        assert time.process_time() - began < 0.5
        assert len(json.dumps(opened)) < 10_000
    began = time.process_time()
    guessed = client.predict(number=number, x=1, y=1, guess=0, api_name="/learn_guess")
    assert time.process_time() - began < 0.5
    assert len(json.dumps(guessed)) < 10_000


def test_a_lesson_is_measured_on_the_loaded_model(client):
    values = client.predict(number=2, api_name="/learn_run")
    assert "done" in values[0] and values[1] == 2  # the step, should the visitor have left it
    assert "Measured just now" in values[-1]
