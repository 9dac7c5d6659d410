"""Batches on their way to the devices: in order, the same by any number of readers, each process its own rows."""

import itertools
import multiprocessing
import threading

import jax
import numpy as np
import pytest
from hydra import compose, initialize_config_module

from recipes import schema
from recipes.data.batches import Batches
from recipes.data.feed import AHEAD, ahead, rows
from recipes.data.mixture import Mixed
from recipes.data.sequences import Packed, Synthetic
from recipes.setup import Setup
from tests.recipes.common import QUICK
from tests.recipes.corpora import counting


@pytest.fixture(scope="module")
def batches() -> Batches:
    """A mixture of two sources in random order."""
    parts = {str(size): Packed(documents=counting(size), sequence_length=8, seed=size) for size in (99, 200)}
    return Batches(sequences=Mixed(sources=parts, weights=(2.0, 1.0)), arrays=("tokens", "loss_mask"))


@pytest.mark.parametrize("readers", [0, 2])  # a reader of grain's takes seconds to start
def test_readers_give_what_one_process_would_read_until_the_run_stops(batches, readers):
    mine = np.array([0, 1, 5])
    with rows(batches, 1000, 10**9, 6, mine, readers) as reading:
        for number in range(7):
            found, whole = next(reading), batches.batch(1000 + 6 * number, 6)
            for name, array in whole.items():
                np.testing.assert_array_equal(found[name], array[mine])
    assert multiprocessing.active_children() == []


def test_there_are_as_many_batches_as_steps(batches):
    with rows(batches, 5, 3, 2, np.arange(2), 0) as reading:
        assert [each["tokens"].tolist() for each in reading] == [
            batches.batch(c, 2)["tokens"].tolist() for c in (5, 7, 9)
        ]


def test_a_run_without_steps_has_no_batches(batches):
    with rows(batches, 5, 0, 2, np.arange(2), 3) as reading, ahead(reading, jax.device_put) as fed:
        assert list(fed) == []


def test_batches_are_put_ahead_of_their_steps():
    asked, done = [], threading.Event()

    def read(count):
        for number in range(count):
            asked.append(number)
            if number == AHEAD:
                done.set()
            yield number

    with ahead(read(10), lambda number: number * 2) as fed:
        assert asked == []
        assert next(fed) == 0
        assert done.wait(10)  # though nobody has asked for it
        assert list(fed) == list(range(2, 20, 2))
    with ahead(read(100), lambda number: number) as fed:
        next(fed)
    assert len(asked) < 100


def test_what_fails_while_reading_ahead_fails_the_step():
    with ahead(iter([1, 0, 1]), lambda number: 1 / number) as fed:
        assert next(fed) == 1
        with pytest.raises(ZeroDivisionError):
            next(fed)


MESHES = {"one device": (), "mesh": ("mesh.replica=2", "mesh.fsdp=2", "mesh.context=2", "train.batch_size=8")}


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_the_devices_together_hold_the_batch(mesh):
    schema.register()
    with initialize_config_module("conf", version_base="1.3"):
        overrides = [*QUICK, "data=synthetic", "data.document_mask=true", "run.dir=x", *mesh]
        setup = Setup(schema.read(compose("config", overrides=overrides)))
    size = setup.config.train.batch_size
    source = Synthetic(vocab_size=256, sequence_length=8, seed=0)
    batches = Batches(sequences=source, arrays=setup.config.data.arrays)
    with setup.feed(batches, 3, 4) as fed:
        for number, batch in enumerate(itertools.islice(fed, 4)):
            whole = batches.batch(3 + number * size, size)
            assert batch.keys() == whole.keys() == setup.abstract_batch().keys()
            for name, abstract in setup.abstract_batch().items():
                np.testing.assert_array_equal(np.asarray(batch[name]), whole[name])
                assert (batch[name].shape, batch[name].dtype) == (abstract.shape, abstract.dtype)
                assert setup.mesh is None or batch[name].sharding == abstract.sharding
    np.testing.assert_array_equal(setup.rows, np.arange(size))
    assert (
        jax.tree.map(np.asarray, setup.batch(batches, 3))["tokens"].tolist()
        == batches.batch(3, size)["tokens"].tolist()
    )
