"""In how many pieces gradients travel: as few as keep the stages in order, and none too small to be of use."""

import pytest

from shardwise.memory.reduce_plan import (
    GradSizes,
    UpdateSizes,
    choose_reduce_plan,
    exchange_bytes,
    replicated_peak,
    sharded_peak,
    update_batches,
)


def unit(numel, world_size=2, wire_bytes=4, params=2):
    """The gradients of a unit of fp32 parameters, all of one size."""
    row = numel // world_size * wire_bytes
    return GradSizes(
        full=4 * numel,
        rested=4 * numel,
        largest=4 * numel // params,
        held=4 * numel // world_size,
        sent=row * world_size,
        received=row * (world_size - 1),
        shard_numel=numel // world_size,
        block_numel=0 if wire_bytes == 4 else 1 << 15,
    )


@pytest.mark.parametrize("accumulates", [False, True])
def test_many_units_travel_whole(accumulates):
    reduce_plan = choose_reduce_plan([unit(100_000)] * 8, True, accumulates)
    assert reduce_plan.is_whole
    assert reduce_plan.overlap


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("params", [1, 2, 8])
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("numel", [10_000, 100_000, 100_000_000])
def test_a_single_unit_takes_no_more_than_replicated_ones_by_more_than_a_small_piece(
    world_size, params, accumulates, numel
):
    units = [unit(numel, world_size, params=params)]
    reduce_plan = choose_reduce_plan(units, True, accumulates)
    excess = sharded_peak(units, accumulates, reduce_plan) - replicated_peak(units, accumulates)
    assert excess <= max(8 << 10, units[0].full // 512)
    assert reduce_plan.is_whole or exchange_bytes(units[0], reduce_plan) > 4 << 10 or reduce_plan.parts == 4


def test_a_bound_of_the_users_is_kept_however_small():
    one = unit(10_000)
    for bound in (20_000, 1_000):
        assert exchange_bytes(one, choose_reduce_plan([one], True, True, bound)) <= bound


def test_replicated_gradients_travel_whole():
    assert choose_reduce_plan([unit(1000)], False, True).is_whole


def test_small_units_are_updated_together_and_take_no_more_room_than_the_largest_alone():
    small, large = UpdateSizes(numel=10, preparing=40, ready=20), UpdateSizes(numel=100, preparing=400, ready=200)
    units = [large, *[small] * 30, large]
    found = update_batches(units)
    assert [index for portion in found for index in portion] == list(range(32))
    assert len(found) < 8
    for portion in found:
        for index in portion:
            before = sum(units[other].ready for other in range(portion.start, index))
            assert before + units[index].preparing <= 400
        assert sum(units[index].numel for index in portion) <= 200
    assert update_batches([large, large]) == [range(1), range(1, 2)]
    assert update_batches([]) == []


def test_gradients_that_are_updated_where_they_lie_need_no_room():
    in_place = UpdateSizes(numel=10, preparing=0, ready=0)
    assert update_batches([in_place] * 5) == [range(2), range(2, 4), range(4, 5)]
