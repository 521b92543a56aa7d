"""The layout: every element has one owner, cuts are aligned, padding is bounded, shards move between worlds."""

import doctest
import math
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.partition import layout as layout_module
from shardwise.partition.layout import (
    ALIGN_BYTES,
    Cut,
    GroupRun,
    Layout,
    Piece,
    Span,
    TensorSpec,
    relayout,
    relayout_units,
)

WORLDS = st.integers(1, 9)
ITEMSIZES = st.sampled_from([1, 2, 4, 8])
CUTS = st.sampled_from(Cut)
SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@st.composite
def spec_lists(draw, max_size=12):
    shapes = draw(st.lists(SHAPES, max_size=max_size))
    groups = draw(st.lists(st.integers(0, 3), min_size=len(shapes), max_size=len(shapes)))
    return [
        TensorSpec(f"t{index}", shape, group) for index, (shape, group) in enumerate(zip(shapes, groups, strict=True))
    ]


def values(specs):
    """Distinct values for every element of every tensor, so that a misplaced element shows."""
    offsets = np.cumsum([0] + [spec.numel for spec in specs])
    return {spec.name: np.arange(start, start + spec.numel) for spec, start in zip(specs, offsets[:-1], strict=True)}


def scatter(layout, tensors):
    """The shards, written by `pieces` into buffers of -1; padding stays -1."""
    shards = [np.full(layout.shard_numel, -1) for _ in range(layout.world_size)]
    for rank, shard in enumerate(shards):
        for piece in layout.pieces(rank):
            shard[piece.shard.slice] = tensors[piece.name][piece.tensor.slice]
    return shards


def assert_tensors(layout, shards, tensors):
    """The tensors, read by `slots` from the concatenation of the shards: the way a gather sees them."""
    flat = np.concatenate(shards)
    for slot in layout.slots:
        np.testing.assert_array_equal(flat[slot.span.slice], tensors[slot.spec.name])


@given(spec_lists(), WORLDS, ITEMSIZES, CUTS)
def test_every_element_is_owned_exactly_once(specs, world_size, itemsize, cut):
    layout = Layout.build(specs, world_size, itemsize, cut)
    owned = {spec.name: np.zeros(spec.numel, dtype=int) for spec in specs}
    for rank in range(world_size):
        taken = np.zeros(layout.shard_numel, dtype=int)
        for piece in layout.pieces(rank):
            assert piece.tensor.numel == piece.shard.numel > 0
            owned[piece.name][piece.tensor.slice] += 1
            taken[piece.shard.slice] += 1
        assert taken.max(initial=0) <= 1
    assert all((count == 1).all() for count in owned.values())
    assert sorted(slot.spec.name for slot in layout.slots) == sorted(owned)
    assert layout.used_numel == sum(count.size for count in owned.values())


@given(spec_lists(), WORLDS, ITEMSIZES, CUTS)
def test_scatter_then_gather_gives_the_tensors_back(specs, world_size, itemsize, cut):
    layout, tensors = Layout.build(specs, world_size, itemsize, cut), values(specs)
    shards = scatter(layout, tensors)
    assert_tensors(layout, shards, tensors)
    assert sum((shard == -1).sum() for shard in shards) == layout.padding_numel


@given(spec_lists(), WORLDS, CUTS, st.data())
def test_owner_is_the_inverse_of_pieces(specs, world_size, cut, data):
    layout, tensors = Layout.build(specs, world_size, 2, cut), values(specs)
    shards = scatter(layout, tensors)
    for spec in filter(lambda spec: spec.numel, specs):
        index = data.draw(st.integers(0, spec.numel - 1))
        rank, position = layout.owner(spec.name, index)
        assert shards[rank][position] == tensors[spec.name][index]
    for spec in specs:
        for outside in (-1, spec.numel):
            with pytest.raises(IndexError, match=spec.name):
                layout.owner(spec.name, outside)


@given(spec_lists(), WORLDS, ITEMSIZES, CUTS)
def test_tensors_groups_and_shards_start_on_the_boundary(specs, world_size, itemsize, cut):
    layout = Layout.build(specs, world_size, itemsize, cut)
    starts = [slot.span.start for slot in layout.slots]
    starts += [layout.shard(rank).start for rank in range(world_size)]
    starts += [run.shard.start for rank in range(world_size) for run in layout.groups(rank)]
    starts.append(layout.numel)
    assert all(start * itemsize % ALIGN_BYTES == 0 for start in starts)


@given(spec_lists(), WORLDS, ITEMSIZES)
def test_padding_of_the_element_cut_is_bounded(specs, world_size, itemsize):
    layout = Layout.build(specs, world_size, itemsize)
    assert 0 <= layout.padding_numel * itemsize < ALIGN_BYTES * (world_size + len(specs))


@given(spec_lists(), WORLDS, ITEMSIZES, CUTS)
def test_groups_cover_each_shard_and_hold_their_own_tensors(specs, world_size, itemsize, cut):
    layout = Layout.build(specs, world_size, itemsize, cut)
    group_of = {spec.name: spec.group for spec in specs}
    for rank in range(world_size):
        runs = layout.groups(rank)
        bounds = [0, *(run.shard.stop for run in runs)]
        assert [run.shard.start for run in runs] == bounds[:-1]
        assert bounds[-1] == layout.shard_numel
        assert all(run.shard for run in runs)
        assert [run.group for run in runs] == sorted({run.group for run in runs})
        for piece in layout.pieces(rank):
            (run,) = (run for run in runs if run.shard.intersect(piece.shard))
            assert run.group == group_of[piece.name]
            assert run.shard.intersect(piece.shard) == piece.shard


@given(spec_lists(), WORLDS)
def test_specs_keep_their_order_inside_a_group(specs, world_size):
    layout = Layout.build(specs, world_size, 2)
    expected = [spec for group in range(4) for spec in specs if spec.group == group]
    assert [slot.spec for slot in layout.slots] == expected


@given(spec_lists(), WORLDS)
def test_tensor_cut_keeps_tensors_whole_and_owners_balanced(specs, world_size):
    layout = Layout.build(specs, world_size, 4, Cut.TENSOR)
    pieces = [piece for rank in range(world_size) for piece in layout.pieces(rank)]
    assert sorted(piece.name for piece in pieces) == sorted(spec.name for spec in specs if spec.numel)
    sizes = [-(-spec.numel // 32) * 32 for spec in specs]
    # What greedy assignment promises: nobody is more than one tensor above the mean.
    assert layout.shard_numel <= Fraction(sum(sizes), world_size) + max(sizes, default=0)
    assert layout.shard_numel >= max(sizes, default=0)


def test_tensor_cut_gives_the_largest_first_to_the_least_loaded():
    specs = [TensorSpec(name, (size,)) for name, size in [("a", 64), ("b", 96), ("c", 160), ("d", 32), ("e", 0)]]
    layout = Layout.build(specs, 2, 4, Cut.TENSOR)
    assert [[piece.name for piece in layout.pieces(rank)] for rank in (0, 1)] == [["c", "d"], ["a", "b"]]
    assert layout.shard_numel == 192


@given(spec_lists(), WORLDS, st.sets(st.integers(0, 2)))
def test_optimizers_get_whole_tensors_in_their_shape_and_flat_runs_of_the_rest(specs, world_size, whole):
    specs = [TensorSpec(spec.name, spec.shape, spec.group, spec.group in whole) for spec in specs]
    layout = Layout.build(specs, world_size, 4, Cut.TENSOR)
    owned = [layout.updates(rank) for rank in range(world_size)]
    for updates in ([update for rank in owned for update in rank], layout.updates(None)):
        shapes = sorted(update.shape for update in updates if update.group in whole)
        assert shapes == sorted(spec.shape for spec in specs if spec.whole and spec.numel)
    for rank, updates in enumerate(owned):
        assert [update for update in updates if update.group not in whole] == [
            run for run in layout.groups(rank) if run.group not in whole
        ]
        tensors = {piece.shard: piece.tensor for piece in layout.pieces(rank)}
        for update in updates:
            assert update.shape is None or tensors[update.shard].numel == math.prod(update.shape)


def test_a_tensor_that_stays_whole_needs_cuts_between_tensors_and_a_group_alike():
    whole = TensorSpec("w", (4, 4), 0, whole=True)
    with pytest.raises(ValueError, match="'w' is to stay whole"):
        Layout.build([whole], 2, 4)
    with pytest.raises(ValueError, match="'w' is to stay whole"):
        Layout.build([whole, TensorSpec("v", (4,), 0)], 2, 4, Cut.TENSOR)


@given(spec_lists(), spec_lists(max_size=3), WORLDS, WORLDS, ITEMSIZES, ITEMSIZES, CUTS, CUTS, st.randoms())
def test_relayout_moves_every_element_between_any_two_layouts(
    specs, extra, old_world, new_world, old_itemsize, new_itemsize, old_cut, new_cut, random
):
    only_old = [TensorSpec(f"old.{spec.name}", spec.shape, spec.group) for spec in extra]
    old = Layout.build(specs + only_old, old_world, old_itemsize, old_cut)
    regrouped = [TensorSpec(spec.name, spec.shape, random.randrange(3)) for spec in specs]
    random.shuffle(regrouped)
    new, tensors = Layout.build(regrouped, new_world, new_itemsize, new_cut), values(specs + only_old)
    sources = scatter(old, tensors)
    targets = [np.full(new.shard_numel, -1) for _ in range(new_world)]
    for rank, target in enumerate(targets):
        for read in relayout(old, new, rank):
            target[read.target.slice] = sources[read.source_rank][read.source.slice]
    for moved, expected in zip(targets, scatter(new, tensors), strict=True):
        np.testing.assert_array_equal(moved, expected)


@given(st.lists(spec_lists(max_size=5), min_size=1, max_size=4), WORLDS, WORLDS, st.randoms())
def test_relayout_follows_tensors_into_other_units(units, old_world, new_world, random):
    named = [[TensorSpec(f"u{n}.{s.name}", s.shape, s.group) for s in unit] for n, unit in enumerate(units)]
    specs = [spec for unit in named for spec in unit]
    tensors = values(specs)
    divided = [[], [], []]
    for spec in specs:
        random.choice(divided).append(spec)
    old = [Layout.build(unit, old_world, 2) for unit in named]
    new = [Layout.build(unit, new_world, 4) for unit in divided]
    sources = [scatter(layout, tensors) for layout in old]
    for rank in range(new_world):
        targets = [np.full(layout.shard_numel, -1) for layout in new]
        for read in relayout_units(old, new, rank):
            part = sources[read.source_unit][read.source_rank][read.source.slice]
            targets[read.target_unit][read.target.slice] = part
        for target, layout in zip(targets, new, strict=True):
            np.testing.assert_array_equal(target, scatter(layout, tensors)[rank])


@pytest.mark.parametrize("rank", [0, 1])
def test_relayout_fails_on_all_ranks_alike_when_a_tensor_is_missing_or_reshaped(rank):
    new = Layout.build([TensorSpec("w", (4, 8))], 2, 4)
    with pytest.raises(ValueError, match="'w' is not in the layout"):
        relayout(Layout.build([], 1, 4), new, rank)
    with pytest.raises(ValueError, match=r"shape \(4, 8\), but \(8, 4\)"):
        relayout(Layout.build([TensorSpec("w", (8, 4))], 1, 4), new, rank)


# Bytes per element of what rests replicated and of what rests sharded, from the table of the design.
RESTING_BYTES = {
    "zero0": (16, 0),
    "zero1": (4, 12),
    "zero2": (2, 14),
    "zero3": (0, 14),
    "zero0 K>1": (18, 0),
    "zero1 K>1": (6, 12),
    "zero2 K>1": (2, 16),
    "zero3 K>1": (0, 16),
}


@given(st.lists(spec_lists(), min_size=1, max_size=4), WORLDS, st.sampled_from(sorted(RESTING_BYTES)))
def test_resting_bytes_follow_the_design_within_the_padding_bound(units, world_size, stage):
    replicated_bytes, sharded_bytes = RESTING_BYTES[stage]
    layouts = [Layout.build(specs, world_size, 2) for specs in units]
    held = sum(replicated_bytes * layout.numel + sharded_bytes * layout.shard_numel for layout in layouts)
    elements = sum(spec.numel for specs in units for spec in specs)
    formula = replicated_bytes * elements + Fraction(sharded_bytes * elements, world_size)
    padding_bytes = sum(ALIGN_BYTES * (world_size + len(specs)) for specs in units)
    copies = Fraction(replicated_bytes, 2) + Fraction(sharded_bytes, 2 * world_size)
    assert 0 <= held - formula < copies * padding_bytes


@given(spec_lists(), WORLDS, CUTS)
def test_layouts_are_deterministic_and_comparable(specs, world_size, cut):
    one, two = (Layout.build(list(specs), world_size, 2, cut) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)


@pytest.mark.parametrize("cut", Cut)
def test_nothing_to_pack(cut):
    for specs in ([], [TensorSpec("empty", (0, 7), group=2)]):
        layout = Layout.build(specs, 3, 2, cut)
        assert (layout.numel, layout.shard_numel, layout.padding_numel) == (0, 0, 0)
        assert layout.pieces(2) == layout.groups(2) == ()


def test_scalars_and_more_ranks_than_elements():
    layout = Layout.build([TensorSpec("scale", ()), TensorSpec("bias", (3,), group=1)], 5, 2)
    assert layout.shard_numel == 64
    assert layout.pieces(0) == (Piece("scale", Span(0, 1), Span(0, 1)),)
    assert layout.pieces(1) == (Piece("bias", Span(0, 3), Span(0, 3)),)
    assert [layout.pieces(rank) for rank in (2, 3, 4)] == [()] * 3
    assert layout.groups(4) == (GroupRun(1, Span(0, 64)),)


def test_more_elements_than_32_bits_count():
    layout = Layout.build([TensorSpec("bias", (1,)), TensorSpec("huge", (3, 2**31))], 3, 2)
    last = layout.pieces(2)[-1]
    assert last.tensor.stop == 3 * 2**31
    assert layout.owner("huge", 3 * 2**31 - 1) == (2, last.shard.stop - 1)


def test_an_empty_last_group_leaves_the_padding_to_the_one_before():
    layout = Layout.build([TensorSpec("w", (10,), 0), TensorSpec("none", (0,), 1)], 2, 4)
    assert layout.groups(0) == layout.groups(1) == (GroupRun(0, Span(0, 32)),)


@pytest.mark.parametrize("cut", Cut)
def test_large_units_take_milliseconds(cut):
    specs = [TensorSpec(f"experts.{n}.weight", (n % 7 + 1, 512), group=n % 2) for n in range(2000)]
    start = time.process_time()
    layout = Layout.build(specs, 512, 2, cut)
    for rank in range(512):
        layout.pieces(rank), layout.groups(rank)
    assert time.process_time() - start < 0.25


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 0, 2), "at least one rank, not 0"),
        (([], 1, 3), "3 bytes does not divide"),
        (([], 1, 0), "0 bytes does not divide"),
        (([TensorSpec("w", (1,)), TensorSpec("w", (2,))], 1, 2), "'w' is listed twice"),
        (([TensorSpec("w", (2, -1))], 1, 2), "'w' has a negative size"),
    ],
)
def test_impossible_layouts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Layout.build(*arguments)


@pytest.mark.parametrize("rank", [-1, 2])
def test_ranks_outside_the_world_are_refused(rank):
    with pytest.raises(ValueError, match=f"rank {rank} is outside a world of 2"):
        Layout.build([], 2, 2).pieces(rank)


def test_examples_in_docstrings():
    result = doctest.testmod(layout_module)
    assert result.attempted >= 5
    assert result.failed == 0
