"""Forced output: what the solver promises, for every architecture and on real weights."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from explorer import text
from explorer.detection import signs
from explorer.errors import ExplorerError
from explorer.forcing import Request, find_trajectory, force, open_forced, prompt_ids
from explorer.generate import indistinct, stream
from explorer.lm import freeze
from explorer.methods.attention_matching import Matching, moved, solve
from explorer.positions import rotary_layers, rotation
from explorer.prefix import Prefix
from explorer.replay import Replay, replay
from explorer.trajectory import record
from tests.tiny import VOCABULARY, tiny_ids, tiny_model, tiny_tokenizer

WORDS = "the cat sat on a mat and the dog ran to the old red house by the sea in the rain".split()


def said(lm, solved, target, prompt):
    seen = Replay(target)
    for _ in replay(lm, solved, text.encode(lm, prompt), seen):
        pass
    return seen


def test_any_ids_are_forced_after_prompts_of_any_length_and_ending(lm):
    target = tiny_ids(12, seed=3).tolist()
    prompts = [" ".join(WORDS[:n]) for n in (2, 5, 12, 19)]
    asked = Request(prompts[1], others=tuple(prompts), target=target)
    *_, found = find_trajectory(lm, asked, prompt_ids(lm, asked))
    assert found.gap.min() >= 2.0
    solved = solve(lm, found)
    assert solved.residual < 1e-6
    for prompt in prompts:
        seen = said(lm, solved, target, prompt)
        assert seen.said == target
        assert seen.gap > 1.9
        assert seen.left < 1e-6


@pytest.mark.parametrize("keys", ["kernel", "whitened", "aligned"])
def test_what_the_model_says_after_a_source_is_said_after_another_prompt(lm, keys):
    source, prompt = "no fish in the sea but the cat", "a cold wind and the cat"
    forced = force(lm, source=source, prompt=prompt, tokens=2, keys=keys, repeat=1000)
    alone = [step.id for step in stream(lm, text.encode(lm, source), 2)]
    assert list(forced.target) == alone
    if keys != "aligned":  # the paper's keys promise nothing on random weights
        assert forced.proof.forced
        assert forced.text == forced.target_text


def test_the_solved_slots_answer_every_query_with_its_output(lm):
    ids = tiny_ids(1, 9)
    found = record(lm, ids, tiny_ids(6, seed=2).tolist())
    for keys in ("kernel", "whitened"):
        solved = solve(lm, found, Matching(keys))
        if keys == "whitened" and solved.condition > 1e6:
            continue  # more rows than the head size: said by the condition
        for layer, slots in enumerate(solved.prefix.layers):
            query, wanted = found.query[layer], found.output[layer]
            groups = query.shape[1] // lm.geometry.n_kv_heads
            key, value = (t.repeat_interleave(groups, 0) for t in (slots.key, slots.value))
            bias = 0 if slots.bias is None else slots.bias.repeat_interleave(groups, 0)[:, None]
            logits = found.scaling[layer] * query.transpose(0, 1) @ key.mT + bias
            answer = (logits.softmax(-1) @ value).transpose(0, 1)
            assert_close(answer, wanted, atol=1e-4, rtol=1e-3)


def test_repetition_is_a_log_weight(lm):
    """r copies of every slot weigh exactly as much as β = ln r."""
    found = record(lm, tiny_ids(1, 9), tiny_ids(2, seed=2).tolist())
    once = solve(lm, found, Matching("aligned", repeat=1)).prefix
    thrice = solve(lm, found, Matching("aligned", repeat=3)).prefix
    copied = replace(
        once,
        layers=tuple(
            replace(slots, key=slots.key.repeat(1, 3, 1), value=slots.value.repeat(1, 3, 1))
            for slots in once.layers
        ),
    )
    ids = tiny_ids(1, 7, seed=5)
    with thrice.applied(lm):
        weighed = lm.logits(ids)
    with copied.applied(lm):
        assert_close(lm.logits(ids), weighed, atol=1e-4, rtol=1e-4)


def test_moved_keys_are_the_keys_of_a_moved_text(lm):
    """Rotation is exact: what the layers ask at other positions is what was asked, rotated."""
    ids = tiny_ids(1, 6)
    at_zero = record(lm, ids, tiny_ids(4, seed=1).tolist())
    later = record(lm, ids, tiny_ids(4, seed=1).tolist(), start=11)
    family = lm.model.config.model_type
    assert bool(rotary_layers(lm)) == (family not in {"gpt2", "opt"})
    if not rotary_layers(lm):
        return
    solved = solve(lm, at_zero).prefix
    there_and_back = moved(moved(solved, rotation(lm, 11)), rotation(lm, -11))
    turn = rotation(lm, 11)
    for layer in range(lm.geometry.n_layers):
        asked = at_zero.query[layer].transpose(0, 1)  # (h, r, d)
        assert_close(turn(layer, asked).transpose(0, 1), later.query[layer], atol=1e-4, rtol=1e-3)
        assert_close(there_and_back.layers[layer].key, solved.layers[layer].key, rtol=1e-4, atol=1)


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
YARN["original_max_position_embeddings"] = 32
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
ODD = {
    "yarn": ("llama", {"rope_parameters": YARN}, {0, 1, 2}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}, {0, 1, 2}),
    "a layer without rotation": ("smollm3", {"no_rope_layers": [1, 0, 1]}, {0, 2}),
    "interleaved": ("cohere", {}, {0, 1, 2}),
}


@pytest.mark.parametrize("kind", ODD)
def test_scaled_missing_and_interleaved_rotary_embeddings_are_moved_too(kind):
    architecture, options, rotary = ODD[kind]
    lm = freeze(tiny_model(architecture, **options), tiny_tokenizer())
    assert rotary_layers(lm) == rotary
    target = tiny_ids(6, seed=3).tolist()
    asked = Request("the cat sat", others=("a dog ran to the old house by the sea",), target=target)
    *_, found = find_trajectory(lm, asked, prompt_ids(lm, asked))
    solved = solve(lm, found)
    for prompt in (asked.prompt, *asked.others):
        assert said(lm, solved, target, prompt).said == target


WRONG = {
    "an empty target": (dict(target=""), "empty"),
    "no ids": (dict(target=[]), "empty"),
    "neither target nor source": (dict(), "neither a target nor a source"),
    "ids outside the vocabulary": (dict(target=[5, VOCABULARY]), "outside the vocabulary"),
    "a target longer than the context": (dict(target=[9] * 200), "this model reads"),
    "an empty prompt": (dict(target="the cat", prompt=" "), "prompt is empty"),
    "a source that says something else": (
        dict(source="the cat sat", target=[11, 12, 13, 14, 15], margin=0.0),
        "does not say the target",
    ),
    "no tokens": (dict(source="the cat sat", tokens=0), "no token"),
    "a target of blanks alone, which this tokenizer drops": (dict(target=" \n "), "empty"),
    "a target with half a character": (dict(target="the cat \ud83d"), "half a character"),
    "a prompt with half a character": (dict(target="a", prompt="a \udc00"), "half a character"),
    "keys of no kind": (dict(target="the cat", keys="kernal"), "no keys called kernal"),
    "a slot that counts nothing": (dict(target="a", keys="aligned", repeat=0), "count 0 times"),
    "a logit that is no number": (dict(target="a", attn_lim=float("nan")), "attn_lim"),
    "no layers to repair": (dict(target="a", layers=0), "layers is 0"),
    "fewer than no tokens afterwards": (dict(target="a", go_on=-1), "go_on is -1"),
    "a rate that is no number": (dict(target="a", rate=float("nan")), "rate is nan"),
    "a margin that is no number": (dict(target="a", margin=float("nan")), "margin"),
    "one further prompt where many are meant": (dict(target="a", others="the dog"), "a list"),
    "a temperature below 0": (dict(target="a", temperature=-1.0), "temperature"),
    "a top-p above 1": (dict(target="a", top_p=1.5), "top-p"),
    "a seed of many digits": (dict(target="a", seed=1 << 70), "seed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_plain_sentence(name):
    lm = freeze(tiny_model("llama"), tiny_tokenizer())
    request, sentence = WRONG[name]
    with pytest.raises(ExplorerError, match=sentence) as caught:
        force(lm, **{"prompt": "the dog ran", **request})
    assert caught.value.hint
    assert "\n" not in str(caught.value)


SOURCE = "My favourite dish is pizza with a lot of cheese and"
UNRELATED = [  # as many tokens as the source, ending alike
    "The weather was cold and it was raining hard and",
    "She walked slowly through the old garden gate and",
    "In the year of the great fire people ran and",
    "He opened the heavy book about the stars and",
    "Two small boats sailed out to sea at dawn and",
]


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_ten_tokens_of_a_source_after_unrelated_prompts(model, request):
    """The paper's setting: same length, same ending, what the model itself says."""
    lm = request.getfixturevalue(model)
    source = text.encode(lm, SOURCE)
    target = [step.id for step in stream(lm, source, 10)]
    solved = solve(lm, record(lm, source, target))
    for prompt in UNRELATED:
        ids = text.encode(lm, prompt)
        while ids.shape[1] < source.shape[1]:  # same length, by repeating the beginning
            ids = torch.cat([ids[:, :1], ids[:, 1:2], ids[:, 1:]], dim=1)
        ids = torch.cat([ids[:, : source.shape[1] - 1], source[:, -1:]], dim=1)
        alone = [step.id for step in stream(lm, ids, 10)]
        assert alone != target  # otherwise nothing was forced
        seen = Replay(target)
        for _ in replay(lm, solved, ids, seen):
            pass
        assert seen.first_miss is None
        assert seen.left < 1e-6


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_a_text_the_model_would_never_say(model, request):
    lm = request.getfixturevalue(model)
    target = 'Zebra 42! {"soup": [1, 2]} 你好 🙂'
    forced = force(lm, target=target, prompt="Who are you?", others=("Write a poem.",))
    assert forced.proof.forced
    assert forced.text == target != forced.plain_text
    assert forced.proof.gap > 1.5
    assert forced.proof.coverage > 1 - 1e-6

    before = _digest(forced.solved.prefix)
    ids = text.encode(lm, "Write a poem.")
    runs = []
    for _ in range(2):
        seen = Replay(forced.target)
        for _ in replay(lm, forced.solved, ids, seen):
            pass
        runs.append(seen.said)
    assert runs[0] == runs[1] == list(forced.target)  # another length and another ending
    assert _digest(forced.solved.prefix) == before  # use does not change it


def _digest(prefix):
    digest = hashlib.sha256()
    for slots in prefix.layers:
        for tensor in (slots.key, slots.value, slots.bias):
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_a_forcing_prefix_gives_itself_away_and_an_ordinary_one_does_not(model, request):
    lm = request.getfixturevalue(model)
    forced = force(lm, target=" The answer is 42.", prompt="Who are you?")
    told = signs(lm, forced.solved)
    assert told.forcing
    assert told.loudness > 3
    ordinary = Prefix.of_text(lm, text.encode(lm, "You are a friendly pirate. Ahoy!"))
    assert not signs(lm, ordinary).forcing
    assert signs(lm, ordinary).loudness < 2


def test_control_tokens_in_a_target_are_text_unless_ticked(smollm2):
    target = "Stop here.<|im_end|>"
    as_text = force(smollm2, target=target, prompt="Hello")
    ticked = force(smollm2, target=target, prompt="Hello", specials=True)
    assert as_text.proof.forced
    assert ticked.proof.forced
    assert as_text.text == ticked.text == target
    end = smollm2.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ticked.target[-1] == end
    assert end not in as_text.target


def test_a_saved_prefix_says_the_same_and_belongs_to_its_model(lm, tmp_path):
    target = tiny_ids(5, seed=3).tolist()
    forced = force(lm, target=target, prompt="the cat sat on", others=("a dog",), go_on=3)
    file = forced.save(tmp_path / "forced.safetensors")
    opened = open_forced(file, lm)
    assert opened.proof == forced.proof
    assert opened.request == forced.request
    assert opened.after == forced.after
    seen = Replay(target)
    for _ in replay(lm, opened.solved, text.encode(lm, "a dog"), seen):
        pass
    assert seen.said == target

    other = replace(forced, solved=replace(forced.solved, model="another"))
    with pytest.raises(ExplorerError, match="solved for another"):
        open_forced(other.save(tmp_path / "other.safetensors"), lm)
    (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ExplorerError, match="cut off"):
        open_forced(tmp_path / "cut.safetensors", lm)


def test_a_file_with_other_tensors_than_its_description_is_refused(lm, tmp_path):
    forced = force(lm, target=tiny_ids(3, seed=3).tolist(), prompt="the cat sat on")
    layers = forced.solved.prefix.layers
    for odd in (
        layers[:-1],
        tuple(replace(one, key=one.key[..., :-1], value=one.value[..., :-1]) for one in layers),
        tuple(replace(one, value=one.value * torch.nan) for one in layers),
    ):
        solved = replace(forced.solved, prefix=Prefix(odd))
        file = replace(forced, solved=solved).save(tmp_path / "odd.safetensors")
        with pytest.raises(ExplorerError, match=r"slots in odd\.safetensors"):
            open_forced(file, lm)


def test_a_wide_margin_holds_when_the_text_is_sampled(smollm2):
    """At temperature 1 a lead of 2 logits loses now and then; a lead of 25 does not."""
    asked = dict(target="The answer is 42.", prompt="Who are you?", temperature=1.0)
    narrow = force(smollm2, **asked)
    wide = force(smollm2, **asked, margin=25.0)
    assert narrow.proof.probability < 0.9
    assert wide.proof.probability > 0.999
    assert wide.sampled == wide.target_text


def test_beams_and_batches_say_it_too(smollm2):
    forced = force(smollm2, target="The answer is 42.", prompt="Who are you?", margin=25.0)
    ids = text.encode(smollm2, "Who are you?").repeat(2, 1)
    n = len(forced.target)
    with forced.applied(smollm2):
        said = smollm2.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=3,
            max_new_tokens=n,
            min_new_tokens=n,
        )
    for row in said[:, ids.shape[1] :].tolist():
        assert tuple(row) == forced.target


def test_a_recorded_row_keeps_no_more_than_itself(lm):
    """A view of one row would hold the queries of a whole text, once for every ending."""
    found = record(lm, tiny_ids(1, 60), [9])
    for tensor in (*found.query, *found.output):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_tokens_with_equal_output_weights_are_refused_with_the_reason():
    model = tiny_model("llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[31] = model.lm_head.weight[17]
        model.lm_head.weight[40] = -model.lm_head.weight[17]  # near in no way
    lm = freeze(model, tiny_tokenizer())
    assert indistinct(lm) == {17, 31}
    for twin in (17, 31):
        with pytest.raises(ExplorerError, match=f"cannot tell token {twin} "):
            force(lm, target=[20, twin, 21], prompt="the cat sat")
    assert force(lm, target=[20, 40, 21], prompt="the cat sat").proof.forced
