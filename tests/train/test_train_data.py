"""The order of samples, which is integers only, by its properties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.train.corpus import TextCorpus, TextFile
from shardwise.train.data import BatchShare, SampleLoader, Windows, samples_at, split, validation_batches

counts = st.integers(1, 3000)
seeds = st.integers(0, 2**40)


@given(counts, seeds, st.integers(0, 5))
def test_an_epoch_has_every_sample_once(count, seed, epoch):
    places = np.arange(epoch * count, (epoch + 1) * count)
    assert sorted(samples_at(places, count, seed).tolist()) == list(range(count))


@given(counts, seeds, st.lists(st.integers(0, 20_000), min_size=1, max_size=30))
def test_a_place_can_be_looked_up_alone(count, seed, places):
    together = samples_at(np.array(places), count, seed).tolist()
    assert together == [int(samples_at(np.array([place]), count, seed)[0]) for place in places]


def test_epochs_and_seeds_have_different_orders_and_neighbours_are_separated():
    count = 5000
    orders = [samples_at(np.arange(count) + epoch * count, count, seed) for epoch in (0, 1) for seed in (0, 1)]
    orders.append(np.arange(count))
    for index, first in enumerate(orders):
        for second in orders[:index]:
            assert (first == second).sum() < 10  # about one in a shuffled row
    follows = (np.diff(orders[0]) == 1).sum()
    assert follows < 10
    assert abs(orders[0][: count // 2].mean() / count - 0.5) < 0.02


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(0, 10**6))
def test_ranks_share_a_step_without_gap_or_overlap(world_size, accumulation, rows, taken):
    batch = world_size * accumulation * rows
    shares = [BatchShare(batch, accumulation, rank, world_size) for rank in range(world_size)]
    seen = [place for micro in range(accumulation) for share in shares for place in share.positions(taken, micro)]
    assert seen == list(range(taken, taken + batch))


def corpus_of(tmp_path, text=bytes(range(1, 255)) * 8):
    (tmp_path / "text").write_bytes(text)
    return TextCorpus([TextFile(tmp_path / "text", "text")])


def global_batches(windows, world_size, accumulation, steps, taken=0, batch=12):
    """The samples of all ranks in each step, and the position after it."""
    loaders = [
        SampleLoader(windows, BatchShare(batch, accumulation, rank, world_size), seed=3) for rank in range(world_size)
    ]
    result = []
    for loader in loaders:
        loader.taken = taken
    for _ in range(steps):
        per_rank = [list(loader.step()) for loader in loaders]
        rows = [row.tolist() for micro in range(accumulation) for rank in per_rank for row in rank[micro]]
        assert len({loader.taken for loader in loaders}) == 1
        result.append((rows, loaders[0].taken))
    return result


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (2, 1), (3, 2), (4, 3), (1, 12), (2, 6)])
def test_global_batches_are_those_of_one_rank(tmp_path, world_size, accumulation):
    windows, _ = split(corpus_of(tmp_path), 16, 0.1)
    assert windows.count < 12 * 15  # so that an epoch ends within
    assert global_batches(windows, world_size, accumulation, 15) == global_batches(windows, 1, 1, 15)


def test_continuing_from_one_integer_at_another_world_size(tmp_path):
    windows, _ = split(corpus_of(tmp_path), 16, 0.1)
    whole = global_batches(windows, 2, 1, 20)
    for step in (1, 7, 13):
        assert global_batches(windows, 3, 2, 20 - step, taken=whole[step - 1][1]) == whole[step:]


def test_a_step_that_was_not_finished_is_not_taken(tmp_path):
    loader = SampleLoader(split(corpus_of(tmp_path), 16, 0.1)[0], BatchShare(8, 2, 0, 1), seed=0)
    next(loader.step())
    assert loader.taken == 0


def test_windows_follow_each_other_and_validation_ones_are_apart(tmp_path):
    corpus = corpus_of(tmp_path)
    train, validation = split(corpus, 16, 0.1)
    rows = train.read(np.arange(train.count))
    assert rows.shape == (train.count, 17)
    assert (rows[1:, 0] == rows[:-1, -1]).all()
    assert validation.first == train.count * 16
    everything = Windows(corpus, 0, (corpus.length - 1) // 16, 16)
    assert train.count + validation.count == everything.count


@pytest.mark.parametrize(("samples", "world_size"), [(1, 2), (7, 3), (10**6, 2), (5, 1)])
def test_validation_takes_as_many_forwards_on_every_rank(tmp_path, samples, world_size):
    _, windows = split(corpus_of(tmp_path), 16, 0.2)
    shares = [BatchShare(4 * world_size, 1, rank, world_size) for rank in range(world_size)]
    seen = [[batch.tolist() for batch in validation_batches(windows, samples, share)] for share in shares]
    assert len({len(batches) for batches in seen}) == 1
    distinct = {tuple(row) for batches in seen for batch in batches for row in batch}
    assert len(distinct) == min(samples, windows.count)


def test_too_little_text(tmp_path):
    with pytest.raises(ConfigError, match=r"the corpus has 20 token.*at least 33 are needed with a context of 16"):
        split(corpus_of(tmp_path, b"x" * 19), 16, 0.1)
