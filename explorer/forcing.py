"""Force a text: find a trajectory, solve a prefix for it, and prove by replay that it works.

    forced = force(lm, target="Whatever you ask, this is the answer.", prompt="Who are you?")
    forced.proof.forced, forced.text

`forced` is only ever said after free greedy decoding by the model with the prefix applied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from explorer import generate, tensorfile, text
from explorer.errors import ExplorerError
from explorer.lm import LoadedModel
from explorer.methods.attention_matching import Keys, Matching, Solved, solve
from explorer.positions import rotary_layers
from explorer.prefix import Prefix, Slots
from explorer.replay import Found, Proof, Replay, placed, replay
from explorer.trajectory import Repair, Trajectory, joined, record, repair

FORMAT = "prefix-explorer forced prefix 1"


@dataclass(frozen=True)
class Request:
    """What shall be said, and how the prefix is found.

    prompt: what the model will be asked    others: further prompts the same prefix shall serve
    source: a prompt after which it says the target
    target: the text to say, or its ids; None takes what the model says after the source
    tokens: how much of that, in tokens    keys, attn_lim, repeat: see attention_matching.Matching
    match_endings: also solve step 1 for every prompt's own last token, where the source ends
                   otherwise (ours; the paper needs equal endings)
    margin: logits by which each token must lead; None chooses by precision and origin, 0 repairs
            nothing
    layers, steps, rate: see trajectory.Repair
    go_on: tokens the model may write afterwards, without the prefix
    temperature, top_p, seed: of one more decoding, sampled, where the temperature is above 0
    chat: prompt and source go through the chat template    specials: control tokens in texts count
    """

    prompt: str
    others: tuple[str, ...] = ()
    source: str | None = None
    target: str | Sequence[int] | None = None
    tokens: int = 10
    keys: Keys = "kernel"
    attn_lim: float = 20.0
    repeat: int = 1
    match_endings: bool = True
    margin: float | None = None
    layers: int = 4
    steps: int = 300
    rate: float = 0.05
    go_on: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    chat: bool = False
    specials: bool = False

    def __post_init__(self):
        # What means nothing is refused here, before anything has been computed for it.
        Matching(self.keys, self.attn_lim, self.repeat)
        generate.Sampling(self.temperature, self.top_p, self.seed)
        least = {"layers": 1, "steps": 0, "go_on": 0, "rate": 0.0}
        for name, low in least.items():
            if not getattr(self, name) >= low:
                raise ExplorerError(
                    f"{name} is {getattr(self, name)}.", f"It must be a number from {low} on."
                )
        if self.margin is not None and math.isnan(self.margin):
            raise ExplorerError("The margin is not a number.", "Leave it out, or choose 2.")
        if isinstance(self.others, str):
            raise ExplorerError("Further prompts are a list.", "Write others=[…].")


@dataclass(frozen=True)
class ForcedPrefix:
    """A solved prefix, the prompt it was proved on, and the proof.

    text: what the model said with it    plain_text: what it says without
    after: what it wrote afterwards, if it was let    sampled: what it said when sampled, or None
    """

    request: Request
    solved: Solved
    target: tuple[int, ...]
    target_text: str
    proof: Proof
    text: str
    plain_text: str
    after: str = ""
    sampled: str | None = None

    def save(self, path: str | Path) -> Path:
        """Write slots and proof as safetensors with readable metadata; see `open_forced`."""
        tensors = {
            f"{layer}.{name}": tensor.contiguous()
            for layer, slots in enumerate(self.solved.prefix.layers)
            for name in ("key", "value", "bias")
            if (tensor := getattr(slots, name)) is not None
        }
        found = self.solved.found
        if found is not None:
            for layer, (output, loudness) in enumerate(
                zip(found.output, found.loudness, strict=True)
            ):
                tensors[f"{layer}.output"] = output.contiguous()
                tensors[f"{layer}.loudness"] = loudness.contiguous()
            tensors["gap"] = found.gap
            found = replace(found, output=(), loudness=(), gap=None)
        bare = replace(self, solved=replace(self.solved, prefix=None, found=found))
        kept = asdict(bare)
        card = {"format": FORMAT, "card": json.dumps(kept, ensure_ascii=False)}
        return tensorfile.write(path, tensors, card)

    def applied(self, lm: LoadedModel, length: int | None = None) -> AbstractContextManager[None]:
        """Apply it for prompts of `length` tokens; the proved prompt's length where it is None."""
        if length is None:
            length = prompt_ids(lm, self.request).shape[1]
        return placed(lm, self.solved, length)[0].applied(lm)


@dataclass(frozen=True)
class Stage:
    """How far a forcing is: shown live, and empty of tensors.

    doing: which part is running    detail: in words    fraction: 0–1 or None
    without, with_prefix: texts so far    result: at the very end
    """

    doing: Literal["trajectory", "solve", "without", "with", "done"]
    detail: str
    fraction: float | None = None
    without: str = ""
    with_prefix: str = ""
    result: ForcedPrefix | None = None


def force(lm: LoadedModel, **request) -> ForcedPrefix:
    """Solve a prefix and prove it; the keywords are those of `Request`.

    Raises ExplorerError for inputs that cannot be forced (empty, too long, outside the
    vocabulary, not what the source says when nothing may be repaired).
    """
    for stage in pursue(lm, Request(**request)):
        last = stage
    return last.result


def pursue(lm: LoadedModel, request: Request) -> Iterator[Stage]:
    """The same in steps, for a page: yields after each, and can be closed after each."""
    ids = prompt_ids(lm, request)
    yield Stage("trajectory", "Reading what has to be said")
    trajectory = None
    for trajectory in find_trajectory(lm, request, ids):
        led = int((trajectory.gap >= margin_of(lm, request)).sum())
        total = len(trajectory.gap)
        detail = f"{led} of {total} tokens lead after {trajectory.repairs} repair steps"
        yield Stage("trajectory", detail, led / total)
    if led < total:
        stalled = f"The repair ended with {total - led} of {total} tokens short of the margin"
        yield Stage("trajectory", stalled, led / total)
    yield Stage("solve", f"Solving for {len(trajectory.gap)} steps in every head")
    solved = solve(lm, trajectory, Matching(request.keys, request.attn_lim, request.repeat))
    found = Found(
        trajectory.target, trajectory.repairs, trajectory.repaired_layers, trajectory.seconds
    )
    yield from _replayed(lm, request, solved, found)


def prove(lm: LoadedModel, forced: ForcedPrefix) -> Iterator[Stage]:
    """Replay a prefix that was solved before on its prompt; the last stage has the new proof."""
    old = forced.proof
    found = Found(forced.target, old.repairs, old.repaired_layers, old.seconds["trajectory"])
    yield from _replayed(lm, forced.request, forced.solved, found)


def _replayed(lm: LoadedModel, request: Request, solved: Solved, found: Found) -> Iterator[Stage]:
    ids = prompt_ids(lm, request)
    target, n = found.target, len(found.target)
    plain: list[int] = []
    ends = generate.stop_tokens(lm)
    for step in generate.stream(lm, ids, n, stop_ids=ends):
        if step.id not in ends:
            plain.append(step.id)
        without = text.decode(lm.tokenizer, plain)
        yield Stage("without", "Decoding without the prefix", len(plain) / n, without)
    without = text.decode(lm.tokenizer, plain)
    seen = Replay(target)
    for _ in replay(lm, solved, ids, seen, go_on=request.go_on):
        said = text.decode(lm.tokenizer, seen.said)
        fraction = len(seen.said) / (n + request.go_on)
        yield Stage("with", "Decoding with the prefix", fraction, without, said)
    sampled = None
    if request.temperature > 0:
        chance = Replay(target)
        sampling = generate.Sampling(request.temperature, request.top_p, request.seed)
        for _ in replay(lm, solved, ids, chance, sampling=sampling):
            yield Stage("with", "Decoding once more, sampled", None, without, said)
        sampled = text.decode(lm.tokenizer, chance.said)
    said, target_text = (text.decode(lm.tokenizer, some) for some in (seen.said[:n], target))
    forced = ForcedPrefix(
        request,
        solved,
        target,
        target_text,
        seen.proof(solved, found, said == target_text),
        said,
        without,
        text.decode(lm.tokenizer, seen.after),
        sampled,
    )
    verdict = "Proved by replay" if forced.proof.forced else "Not forced: the replay differs"
    yield Stage("done", verdict, 1.0, without, said, forced)


def prompt_ids(lm: LoadedModel, request: Request) -> Tensor:
    """The ids of the prompt that is asked. → (1, n)"""
    return text.encode(lm, request.prompt, chat=request.chat, specials=request.specials)


def margin_of(lm: LoadedModel, request: Request) -> float:
    """The lead every token must have.

    A replay repeats the trajectory up to rounding. In float32 that is below 0.01 logits, so what
    a source says needs no repair; half precision and quantised weights round by up to a logit.
    """
    if request.margin is not None:
        return request.margin
    exact = lm.dtype == torch.float32 and lm.spec.quantization == "none"
    if request.keys == "aligned" and request.target is None:
        return 0.0  # the paper's own procedure
    if request.target is None:
        return 0.05 if exact else 2.0
    return 2.0 if exact else 4.0


def find_trajectory(
    lm: LoadedModel, request: Request, ids: Tensor, others: Sequence[Tensor] = ()
) -> Iterator[Trajectory]:
    """Record, add the prompts' own endings, repair. Yields as it goes; the last is the result.

    ids: (1, n) the prompt    others: further prompts as ids, beside those of the request
    """
    source = ids
    if request.source is not None:
        source = text.encode(lm, request.source, chat=request.chat, specials=request.specials)
    target = _target(lm, request, source)
    said = request.target is None  # the model's own choice is no question any more
    if not said and (twins := [i for i in target if i in generate.indistinct(lm)]):
        raise ExplorerError(
            f"The model cannot tell token {twins[0]} ({text.decode(lm.tokenizer, twins[:1])}) from "
            "another: their output weights are equal.",
            "Leave it out of the target.",
        )
    written = (prompt_ids(lm, replace(request, prompt=one)) for one in request.others)
    prompts = [ids, *others, *written]
    longest = max(one.shape[1] for one in prompts)
    length = max(longest, source.shape[1]) + len(target)
    if length > lm.geometry.context:
        raise ExplorerError(
            f"Prompt and target together are {length:,} tokens; this model reads "
            f"{lm.geometry.context:,}.",
            "Shorten the target.",
        )
    # Slots of a model with learned positions cannot be moved: place them late enough for the
    # prompt, whose own positions are then shifted to end where they stand.
    learned = not rotary_layers(lm)
    start = max(0, longest - source.shape[1]) if learned else 0
    found = record(lm, source, target, start)
    margin = margin_of(lm, request)
    # Where nothing may be repaired no step can be made for another ending: what the model would
    # say from there is another text.
    if request.match_endings and margin > 0:
        endings = dict.fromkeys(int(one[0, -1]) for one in prompts)
        endings.pop(int(source[0, -1]), None)
        before = source[:, :-1].cpu()
        others = [
            record(lm, torch.cat([before, torch.tensor([[ending]])], 1), target[:1], start)
            for ending in endings
        ]
        found = joined([found, *others])
    if margin <= 0 and float(found.gap.min()) < 0:
        miss = found.step[int((found.gap < 0).nonzero()[0])]
        raise ExplorerError(
            f"After this source the model does not say the target: token {miss + 1} differs.",
            "Let it be repaired (margin above 0), or take what the model says.",
        )
    how = Repair(margin, request.layers, request.steps, request.rate)
    yield from repair(lm, found, how)


def _target(lm: LoadedModel, request: Request, source: Tensor) -> tuple[int, ...]:
    vocabulary = lm.geometry.vocab_size
    if request.target is None:
        if request.source is None:
            raise ExplorerError(
                "Nothing to say: there is neither a target nor a source prompt.",
                "Write the text the model shall say, or a prompt whose answer it shall be.",
            )
        if request.tokens < 1:
            raise ExplorerError("The target has no token.", "Ask for at least one.")
        return tuple(step.id for step in generate.stream(lm, source, request.tokens))
    if isinstance(request.target, str):
        written = text.plain(lm.tokenizer, request.target, specials=request.specials)
        if not written:  # blank ones too, where a tokenizer drops blanks
            raise ExplorerError("The target is empty.", "Write the text the model shall say.")
        return tuple(written)
    target = tuple(int(i) for i in request.target)
    if not target:
        raise ExplorerError("The target is empty.", "Give at least one token id.")
    if wrong := [i for i in target if not 0 <= i < vocabulary]:
        raise ExplorerError(
            f"Token id {wrong[0]} is outside the vocabulary.", f"Ids go from 0 to {vocabulary - 1}."
        )
    return target


def _found_in(tensors: dict[str, Tensor], card: dict | None) -> Trajectory | None:
    if card is None:
        return None
    listed = {name: tuple(value) for name, value in card.items() if isinstance(value, list)}
    layers = {
        name: tuple(tensors[f"{layer}.{name}"] for layer in range(len(card["scaling"])))
        for name in ("output", "loudness")
    }
    return Trajectory(**{**card, **listed, **layers, "gap": tensors["gap"]})


def open_forced(path: str | Path, lm: LoadedModel) -> ForcedPrefix:
    """A forced prefix out of a file, for the model it was solved for.

    Raises ExplorerError for a file that is none, is damaged, or is for another model.
    """
    path = Path(path)
    metadata = tensorfile.header(path)["__metadata__"]
    if metadata.get("format") != FORMAT:
        raise ExplorerError(
            f"{path.name} is a safetensors file, but not a forced prefix made here.",
            "Choose a file that the Force place has saved.",
        )
    try:
        card = json.loads(metadata["card"])
        tensors = load_file(path)
        layers = tuple(
            Slots(
                tensors[f"{layer}.key"],
                tensors[f"{layer}.value"],
                tensors.get(f"{layer}.bias"),
                capped=False,
            )
            for layer in range(sum(name.endswith(".key") for name in tensors))
        )
        solved = Solved(
            **{
                **card["solved"],
                **{name: tuple(card["solved"][name]) for name in ("scale", "sizes")},
                "prefix": Prefix(layers),
                "how": Matching(**card["solved"]["how"]),
                "found": _found_in(tensors, card["solved"]["found"]),
            }
        )
        asked = Request(**{**card["request"], "others": tuple(card["request"]["others"])})
        target = tuple(card["target"])
        proof = Proof(**{**card["proof"], "said": tuple(card["proof"]["said"])})
        forced = ForcedPrefix(
            **{**card, "request": asked, "solved": solved, "target": target, "proof": proof}
        )
    except (
        AttributeError,
        ExplorerError,
        KeyError,
        RecursionError,
        TypeError,
        ValueError,
        SafetensorError,
    ) as error:
        raise ExplorerError(
            f"{path.name} does not hold what its description says.",
            "It is damaged, or was made by another version of this program.",
        ) from error
    if solved.sizes != lm.geometry.sizes or solved.model not in (lm.spec.told, lm.spec.name):
        raise ExplorerError(
            f"{path.name} was solved for {solved.model}; the loaded model is {lm.spec.told}.",
            f"Load {solved.model} and open the file again.",
        )
    _check_slots(path.name, solved.prefix, lm)
    return forced


def _check_slots(name: str, prefix: Prefix, lm: LoadedModel) -> None:
    """A file's description may be right and its tensors not."""
    n_layers, _, n_kv, head_dim = lm.geometry.sizes
    whole = len(prefix.layers) == n_layers and all(
        (one.key.shape[0], one.key.shape[2]) == (n_kv, head_dim) == one.value.shape[::2]
        for one in prefix.layers
    )
    tensors = (t for one in prefix.layers for t in (one.key, one.value, one.bias) if t is not None)
    if not whole or not all(torch.isfinite(tensor).all() for tensor in tensors):
        raise ExplorerError(
            f"The slots in {name} do not fit {lm.spec.told}, or are not numbers.",
            "The file is damaged: solve the prefix again.",
        )
