"""The observers against independent measures: the allocator's events for memory, arithmetic and c10d for the wire."""

import gc
import inspect
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import shardwise.observe.storage
import shardwise.observe.wire
from shardwise.observe import StorageObserver, WireObserver
from support import ranks

KB = 1024


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


class Gpt(nn.Module):
    def __init__(self, width: int = 128, depth: int = 4, recompute: str = "") -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(512, width), nn.Linear(width, 512)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.recompute = recompute

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            reentrant = self.recompute == "reentrant"
            x = checkpoint(block, x, use_reentrant=reentrant) if self.recompute else block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def train(model, optimizer, steps=3):
    for _ in range(steps):
        loss = model(torch.randint(0, 512, (4, 64)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def allocator_peak_bytes(profile) -> int:
    """The peak above the start, from the events of the CPU allocator."""
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


@pytest.mark.parametrize("optimizer", ["fused", "foreach", "single"])
@pytest.mark.parametrize("recompute", ["", "reentrant", "non-reentrant"])
def test_peak_agrees_with_the_allocator(optimizer, recompute):
    model = Gpt(recompute=recompute)
    modes = {"fused": {"fused": True}, "foreach": {"foreach": True}, "single": {"foreach": False}}
    adam = torch.optim.AdamW(model.parameters(), **modes[optimizer])
    with StorageObserver(existing=[model]) as memory, torch.profiler.profile(profile_memory=True) as profile:
        start_bytes = memory.current_bytes
        train(model, adam)
        observed = memory.peak_bytes - start_bytes
    assert observed == pytest.approx(allocator_peak_bytes(profile), rel=0.01)


def test_a_storage_counts_once_and_until_its_last_view_is_gone():
    with StorageObserver(existing=()) as memory:
        x = torch.empty(KB, dtype=torch.uint8)
        view = x.view(2, -1)[1]
        assert memory.current_bytes == KB
        del x
        assert memory.current_bytes == KB
        del view
        assert (memory.current_bytes, memory.peak_bytes) == (0, KB)


def test_storage_resizes_are_seen():
    with StorageObserver(existing=()) as memory:
        x = torch.empty(KB, dtype=torch.uint8)
        x.untyped_storage().resize_(0)
        assert memory.current_bytes == 0
        x.untyped_storage().resize_(4 * KB)
        assert (memory.current_bytes, memory.peak_bytes) == (4 * KB, 4 * KB)
        y = torch.empty(0, dtype=torch.uint8)
        y.resize_(2 * KB)
        assert memory.current_bytes == 6 * KB
    resize = torch.UntypedStorage.resize_
    assert "StorageObserver" not in resize.__qualname__


def test_what_lives_before_the_context_counts():
    before = torch.empty(KB, dtype=torch.uint8)
    module = nn.Linear(256, 256)
    with StorageObserver(existing=[before, module]) as memory:
        assert memory.current_bytes == KB + 4 * (256 * 256 + 256)
        del before
        assert memory.current_bytes == 4 * (256 * 256 + 256)
    gc.collect()
    with StorageObserver() as everything:
        found = everything.current_bytes
    assert found >= 4 * (256 * 256 + 256)
    del module
    with StorageObserver() as everything:
        assert found - everything.current_bytes == 4 * (256 * 256 + 256)


def test_reset_peak_starts_again_from_what_is_alive():
    with StorageObserver(existing=()) as memory:
        kept = torch.empty(KB, dtype=torch.uint8)
        torch.empty(8 * KB, dtype=torch.uint8)
        assert memory.peak_bytes == 9 * KB
        memory.reset_peak()
        assert memory.peak_bytes == kept.numel()


def test_labels_give_a_breakdown_at_the_peak():
    model = nn.Linear(64, 64, bias=False)
    with StorageObserver(existing=[model], label=lambda tensor: str(tensor.dtype)) as memory:
        memory.label("weights", model)
        adam = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 64)).sum().backward()
        memory.label("grads", model.weight.grad)
        adam.step()
        memory.label("optim", adam)
        big = torch.zeros(1 << 20, dtype=torch.int8)
        breakdown = memory.breakdown_at_peak
        del big
    size = 4 * 64 * 64
    assert breakdown["weights"] == breakdown["grads"] == size
    assert breakdown["optim"] == 2 * size + 4  # two moments and the step
    assert breakdown["torch.int8"] == 1 << 20
    assert sum(breakdown.values()) == memory.peak_bytes


def test_a_storage_freed_in_another_thread_is_taken_off():
    with StorageObserver(existing=()) as memory:
        box = [torch.empty(KB, dtype=torch.uint8)]
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        assert memory.current_bytes == 0


def test_fake_tensors_are_observed_like_real_ones():
    def peak_bytes():
        model = Gpt(width=64, depth=2)
        with StorageObserver(existing=[model]) as memory:
            train(model, torch.optim.AdamW(model.parameters(), fused=True))
        return memory.peak_bytes

    with FakeTensorMode():
        foreseen = peak_bytes()
    assert foreseen == pytest.approx(peak_bytes(), rel=0.01)


def test_an_exception_restores_everything():
    resize, gather = torch.UntypedStorage.resize_, dist.all_gather
    with pytest.raises(ZeroDivisionError), StorageObserver(existing=()), WireObserver():
        raise ZeroDivisionError
    assert torch.UntypedStorage.resize_ is resize
    assert dist.all_gather is gather


def test_the_storage_observer_is_not_slow():
    model = Gpt(width=64, depth=2)
    adam = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, adam)

    def best_s(runs=5):
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            train(model, adam, steps=2)
            times.append(time.perf_counter() - start)
        return min(times)

    plain_s = best_s()
    with StorageObserver(existing=[model]):
        observed_s = best_s()
    assert observed_s < 6 * plain_s  # tiny kernels: the worst case


@pytest.mark.parametrize("module", [shardwise.observe.storage, shardwise.observe.wire])
def test_observers_import_nothing_of_shardwise(module):
    """So they can judge it."""
    assert "import shardwise" not in inspect.getsource(module)
    assert "from shardwise" not in inspect.getsource(module)


@ranks(2)
def test_storage_is_seen_through_async_collectives_and_dtensor(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with StorageObserver(existing=()) as memory:
        shard = torch.ones(KB, dtype=torch.uint8)
        full = torch.empty(world_size * KB, dtype=torch.uint8)
        works = [dist.all_to_all_single(torch.empty_like(full), full, async_op=True) for _ in range(2)]
        works += [gather_single(full, shard, async_op=True)]
        assert memory.peak_bytes >= KB + 3 * 2 * KB
        [work.wait() for work in works]
        del works
        assert freed_to(memory, 3 * KB) == 3 * KB
        mesh = init_device_mesh("cpu", (world_size,))
        sharded = distribute_tensor(torch.ones(8 * KB), mesh, [Shard(0)])
        before = freed_to(memory, 20 * KB)
        doubled = sharded * 2
        assert memory.current_bytes - before == doubled.to_local().untyped_storage().nbytes() == 16 * KB


def freed_to(memory, most):
    """Current bytes, once they are at most `most`: Gloo's threads free a buffer a moment after wait()."""
    deadline = time.monotonic() + 5
    while memory.current_bytes > most and time.monotonic() < deadline:
        time.sleep(0.01)
    return memory.current_bytes


def gather_single(output, tensor, **kwargs):
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return getattr(dist, name)(output, tensor, **kwargs)


def scatter_single(output, tensor):
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    return getattr(dist, name)(output, tensor)


@ranks(1, 2, 3, 4)
def test_each_operation_costs_what_the_table_says(rank, world_size):
    n, others = 12 * KB, world_size - 1  # 12: divisible by every W
    full, part = torch.ones(n // 4), torch.ones(n // 4 // world_size)
    share = n * others // world_size

    def cost(call):
        with WireObserver() as wire:
            call()
        assert len(wire.records) == 1
        assert wire.records[0].group_size == world_size
        assert wire.records[0].dtype == torch.float32
        return wire.sent_bytes

    assert cost(lambda: gather_single(full, part)) == share
    assert cost(lambda: dist.all_gather(list(full.chunk(world_size)), part)) == share
    assert cost(lambda: scatter_single(part, full)) == share
    assert cost(lambda: dist.reduce_scatter(part, list(full.chunk(world_size)))) == share
    assert cost(lambda: dist.all_to_all_single(torch.empty_like(full), full)) == share
    assert cost(lambda: dist.all_reduce(full)) == 2 * share
    assert cost(lambda: dist.broadcast(full, src=0)) == share
    assert cost(lambda: dist.reduce(full, dst=0)) == share
    outputs = [torch.empty_like(part) for _ in range(world_size)] if rank == 0 else None
    assert cost(lambda: dist.gather(part, outputs, dst=0)) == (0 if rank == 0 else n // world_size)
    inputs = list(full.chunk(world_size)) if rank == 0 else None
    with WireObserver() as wire:
        dist.scatter(torch.empty_like(part), inputs, src=0)
    assert wire.sent_bytes == (share if rank == 0 else 0)


@ranks(3)
def test_uneven_splits_and_point_to_point(rank, world_size):
    sizes = [rank * 3 + peer for peer in range(world_size)]
    rows = torch.ones(sum(sizes), 5)
    incoming = torch.empty(sum(peer * 3 + rank for peer in range(world_size)), 5)
    with WireObserver() as wire:
        dist.all_to_all_single(incoming, rows, [peer * 3 + rank for peer in range(world_size)], sizes)
    assert wire.sent_bytes == 4 * 5 * sum(size for peer, size in enumerate(sizes) if peer != rank)

    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    sent, received = torch.full((KB,), float(rank)), torch.empty(KB)
    before = dist.P2POp(dist.isend, sent, right)
    with WireObserver() as wire:
        pair = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, received, left)]
        [work.wait() for work in dist.batch_isend_irecv(pair)]
        [work.wait() for work in dist.batch_isend_irecv([before, pair[1]])]
        receive = dist.irecv(received, left)
        dist.isend(sent, right).wait()
        receive.wait()
    assert received[0] == left
    sent_bytes = [(record.op, record.sent_bytes) for record in wire.data]
    assert sent_bytes == [("batch_isend_irecv", 4 * KB), ("batch_isend_irecv", 4 * KB), ("isend", 4 * KB)]
    [work.wait() for work in dist.batch_isend_irecv(pair)]  # made under the observer, still good after it


@ranks(2)
def test_old_names_objects_and_groups_count_once(rank, world_size):
    full, part = torch.ones(2 * KB), torch.ones(KB)
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    other = [dist.new_group([r]) for r in range(world_size)][1 - rank]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with WireObserver(control=64) as wire:
            dist.all_gather_into_tensor(full, part)
            dist.reduce_scatter_tensor(part, full)
            dist.all_reduce(part, group=alone)
            dist.all_reduce(part, group=other)
            dist.barrier()
    gather, reduce, nothing, barrier = wire.records
    assert (gather.sent_bytes, reduce.sent_bytes, nothing.sent_bytes, barrier.sent_bytes) == (4 * KB, 4 * KB, 0, 0)
    assert (nothing.group_size, barrier.op) == (1, "barrier")
    with WireObserver(control=lambda record: record.dtype == torch.uint8) as wire:
        dist.all_gather_object([None] * world_size, "x" * KB)
        dist.all_reduce(part)
    assert [record.sent_bytes for record in wire.data if record.op == "all_reduce"] == [4 * KB]
    assert wire.control_sent_bytes > KB


class C10dBytes(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts collectives where they enter c10d, from any caller, independent of the wrapped functions."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.ops.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@ranks(2)
def test_every_collective_that_enters_c10d_is_recorded(rank, world_size):
    full, part = torch.ones(2 * KB), torch.ones(KB)
    with WireObserver() as wire, C10dBytes() as c10d:
        gather_single(full, part)
        dist.all_to_all_single(torch.empty_like(full), full)
        dist.all_reduce(full)
        dist.all_gather_object([None] * world_size, rank)
        dist.barrier()
    assert len(wire.records) == len(c10d.ops) == 6
