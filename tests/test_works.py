"""What the page submits, and what comes of it, can go to another process and back."""

from __future__ import annotations

import importlib
import inspect
import io
import pickle
import pkgutil
from functools import partial

import pytest
import torch

from explorer import models, session
from explorer.adapters import Saved
from explorer.errors import ExplorerError
from explorer.forcing import Request
from explorer.jobs import Stop
from explorer.lm import ModelSpec
from explorer.session import Held
from explorer.session.chat import talking
from explorer.session.curves import KINDS, comparing
from explorer.session.force import examining, forcing, opening
from explorer.session.force import trying as replaying
from explorer.session.learn import measuring
from explorer.session.look import finding, looking, pairing, reading
from explorer.session.model import fetching, loading
from explorer.session.order import DataChoice
from explorer.session.runs import Runs
from explorer.session.train import resuming, training
from explorer.session.trial import trying
from explorer.training import named
from explorer.zero_gpu import elsewhere
from tests.test_runs import RUN, ordered
from tests.test_train_app import ROWS
from tests.tiny import tiny_checkpoint

TEXT = "the cat sat on the mat ."
FORCED = Request("where is the cat ?", others=("a dog ran",), target="the red fish ate snow .")


class _Seen(pickle.Pickler):
    """Pickles as pickle does, and notes every tensor on the way."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def reducer_override(self, obj):
        if isinstance(obj, torch.Tensor):
            self.tensors.append(obj)
        return NotImplemented


def there_and_back(value):
    file = io.BytesIO()
    pickler = _Seen(file)
    pickler.dump(value)
    for tensor in pickler.tensors:
        assert tensor.device.type == "cpu"
        assert tensor.is_leaf or not tensor.requires_grad, "its history would go with it"
    return pickle.loads(file.getvalue())


def items(work):
    return [there_and_back(item) for item in there_and_back(work)(Stop())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("works")


@pytest.fixture(scope="module")
def spec(folder):
    return ModelSpec(tiny_checkpoint(folder / "model"), device="cpu")


@pytest.fixture(scope="module")
def runs(folder):
    return Runs(folder / "runs")


@pytest.fixture(scope="module")
def forced(spec):
    return items(forcing(spec, FORCED))[-1]


@pytest.fixture(scope="module")
def trained(folder, spec, runs):
    rows = folder / "rows.csv"
    rows.write_text(f"text,label\n{ROWS}")
    order = runs.start(RUN, spec, ordered(str(rows)))
    return items(training(spec, order, RUN, runs))[-1]


@pytest.fixture(scope="module")
def held(spec, forced, trained):
    lm = models.load(spec)
    found = {
        "solved": Held("solved", solved=forced.forced.solved),
        "prefix": Held("prefix", prefix=forced.forced.solved.prefix),
    }
    for curve in trained.curves:
        found[curve.entry.label] = Held(curve.entry.label, adapter=Saved(curve.file))
    for name in ("zero-gate", "prefix-tuning"):
        method = named(name)
        found[name] = Held(name, adapter=method.build(lm, method.config(), 0))
    return found


@pytest.fixture(scope="module")
def works(folder, spec, runs, forced, trained, held):
    """Every job that the page submits, by the function that makes it."""
    files = [curve.file for curve in trained.curves]
    rows = DataChoice(str(folder / "rows.csv"), shots=2, held_out=4)
    saved = forced.forced.save(folder / "forced.safetensors")
    view = items(looking(spec, TEXT, n_new=2))[-1]
    spare = Runs(folder / "spare")
    order = spare.start(RUN, spec, ordered(str(folder / "rows.csv")))
    return {
        loading: [loading(spec)],
        fetching: [fetching(spec)],
        looking: [
            looking(spec, TEXT, n_new=2, groups={"cat": [1]}),
            *(looking(spec, TEXT, held=one) for one in held.values()),
        ],
        pairing: [pairing(looking(spec, TEXT), looking(spec, TEXT, held=held["solved"]))],
        reading: [reading(view, 3, 1, held["PMT"])],
        finding: [finding(view, "previous token"), finding(view, "most prefix", held["solved"])],
        comparing: [comparing(spec, KINDS[-1], held, longest=32, prompts=1)],
        forcing: [forcing(spec, FORCED)],
        opening: [opening(spec, str(saved))],
        replaying: [replaying(forced, ["a dog ran"])],
        examining: [examining(forced)],
        measuring: [measuring(spec, 1)],
        training: [training(spec, order, RUN, spare)],
        resuming: [resuming(RUN, runs, 9)],
        trying: [trying(spec, files, rows)],
        talking: [talking(spec, TEXT, files, n_new=3)],
    }


def test_the_table_names_every_job_there_is(works):
    made = {
        function
        for info in pkgutil.iter_modules(session.__path__)
        for module in [importlib.import_module(f"explorer.session.{info.name}")]
        for _, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
        and function.__annotations__.get("return") == "Work"
    }
    assert made == set(works)


def test_every_job_is_a_value_and_so_is_all_that_comes_of_it(works):
    for maker, asked in works.items():
        for work in asked:
            assert isinstance(work, partial), maker
            assert items(work) or maker is fetching, maker


def test_whatever_runs_where_a_training_gives_way_it_learns_the_same(works, spec, trained, folder):
    """Not a bit of the losses moves: nobody leaves anything on the model or draws its numbers."""
    short = [work for maker in works if maker not in (training, resuming) for work in works[maker]]
    done = []

    def between(model):
        assert model == spec
        if len(done) < len(short):
            done.append(list(short[len(done)](Stop())))

    runs = Runs(folder / "disturbed")
    order = runs.start(RUN, spec, ordered(str(folder / "rows.csv")))
    disturbed = list(training(spec, order, RUN, runs)(Stop(give_way=between)))[-1]
    assert len(done) == len(short)
    for one, other in zip(disturbed.curves, trained.curves, strict=True):
        assert (one.losses, one.norms, one.after) == (other.losses, other.norms, other.after)


def test_a_job_that_went_through_bytes_comes_to_the_same(works):
    (work,) = works[forcing]
    here = items(work)[-1].forced
    there = list(elsewhere(work, 60)(Stop()))[-1].forced
    assert there.proof.said == here.proof.said and there.proof.forced
    assert there.solved.prefix.layers[0].key.equal(here.solved.prefix.layers[0].key)


def test_what_is_fetched_need_not_be_loaded(spec):
    models.unload()
    assert items(fetching(spec)) == []
    assert models.current() is None
    with pytest.raises(ExplorerError, match="neither a preset"):
        items(fetching(ModelSpec("no such model")))
