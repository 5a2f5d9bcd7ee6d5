"""The loop and the measuring: schedules, seeds, divergence, likelihoods; and that it learns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import explorer
from explorer import training
from explorer.attention import keeps_apart, patched, self_test
from explorer.data import Dataset, Row, Split, read, split
from explorer.errors import ExplorerError
from explorer.evaluation import evaluate, likelihoods
from explorer.examples import Example, Wording, collate, example, examples, shuffled
from explorer.generate import stream
from explorer.lm import ModelSpec, freeze
from explorer.methods import methods
from explorer.models import load
from explorer.training import Diverged, FitConfig, fit, optimizer_for, reading, train
from tests.conftest import assert_same_state, state_of
from tests.test_methods import VARIANTS, batches, stirred, texts
from tests.tiny import tiny_checkpoint, tiny_ids, tiny_model, tiny_tokenizer

ROWS = tuple(
    Row(text, label)
    for label, texts in {
        "cat": ("the cat sat", "a cat ran", "the black cat", "cat on the mat", "small cat here"),
        "red house": ("the sun was hot", "snow and rain", "the moon", "hot sun here", "cold rain"),
    }.items()
    for text in texts
)
CLASSES = ("cat", "red house")
WORDING = Wording("{text} :")


@pytest.fixture(scope="module")
def tiny():
    return freeze(tiny_model("llama"), tiny_tokenizer())


def test_rates_rise_and_fall():
    config = FitConfig(steps=10, learning_rate=1.0, warmup=0.2, schedule="linear")
    rates = [config.rate(step) for step in range(1, 11)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(1 / 8)
    constant = FitConfig(steps=3, learning_rate=0.1, warmup=0.0, schedule="constant")
    assert [constant.rate(step) for step in (1, 2, 3)] == [0.1] * 3
    cosine = FitConfig(steps=100, learning_rate=1.0, warmup=0.0)
    assert cosine.rate(51) == pytest.approx(0.5) and cosine.rate(100) < 1e-3


@pytest.mark.parametrize("label", VARIANTS)
def test_the_same_seed_gives_the_same_losses_bit_for_bit(tiny, label):
    method, config = VARIANTS[label]
    data = Split(ROWS[:3] + ROWS[5:8], ROWS[3:5], CLASSES, "classes")

    def losses(seed):
        fitting = FitConfig(steps=4, learning_rate=1e-2, batch_size=4)  # not all rows in one batch
        how = {"method": method, "config": config, "fitting": fitting}
        return [step.loss for step in train(tiny, data, **how, seed=seed, wording=WORDING)]

    assert losses(0) == losses(0)
    assert losses(0) != losses(1)


def test_every_step_says_where_it_stands(tiny):
    data = Dataset("rows", "classes", ROWS, CLASSES, "")
    steps = list(train(tiny, data, method="zero-gate", shots=2, steps=3, wording=WORDING))
    assert [step.step for step in steps] == [1, 2, 3]
    for step in steps:
        assert step.loss > 0 and step.grad_norm > 0 and step.seconds > 0
        assert step.n_tokens == 2 * 2 + 2 * 3  # each answer and its end of text
        assert step.gates.shape == (3, 8)
    opened = [np.nanmax(np.abs(step.gates)) for step in steps]
    assert opened[0] > 0  # what the step has done, not what it found


def test_accumulated_batches_are_one_larger_batch(tiny):
    some = [Example(tuple(row[:6]), tuple(row[6:])) for row in tiny_ids(4, 9).tolist()]
    some[1] = Example(some[1].prompt, some[1].answer[:1])  # of another length

    def run(groups, accumulate):
        adapter = stirred(tiny, "PMT, elu")
        config = FitConfig(steps=3, learning_rate=1e-2, accumulate=accumulate, clip=0.0)
        stream = (collate(group) for _ in range(3) for group in groups)
        return [(step.loss, step.grad_norm) for step in fit(tiny, adapter, stream, config)]

    assert_close(run([some], 1), run([some[:1], some[1:3], some[3:]], 3), atol=1e-4, rtol=1e-4)


def test_a_model_that_mixes_tokens_outside_attention_gets_a_row_for_each_text():
    """A convolution along the row passes the self-test, and would carry one text into the next."""
    lm = freeze(tiny_model("llama"), tiny_tokenizer())
    layer = lm.model.model.layers[1].mlp
    handle = layer.register_forward_hook(
        lambda _, given, out: out + 0.5 * torch.nn.functional.pad(given[0], (0, 0, 1, -1))
    )
    self_test(lm)
    assert not keeps_apart(lm)
    some = texts(5)
    adapter = stirred(lm, "PMT, elu")
    with (
        pytest.raises(ValueError, match="a row for each text"),
        reading(lm, adapter, collate(some)),
    ):
        pass

    def loss(group):
        batch = collate(group, share=False)
        with reading(lm, adapter, batch):
            return training.loss_of(lm, adapter, batch).item()

    assert loss(some) == pytest.approx(sum(loss([one]) for one in some), rel=1e-5)
    data = Split(ROWS[:3] + ROWS[5:8], ROWS[3:5], CLASSES, "classes")
    assert len(list(train(lm, data, method="lora", steps=2, wording=WORDING))) == 2
    plain = [Row("", "the cat sat on the mat " * n) for n in (1, 2, 4)]
    assert evaluate(lm, plain, wording=WORDING).loss > 0
    handle.remove()


@pytest.mark.parametrize("label", ["PMT, elu", "Zero-gate, linear", "Prefix-tuning", "LoRA"])
def test_saving_memory_changes_no_number(lm, label):
    """Layers computed again, under the adapter; and nothing of it stays on the model."""
    method, config = VARIANTS[label]

    def losses(**how):
        adapter = method.build(lm, config, 0)
        return [step.loss for step in fit(lm, adapter, batches(), FitConfig(steps=3, **how))]

    before, plain = state_of(lm), losses()
    assert losses(recompute=True) == plain
    assert losses(half=True) == pytest.approx(plain, rel=0.05)
    assert_same_state(before, state_of(lm))


@pytest.mark.parametrize("label", VARIANTS)
def test_a_fit_taken_up_again_is_the_fit_that_never_stopped(tiny, label):
    method, config = VARIANTS[label]
    fitting = FitConfig(steps=6, learning_rate=1e-2, accumulate=2)

    def begun():
        adapter = method.build(tiny, config, 0)
        return adapter, optimizer_for(adapter, fitting)

    adapter, optimizer = begun()
    whole = [s.loss for s in fit(tiny, adapter, batches(), fitting, optimizer=optimizer)]
    first, optimizer = begun()
    steps = fit(tiny, first, batches(), fitting, optimizer=optimizer)
    part = [next(steps).loss for _ in range(2)]
    second, resumed = begun()
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    rest = fit(tiny, second, batches(), fitting, optimizer=resumed, done=2)
    assert part + [step.loss for step in rest] == whole


def test_clipping_cuts_long_gradients_only(tiny):
    def moved(clip):
        adapter = stirred(tiny, "PMT, elu")
        config = FitConfig(steps=1, learning_rate=1e-3, clip=clip, warmup=0.0)
        (step,) = fit(tiny, adapter, batches(), config)
        return step.grad_norm, adapter.memory.grad

    norm, _ = moved(0.0)
    assert moved(norm / 2)[0] == pytest.approx(norm)  # told before it is cut


@pytest.mark.parametrize("factor", [math.nan, 100.0], ids=["not a number", "exploding"])
def test_a_run_that_goes_wrong_stops_and_keeps_the_last_sound_adapter(tiny, factor, monkeypatch):
    adapter, kept, loss_of = stirred(tiny, "PMT, elu"), [], training.loss_of

    def loss(*args):
        return loss_of(*args) * (factor if len(kept) == 3 else 1.0)

    monkeypatch.setattr(training, "loss_of", loss)
    with pytest.raises(Diverged, match="at step 4") as stopped:
        kept.extend(adapter.memory.clone() for _ in fit(tiny, adapter, batches(), FitConfig()))
    assert stopped.value.step == 4 and stopped.value.hint
    assert torch.equal(adapter.memory, kept[1])  # with which step 3 found a sound loss


@pytest.mark.parametrize("name", ["prefix-memory", "zero-gate"])
def test_a_method_is_fitted_at_its_own_rate_unless_told(tiny, name):
    data = Split(ROWS[:3] + ROWS[5:8], ROWS[3:5], CLASSES, "classes")
    (step,) = train(tiny, data, method=name, steps=1, wording=WORDING)
    assert step.learning_rate == methods()[name].learning_rate
    told = FitConfig(learning_rate=0.5, warmup=0.0)
    (step,) = train(tiny, data, method=name, fitting=told, steps=1, wording=WORDING)
    assert step.learning_rate == 0.5


def test_unknown_methods_are_named(tiny):
    with pytest.raises(ExplorerError, match="no method magic") as refused:
        next(train(tiny, "requests", method="magic"))
    assert "prefix-memory" in refused.value.hint


@pytest.mark.parametrize("adapted", [False, True])
def test_likelihoods_equal_those_of_whole_texts(lm, adapted):
    """With shared prompts, padding on both sides and a cache: the same as one text at a time."""
    adapter = stirred(lm, "Prefix-tuning") if adapted else None
    prompts = [tiny_ids(n, seed=n).tolist() for n in (3, 7, 5)]
    answers = [tiny_ids(n, seed=20 + n).tolist() for n in (1, 3, 2)]
    applied = adapter.applied(lm) if adapted else torch.no_grad()
    with torch.no_grad(), applied:
        found = likelihoods(lm, adapter, prompts, answers)
        for row, prompt in enumerate(prompts):
            for column, answer in enumerate(answers):
                ids = torch.tensor([prompt + answer])
                chances = lm.logits(ids, start=adapter.span if adapted else 0).log_softmax(-1)[0]
                expected = sum(
                    chances[len(prompt) - 1 + i, token] for i, token in enumerate(answer)
                )
                assert_close(found[row, column], expected, atol=1e-4, rtol=1e-5)


def test_free_answers_are_greedy_decoding(tiny):
    texts = ["the cat sat on the mat", "rain", "the dog ran to the house and"]
    rows = [Row(text, "a the a the a") for text in texts]  # six tokens with the end of text
    found = evaluate(tiny, rows, wording=WORDING, generate=True)
    for text, said in zip(texts, found.said, strict=True):
        ids = torch.tensor([example(tiny, Row(text, ""), WORDING).prompt])
        expected = [step.id for step in stream(tiny, ids, 6, stop_ids=(2,))]
        whole = expected[-1] == 2
        words = tiny.tokenizer.decode(expected[:-1] if whole else expected)
        assert said == (words if whole else f"{words}…")


def test_an_evaluation_adds_up(tiny):
    found = evaluate(tiny, ROWS, classes=CLASSES, wording=WORDING, generate=True)
    assert found.n_rows == len(ROWS) and found.scores.shape == (len(ROWS), 2)
    right = [CLASSES.index(row.answer) for row in ROWS]
    assert found.accuracy == pytest.approx((found.scores.argmax(1) == right).mean())
    assert found.loss == pytest.approx(
        -found.scores[range(len(ROWS)), right].sum() / (5 * 2 + 5 * 3), rel=1e-5
    )
    assert found.predictions == tuple(CLASSES[i] for i in found.scores.argmax(1))
    free = evaluate(tiny, ROWS, wording=WORDING)  # without classes: the loss alone
    assert free.loss == pytest.approx(found.loss, rel=1e-4) and free.accuracy is None


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
@pytest.mark.parametrize("label", ["PMT, elu", "Zero-gate, linear", "Prefix-tuning", "LoRA"])
def test_a_quantised_base_trains_after_it_was_looked_at(tmp_path_factory, quantization, label):
    folder = tmp_path_factory.getbasetemp() / "quantised"
    if not folder.exists():
        tiny_checkpoint(folder)
    lm = load(ModelSpec(str(folder), quantization=quantization, device="cpu"))
    with torch.no_grad():
        plain = lm.logits(tiny_ids(1, 7))  # looking, which is what once cut the gradients off
    method, config = VARIANTS[label]
    adapter = method.build(lm, config, 0)
    config = FitConfig(steps=12, learning_rate=5e-2, warmup=0.0, schedule="constant")
    losses = [step.loss for step in fit(lm, adapter, batches(2), config)]
    assert losses[-1] < 0.95 * losses[0]
    assert all(parameter.grad is None for parameter in lm.model.parameters())
    with torch.no_grad():
        assert torch.equal(lm.logits(tiny_ids(1, 7)), plain)


LEARNT = ["PMT, elu", "Zero-gate, linear", "Prefix-tuning from text", "LoRA"]
STEPS = 10


@pytest.fixture(scope="module")
def toy():
    """New names for two kinds of request, which no model can know."""
    names = {"weather": "left", "music": "right"}
    rows = tuple(Row(r.text, names[r.answer]) for r in read("requests").rows if r.answer in names)
    return split(Dataset("toy", "classes", rows, ("left", "right"), ""), shots=2, held_out=8)


@pytest.fixture(scope="module")
def unlearnt(smollm2, toy):
    return evaluate(smollm2, toy.held_out, classes=toy.classes)


@pytest.mark.parametrize("label", LEARNT)
def test_smollm2_learns_to_answer_every_row_it_was_shown(smollm2, toy, unlearnt, label):
    """Each method, in ten steps; rows it was not shown get better too, the base stays."""
    method, config = VARIANTS[label]
    parts = ("model.layers.0.self_attn.q_proj.weight", "model.layers.29.mlp.down_proj.weight")
    weights = [smollm2.model.get_parameter(name).clone() for name in parts]
    fitting = FitConfig(steps=STEPS, learning_rate=method.learning_rate)
    steps = list(explorer.train(smollm2, toy, method=method, config=config, fitting=fitting))
    adapter = steps[-1].adapter
    shown = evaluate(smollm2, toy.train, adapter, classes=toy.classes, generate=True)
    other = evaluate(smollm2, toy.held_out, adapter, classes=toy.classes)
    assert shown.accuracy == shown.exact == 1.0
    assert steps[-1].loss < 0.1 * steps[0].loss
    assert other.loss < 0.2 * unlearnt.loss and other.accuracy > unlearnt.accuracy
    for name, weight in zip(parts, weights, strict=True):
        assert torch.equal(smollm2.model.get_parameter(name), weight)


def test_only_a_prefix_in_the_softmax_loses_its_share_as_the_text_grows(tiny):
    """The trade-off: α of a prefix falls with length; what the others add does not."""
    short, long = tiny_ids(1, 4), tiny_ids(1, 100)
    long[:, -4:] = short

    def added(label):
        """‖b‖ at the last position of the short and of the long text, mean over heads, layer 0"""
        adapter, sizes = stirred(tiny, label), []
        parts = adapter.parts(tiny)

        def watch(call):
            if call.layer == adapter_layer:
                own_share, extra = parts(call)
                size = extra[0, :, -1].norm(dim=-1)
                sizes.append(float((size if own_share is None else 1 - own_share[0, :, -1]).mean()))
            return call.run()

        adapter_layer = getattr(adapter, "first", 0)
        for ids in (short, long):
            with torch.no_grad(), patched(tiny, watch):
                tiny.logits(ids, start=adapter.span)
        return sizes

    for label in ("Prefix-tuning", "Random start, no gate"):
        near, far = added(label)
        assert far < 0.6 * near, label
    for label in ("PMT, elu", "Zero-gate, linear"):
        near, far = added(label)
        assert far > 0.6 * near, label


def test_a_batch_is_as_large_as_the_rows_allow():
    assert len(next(shuffled([Example((1,), (2,))] * 3, 8, 0)).ids) == 3
    assert math.isfinite(methods()["lora"].learning_rate)


@pytest.mark.parametrize("label", VARIANTS)
def test_without_settings_a_method_takes_its_own_learning_rate(tiny, label):
    method, config = VARIANTS[label]
    data = Split(ROWS[:3] + ROWS[5:8], ROWS[3:5], CLASSES, "classes")
    (step,) = train(tiny, data, method=method, config=config, steps=1, wording=WORDING)
    assert step.learning_rate == pytest.approx(method.learning_rate)


@pytest.mark.parametrize(
    ("answer", "said"),
    [("", "nothing to say"), ("  ", "nothing to say"), ("cat " * 200, "answer .* tokens")],
)
def test_an_answer_that_cannot_be_learnt_is_one_sentence(answer, said):
    lm = freeze(tiny_model("llama"), tiny_tokenizer())
    with pytest.raises(ExplorerError, match=said) as refused:
        examples(lm, [Row("the dog", "yes"), Row("the cat", answer)], Wording())
    assert refused.value.hint
