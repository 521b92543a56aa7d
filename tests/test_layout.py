"""The layout: every element has one owner, cuts are aligned, padding is bounded."""

import math
import time
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.partition.layout import ALIGN_BYTES, Cut, GroupRun, Layout, Span, TensorSpec

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


class Piece(NamedTuple):
    """The part of a tensor (in its own flat elements) that a rank owns, and where it lies in the rank's shard."""

    name: str
    tensor: Span
    shard: Span


def pieces(layout, rank):
    """What a rank owns, in the order of its shard: slots and shards intersected one by one."""
    shard = layout.shard(rank)
    owned = ((slot, slot.span.intersect(shard)) for slot in layout.slots)
    return tuple(
        Piece(slot.spec.name, part.shift(-slot.span.start), part.shift(-shard.start)) for slot, part in owned if part
    )


def scatter(layout, tensors):
    """The shards, written by `pieces` into buffers of -1; padding stays -1."""
    shards = [np.full(layout.shard_numel, -1) for _ in range(layout.world_size)]
    for rank, shard in enumerate(shards):
        for piece in pieces(layout, rank):
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
        for piece in pieces(layout, rank):
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
        for piece in pieces(layout, rank):
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
    owned = [piece for rank in range(world_size) for piece in pieces(layout, rank)]
    assert sorted(piece.name for piece in owned) == sorted(spec.name for spec in specs if spec.numel)
    sizes = [-(-spec.numel // 32) * 32 for spec in specs]
    # What greedy assignment promises: no rank is more than one tensor above the mean.
    assert layout.shard_numel <= Fraction(sum(sizes), world_size) + max(sizes, default=0)
    assert layout.shard_numel >= max(sizes, default=0)


def test_tensor_cut_gives_the_largest_first_to_the_least_loaded():
    specs = [TensorSpec(name, (size,)) for name, size in [("a", 64), ("b", 96), ("c", 160), ("d", 32), ("e", 0)]]
    layout = Layout.build(specs, 2, 4, Cut.TENSOR)
    assert [[piece.name for piece in pieces(layout, rank)] for rank in (0, 1)] == [["c", "d"], ["a", "b"]]
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
        tensors = {piece.shard: piece.tensor for piece in pieces(layout, rank)}
        for update in updates:
            assert update.shape is None or tensors[update.shard].numel == math.prod(update.shape)


def test_a_tensor_that_stays_whole_needs_cuts_between_tensors_and_a_group_alike():
    whole = TensorSpec("w", (4, 4), 0, whole=True)
    with pytest.raises(ValueError, match="'w' must stay whole"):
        Layout.build([whole], 2, 4)
    with pytest.raises(ValueError, match="'w' must stay whole"):
        Layout.build([whole, TensorSpec("v", (4,), 0)], 2, 4, Cut.TENSOR)


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
        assert pieces(layout, 2) == layout.groups(2) == ()


def test_scalars_and_more_ranks_than_elements():
    layout = Layout.build([TensorSpec("scale", ()), TensorSpec("bias", (3,), group=1)], 5, 2)
    assert layout.shard_numel == 64
    assert pieces(layout, 0) == (Piece("scale", Span(0, 1), Span(0, 1)),)
    assert pieces(layout, 1) == (Piece("bias", Span(0, 3), Span(0, 3)),)
    assert [pieces(layout, rank) for rank in (2, 3, 4)] == [()] * 3
    assert layout.groups(4) == (GroupRun(1, Span(0, 64)),)


def test_more_elements_than_32_bits_count():
    layout = Layout.build([TensorSpec("bias", (1,)), TensorSpec("huge", (3, 2**31))], 3, 2)
    last = pieces(layout, 2)[-1]
    assert last.tensor.stop == 3 * 2**31
    assert layout.shard(2).start + last.shard.stop == layout.slot("huge").span.stop


def test_an_empty_last_group_leaves_the_padding_to_the_one_before():
    layout = Layout.build([TensorSpec("w", (10,), 0), TensorSpec("none", (0,), 1)], 2, 4)
    assert layout.groups(0) == layout.groups(1) == (GroupRun(0, Span(0, 32)),)


@pytest.mark.parametrize("cut", Cut)
def test_large_units_take_milliseconds(cut):
    specs = [TensorSpec(f"experts.{n}.weight", (n % 7 + 1, 512), group=n % 2) for n in range(2000)]
    start = time.process_time()
    layout = Layout.build(specs, 512, 2, cut)
    for rank in range(512):
        layout.groups(rank), layout.updates(rank)
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
        Layout.build([], 2, 2).shard(rank)
