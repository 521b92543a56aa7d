"""The allocator that a detailed plan replays: its rules, and that no byte is in two allocations."""

import random

import pytest

from shardwise.dry_run.allocator import MIB, CachingAllocator


def test_small_and_large_requests_have_pages_of_their_own():
    allocator = CachingAllocator()
    allocator.allocate(1, 100)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(2, 3 * MIB)
    assert allocator.reserved_bytes == 22 * MIB


def test_the_smallest_block_with_room_is_taken_and_the_end_last():
    allocator = CachingAllocator()
    for key, size in enumerate((30, 5, 12, 5, 13)):  # 65 MiB on four pages; the last block has 15 MiB behind it
        allocator.allocate(key, size * MIB)
    allocator.free(0)
    allocator.free(2)
    allocator.allocate(5, 11 * MIB)  # in the 12 of key 2
    allocator.allocate(6, 29 * MIB)  # in the 30 of key 0
    assert allocator.reserved_bytes == 80 * MIB
    allocator.allocate(7, 15 * MIB)
    assert allocator.reserved_bytes == 80 * MIB
    allocator.allocate(8, 2 * MIB)
    assert allocator.reserved_bytes == 100 * MIB


def test_free_neighbours_become_one_block():
    allocator = CachingAllocator()
    for key in range(3):
        allocator.allocate(key, 20 * MIB)
    for key in (0, 2, 1):
        allocator.free(key)
    allocator.allocate(3, 60 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


def test_an_emptied_cache_keeps_the_pages_that_are_in_use():
    allocator = CachingAllocator()
    for key in range(4):
        allocator.allocate(key, 15 * MIB)  # key 1 lies on the first and the second page
    allocator.free(0)
    allocator.free(2)
    allocator.free(3)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    allocator.reset_peak()
    allocator.allocate(4, 15 * MIB)  # before key 1 again
    assert allocator.peak_bytes == 40 * MIB
    allocator.free(1)
    allocator.free(4)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


@pytest.mark.parametrize("seed", range(8))
def test_allocations_never_overlap_and_lie_on_mapped_pages(seed):
    chance = random.Random(seed)
    allocator, live = CachingAllocator(), {}
    for key in range(1500):
        if live and chance.random() < 0.5:
            freed = chance.choice(list(live))
            allocator.free(freed)
            del live[freed]
        elif chance.random() < 0.01:
            allocator.empty_cache()
        else:
            size = int(10 ** chance.uniform(2, 8))
            allocator.allocate(key, size)
            live[key] = size
            pool, block = allocator._live[key]
            for other, (its_pool, its) in allocator._live.items():
                apart = its.start + its.size <= block.start or block.start + block.size <= its.start
                assert other == key or its_pool is not pool or apart
        assert allocator.reserved_bytes >= sum(live.values())
    for key in live:
        allocator.free(key)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
