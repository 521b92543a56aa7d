"""In how many pieces gradients travel: as few as keep the stages in order, and none too small to be of use."""

from dataclasses import replace

import pytest

from shardwise.budget import (
    Flight,
    GradSizes,
    UpdateSizes,
    choose_flight,
    exchange_bytes,
    portions,
    replicated_peak,
    sharded_peak,
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
    flight = choose_flight([unit(100_000)] * 8, True, accumulates)
    assert flight.is_whole
    assert flight.overlap


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("params", [1, 2, 8])
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("numel", [10_000, 100_000, 100_000_000])
def test_a_single_unit_takes_no_more_than_replicated_ones_by_more_than_a_small_piece(
    world_size, params, accumulates, numel
):
    units = [unit(numel, world_size, params=params)]
    flight = choose_flight(units, True, accumulates)
    excess = sharded_peak(units, accumulates, flight) - replicated_peak(units, accumulates)
    assert excess <= max(8 << 10, units[0].full // 512)
    assert flight.is_whole or exchange_bytes(units[0], flight) > 4 << 10 or flight.pieces == 4


def test_a_bound_of_the_users_is_kept_however_small():
    one = unit(10_000)
    for bound in (20_000, 1_000):
        assert exchange_bytes(one, choose_flight([one], True, True, bound)) <= bound


def test_a_bound_holds_for_every_unit_also_where_the_largest_is_lent():
    """Which takes less than a smaller one that is packed."""
    units = [replace(unit(numel), lent_from_bytes=2 << 20) for numel in (950_000, 1_100_000, 950_000)]
    bound = 3 << 20
    flight = choose_flight(units, True, False, bound)
    assert exchange_bytes(units[1], Flight()) <= bound < exchange_bytes(units[0], Flight())
    assert all(exchange_bytes(each, flight) <= bound for each in units)


def test_lent_gradients_take_less():
    """Nothing to send from; but they are there until the others have read them."""
    packed, lent = ([replace(unit(1_000_000), lent_from_bytes=least)] * 4 for least in (None, 1 << 20))
    assert exchange_bytes(packed[0], Flight()) == 6_000_000
    assert exchange_bytes(lent[0], Flight()) == 2_000_000
    assert sharded_peak(lent, False, Flight()) == sharded_peak(packed, False, Flight())
    assert sharded_peak(lent[:1], True, Flight()) == sharded_peak(packed[:1], True, Flight()) - 2_000_000


def test_replicated_gradients_travel_whole():
    assert choose_flight([unit(1000)], False, True).is_whole


def test_small_units_are_updated_together_and_take_no_more_room_than_the_largest_alone():
    small, large = UpdateSizes(numel=10, preparing=40, ready=20), UpdateSizes(numel=100, preparing=400, ready=200)
    units = [large, *[small] * 30, large]
    found = portions(units)
    assert [index for portion in found for index in portion] == list(range(32))
    assert len(found) < 8
    for portion in found:
        for index in portion:
            before = sum(units[other].ready for other in range(portion.start, index))
            assert before + units[index].preparing <= 400
        assert sum(units[index].numel for index in portion) <= 200
    assert portions([large, large]) == [range(1), range(1, 2)]
    assert portions([]) == []


def test_gradients_that_are_updated_where_they_lie_need_no_room():
    in_place = UpdateSizes(numel=10, preparing=0, ready=0)
    assert portions([in_place] * 5) == [range(2), range(2, 4), range(4, 5)]
