import numpy as np
import pytest
from hypothesis import given, strategies as st

from recipes.data.batches import Batches, train_batches, validation_batches
from recipes.data.config import DataConfig
from recipes.data.sequences import Packed, in_order, segments
from tests.recipes.corpora import corpus, counting, documents
from zoo.checks import ConfigError

SYNTHETIC = DataConfig(source="synthetic", seed=5)
KNOWN_ORDER = [7, 9, 6, 5, 2, 3, 10, 0, 8, 4, 1]


def train(config: DataConfig = DataConfig(), num_tokens: int = 200, sequence_length: int = 7) -> Batches:
    data = corpus(counting(num_tokens), counting(100))
    return train_batches(config, data, sequence_length=sequence_length, vocab_size=256)


def validation(config: DataConfig = DataConfig(), sequence_length: int = 7) -> Batches:
    data = corpus(counting(200), counting(100))
    return validation_batches(config, data, sequence_length=sequence_length, vocab_size=256)


@pytest.mark.parametrize("batches", [train(), validation(), train(SYNTHETIC), validation(SYNTHETIC)])
@given(cursor=st.integers(0, 500), first=st.integers(1, 60), second=st.integers(1, 60))
def test_sequences_depend_on_their_position_only(batches, cursor, first, second):
    whole = batches.batch(cursor, first + second)["tokens"]
    parts = [batches.batch(cursor, first)["tokens"], batches.batch(cursor + first, second)["tokens"]]
    assert whole.dtype == np.int32
    assert whole.shape == (first + second, 8)
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    np.testing.assert_array_equal(whole[-1], batches.sequence(cursor + first + second - 1))


@given(num_tokens=st.integers(8, 250), epoch=st.integers(0, 5), seed=st.integers(0, 2**40))
def test_an_epoch_visits_each_sequence_once(num_tokens, epoch, seed):
    batches = train(DataConfig(seed=seed), num_tokens)
    size = (num_tokens - 1) // 7
    assert batches.num_sequences == size
    starts = batches.batch(epoch * size, size)["tokens"][:, 0]
    np.testing.assert_array_equal(np.sort(starts), 7 * np.arange(size))


def test_consecutive_sequences_overlap_by_one_token():
    tokens = validation().batch(0, 14)["tokens"]
    np.testing.assert_array_equal(tokens, 7 * np.arange(14)[:, None] + np.arange(8))


def test_every_token_but_the_first_is_a_target_once():
    targets = train(num_tokens=7 * 20 + 1).batch(0, 20)["tokens"][:, 1:]
    np.testing.assert_array_equal(np.sort(targets.ravel()), np.arange(1, 141))


def test_validation_is_in_order_and_starts_again():
    batches = validation()
    assert batches.num_sequences == 14
    np.testing.assert_array_equal(batches.batch(14, 14)["tokens"], batches.batch(0, 14)["tokens"])


def test_epochs_and_seeds_have_orders_of_their_own():
    starts = [train(DataConfig(seed=seed)).batch(cursor, 28)["tokens"][:, 0] for seed in (0, 1) for cursor in (0, 28)]
    assert len({tuple(order) for order in starts}) == 4


def test_order_is_the_same_on_every_machine():
    order = np.random.default_rng([7, 2]).permutation(28)
    starts = train(DataConfig(seed=7)).batch(2 * 28, 28)["tokens"][:, 0]
    np.testing.assert_array_equal(starts, 7 * order)


def test_synthetic_is_drawn_from_seed_and_position():
    expected = np.random.default_rng([5, 9]).integers(256, size=8, dtype=np.int32)
    np.testing.assert_array_equal(train(SYNTHETIC).sequence(9), expected)
    assert train(SYNTHETIC).num_sequences is None


def test_synthetic_stays_in_the_vocabulary():
    data = corpus(documents(), documents())
    tokens = train_batches(SYNTHETIC, data, sequence_length=100, vocab_size=3).batch(0, 10)["tokens"]
    np.testing.assert_array_equal(np.unique(tokens), [0, 1, 2])


def test_synthetic_validation_is_another_stream():
    first, second = train(SYNTHETIC).batch(0, 50)["tokens"], validation(SYNTHETIC).batch(0, 50)["tokens"]
    assert not {tuple(row) for row in first} & {tuple(row) for row in second}
    beyond = train(SYNTHETIC).sequence(2**32 + 1)
    assert not np.array_equal(beyond, validation(SYNTHETIC).sequence(1))


def test_documents_of_known_tokens():
    """Boundaries are those of documents, whatever tokens these hold."""
    packed = Packed(documents=documents([5], [6, 0], [0], [8, 9, 7]), sequence_length=6, seed=None)
    found = packed.read(np.array([0]))
    np.testing.assert_array_equal(found["tokens"], [[5, 0, 6, 0, 0, 0, 0]])
    np.testing.assert_array_equal(found["segment_ids"], [[1, 1, 2, 2, 2, 3, 3]])
    np.testing.assert_array_equal(found["positions"], [[0, 1, 0, 1, 2, 0, 1]])
    np.testing.assert_array_equal(found["loss_mask"], np.ones((1, 7)))


@given(
    texts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), min_size=3, max_size=20),
    length=st.integers(1, 5),
)
def test_packed_sequences_are_cut_from_the_documents(texts, length):
    packed = Packed(documents=documents(*texts), sequence_length=length, seed=None)
    stream = np.array([token for text in texts for token in (*text, 0)])
    found = packed.read(np.arange(packed.num_sequences))
    assert packed.num_sequences == (len(stream) - 1) // length
    for number, row in enumerate(found["tokens"]):
        np.testing.assert_array_equal(row, stream[number * length : (number + 1) * length + 1])
    expected = segments(found["tokens"])
    assert {array.dtype for array in found.values()} == {np.dtype(np.int32)}
    for name in ("segment_ids", "positions"):
        np.testing.assert_array_equal(found[name], expected[name])


@given(st.lists(st.lists(st.integers(0, 3), min_size=9, max_size=9), min_size=1, max_size=4))
def test_segments_count_separators_before_each_token(rows):
    tokens = np.array(rows, np.int32)
    found = segments(tokens)
    assert found["segment_ids"].dtype == found["positions"].dtype == np.int32
    for row, ids, positions in zip(rows, found["segment_ids"], found["positions"], strict=True):
        for index in range(len(row)):
            before = row[:index]
            assert ids[index] == 1 + before.count(0)
            assert positions[index] == (before[::-1].index(0) if 0 in before else index)


@pytest.mark.parametrize("make", [train, validation])
def test_document_mask_adds_documents(make):
    plain, masked = make().batch(3, 4), make(DataConfig(document_mask=True)).batch(3, 4)
    assert set(plain) == {"tokens"}
    assert set(masked) == {"tokens", "segment_ids", "positions"}
    np.testing.assert_array_equal(plain["tokens"], masked["tokens"])
    np.testing.assert_array_equal(masked["segment_ids"], np.ones((4, 8)))


def test_long_epochs_are_permutations_too(monkeypatch):
    """Above some size an epoch's order is computed place by place: by grain's rule, which no version may change."""
    monkeypatch.setattr("recipes.data.sequences.DRAWN_WHOLE", 10)
    orders = [in_order(np.arange(size) + size * epoch, size, 3).tolist() for size in (11, 100) for epoch in (0, 1)]
    assert [sorted(order) for order in orders] == [list(range(11))] * 2 + [list(range(100))] * 2
    assert orders[2] != orders[3]
    assert orders[0] == KNOWN_ORDER


def test_one_token_more_than_a_sequence_is_enough():
    assert train(num_tokens=8).num_sequences == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (train_batches, "training text has 7 tokens"),
        (validation_batches, r"validation text has 7 tokens(.|\n)*data\.v"),
    ],
)
def test_too_short_a_corpus_is_an_error(make, message):
    with pytest.raises(ConfigError, match=rf"train\.sequence_length=7: the {message}"):
        make(DataConfig(), corpus(counting(7), counting(7)), sequence_length=7, vocab_size=256)


@pytest.mark.parametrize("config", [DataConfig(), SYNTHETIC])
@pytest.mark.parametrize("make", [train, validation])
@pytest.mark.parametrize("size", [0, -1])
def test_sizes_must_be_above_zero(config, make, size):
    with pytest.raises(ConfigError, match=rf"train\.sequence_length={size}"):
        make(config, sequence_length=size)
    with pytest.raises(ConfigError, match=rf"train\.batch_size={size}"):
        make(config).batch(0, size)


def test_cursor_must_not_be_negative():
    with pytest.raises(ValueError, match="cursor=-1"):
        train().batch(-1, 2)
