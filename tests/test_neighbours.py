"""Ranks on one machine that read each other's memory: the same values as through sockets, and no rank left waiting."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import shardwise
from shardwise import neighbours, swaps
from shardwise.comm import Comm
from shardwise.models import MLP
from shardwise.neighbours import Neighbours, Run
from shardwise.observe import WireObserver
from support import ranks
from support.training import digest, start, train, train_step

pytestmark = pytest.mark.skipif(
    not neighbours.are_allowed(), reason="this system does not let processes read others' memory"
)

NUMEL = 3 * 4 * 5 * 2**10
"""Divides by 2 to 5."""


@contextlib.contextmanager
def comm_that_reads():
    """However little there is to read."""
    with mock.patch.object(swaps, "LEAST_BYTES", 1):
        comm = Comm(None, torch.device("cpu"))
        yield comm
        comm.close()


@contextlib.contextmanager
def memory_reads():
    """Within it, the bytes that this process reads of others."""
    seen = []
    read = Neighbours.read

    def counted(self, rank, runs, target):
        seen.append(target.nbytes)
        read(self, rank, runs, target)

    with mock.patch.object(Neighbours, "read", counted):
        yield seen


@ranks(2, 3, 4)
def test_gathers_and_exchanges_bring_what_the_others_have(rank, world_size):
    with comm_that_reads() as comm:
        assert comm._readers
        size = NUMEL // world_size
        for turn in range(5):
            full = torch.full((NUMEL,), float("nan"))
            full.view(world_size, -1)[rank] = turn + rank
            gather = comm.gather(full, "gather", "unit")
            sent = torch.arange(world_size).repeat_interleave(size).view(world_size, size) * 100 + rank + turn
            received = torch.empty(comm.rows_received, size, dtype=sent.dtype)
            handle, rows = comm.exchange(received, sent, "reduce", "unit")
            gather.wait()
            handle.wait()
            parts = full.view(world_size, -1)
            assert [part.unique().tolist() for part in parts] == [[turn + r] for r in range(world_size)]
            assert [row.unique().tolist() for row in rows] == [[rank * 100 + r + turn] for r in range(world_size)]


@ranks(2)
def test_ranks_may_wait_for_two_streams_in_different_orders(rank, world_size):
    with comm_that_reads() as comm:
        full, sent = torch.full((NUMEL,), float(rank)), torch.full((2, NUMEL), float(rank))
        received = torch.empty(comm.rows_received, NUMEL)
        gather = comm.gather(full, "gather", "unit")
        exchange, rows = comm.exchange(received, sent, "reduce", "unit")
        for handle in (gather, exchange) if rank else (exchange, gather):
            handle.wait()
        assert [row[0].item() for row in rows] == [0.0, 1.0]


ROOT, ROOT_IN_A_CONTAINER, USER = "000001ffffffffff", "00000000a80425fb", "0000000000000000"


@pytest.mark.parametrize(
    ("scope", "capabilities", "is_allowed"),
    [
        (0, USER, True),
        (1, USER, False),
        (1, ROOT, True),
        (1, ROOT_IN_A_CONTAINER, False),
        (3, ROOT, False),
        (None, USER, True),
    ],
)
def test_what_yama_forbids_is_not_foreseen(tmp_path, scope, capabilities, is_allowed):
    if scope is not None:
        (tmp_path / "scope").write_text(f"{scope}\n")
    (tmp_path / "status").write_text(f"Name:\tpython\nCapPrm:\t{ROOT}\nCapEff:\t{capabilities}\n")
    with (
        mock.patch.object(neighbours, "_YAMA", tmp_path / "scope"),
        mock.patch.object(neighbours, "_STATUS", tmp_path / "status"),
    ):
        assert neighbours.are_allowed.__wrapped__() == is_allowed


@pytest.mark.parametrize("count", [1, 7, 3000])
def test_runs_and_zeros_between_them_are_read_one_after_the_other(count):
    """3000 are more than the system takes at once."""
    values = torch.arange(3.0 * count).view(count, 3)
    runs = [run for row in values for run in (Run(row.data_ptr(), 12), Run(0, 8))]
    found = torch.full((count, 5), float("nan"))
    Neighbours([os.getpid()]).read(0, runs, found)
    assert torch.equal(found, torch.nn.functional.pad(values, (0, 2)))


def test_a_read_that_ends_early_is_taken_up_where_it_ended():
    """As those beyond 2 GiB do."""
    values, found = torch.arange(100.0).view(4, 25), torch.full((4, 25), float("nan"))
    met = Neighbours([os.getpid()])
    whole = met._read

    def short(pid, here, here_count, there, there_count, flags):
        for vector in (here._obj, there[0]):
            vector.size = min(vector.size, 36)
        return whole(pid, here, here_count, there, 1, flags)

    met._read = short
    met.read(0, [Run(row.data_ptr(), 100) for row in values], found)
    assert torch.equal(found, values)


@ranks(3)
def test_a_stranger_at_the_door_is_sent_away(rank, world_size):
    """Whoever is not one of the ranks is not heard, and keeps nobody from meeting."""
    store = dist.PrefixStore("stranger", c10d._get_default_store())
    call, strangers = Neighbours._call, []

    def call_after_a_stranger(self, rank, tokens, streams):
        code = "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); " + (
            "s.connect(chr(0) + 'shardwise-' + sys.argv[1]); print('here', flush=True); sys.stdin.read()"
        )
        for token in tokens:
            command = [sys.executable, "-c", code, token]
            strangers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            strangers[-1].stdout.readline()
        call(self, rank, tokens, streams)

    with mock.patch.object(Neighbours, "_call", call_after_a_stranger):
        met = Neighbours.meet(store, rank, world_size, ("gather", "reduce"))
    for stranger in strangers:
        stranger.communicate()
    others = set(range(world_size)) - {rank}
    assert {stream: set(lines) for stream, lines in met.lines.items()} == {"gather": others, "reduce": others}
    for stream, lines in met.lines.items():
        for line in lines.values():
            line.send(f"{stream} {rank}".encode())
        assert {other: line.recv(99).decode() for other, line in lines.items()} == {r: f"{stream} {r}" for r in others}


def both_ways(work):
    """What `work` gives where everything is read in memory, and where it all goes through Gloo."""
    results = []
    for least_bytes in (1, 2**40):
        with (
            mock.patch.object(swaps, "LEAST_BYTES", least_bytes),
            mock.patch("support.training.swaps"),  # which would set it, too
            memory_reads() as seen,
        ):
            results.append(work())
        assert (sum(seen) > 10_000) == (least_bytes == 1)  # the meeting reads a little
    return results


CONFIGS = {
    "zero1": {"preset": "zero1", "precision": {"compute": "bf16"}},
    "zero3": {"preset": "zero3", "precision": {"compute": "bf16"}},
    "zero3 in fp32": {"preset": "zero3"},
    "in pieces": {"preset": "zero2", "gradients": {"reduce_bucket_bytes": 1024}},
}


@ranks(2, 3)
@pytest.mark.parametrize("config", CONFIGS)
def test_bits_are_those_of_sockets(rank, world_size, config):
    read, sent = both_ways(lambda: train("gpt", CONFIGS[config], rank))
    assert read == sent


SCRATCH = torch.empty(10_000)


def reuse(param):
    """One place for all gradients, as of a hook that is short of memory."""
    place = SCRATCH[: param.numel()].view(param.shape)
    param.grad = place.copy_(param.grad)


def keep_and_write(param):
    """A hook that keeps a gradient, and writes to it when the next comes."""
    for kept in KEPT:
        kept.fill_(1e3)
    KEPT[:] = [param.grad]


KEPT = []
HOOKS = {
    "expanded": lambda param: setattr(param, "grad", torch.tensor(0.5).expand_as(param)),
    "with gaps": lambda param: setattr(param, "grad", torch.stack([param.grad, param.grad + 1], -1)[..., 0]),
    "transposed": lambda param: setattr(param, "grad", param.grad.t().contiguous().t() if param.ndim == 2 else None),
    "negative": lambda param: setattr(param, "grad", torch._neg_view(param.grad)),
    "reused": reuse,
    "kept": keep_and_write,
}


@ranks(2)
@pytest.mark.parametrize("hook", HOOKS)
def test_gradients_that_the_user_replaces_or_keeps_are_read_as_they_were(rank, world_size, hook):
    def work():
        engine = start("gpt", {"preset": "zero3", "runtime": {"min_unit_bytes": 1}})
        for param in engine.module.parameters():
            param.register_post_accumulate_grad_hook(HOOKS[hook])
        for step in range(2):
            train_step(engine, rank, step)
        result = digest(engine)
        engine.destroy()
        return result

    read, sent = both_ways(work)
    assert read == sent


@ranks(2)
@pytest.mark.parametrize("config", ["zero3 in fp32", "in pieces"])
def test_autograds_own_gradients_are_lent_without_a_copy(rank, world_size, config):
    with mock.patch.object(torch.Tensor, "clone", side_effect=AssertionError("a copy")):
        engine = start("gpt", CONFIGS[config])
        with memory_reads() as seen:
            train_step(engine, rank, 0)
    assert seen
    engine.destroy()


@ranks(2)
def test_a_timeout_that_the_program_sets_for_sockets_is_not_ours(rank, world_size):
    socket.setdefaulttimeout(0.2)
    try:
        with comm_that_reads() as comm:
            time.sleep(0.6 * rank)
            full = torch.full((NUMEL,), float(rank))
            comm.gather(full, "gather", "unit").wait()
            assert full[:: NUMEL // 2].tolist() == [0.0, 1.0]
    finally:
        socket.setdefaulttimeout(None)


@ranks(2)
def test_nothing_stays_open(rank, world_size):
    with comm_that_reads() as comm:
        comm.gather(torch.ones(NUMEL), "gather", "unit").wait()
        lines = [line for reader in comm._readers.values() for line in reader._lines.values()]
        assert len(lines) == 2
        threads = threading.active_count()
    assert all(line.fileno() == -1 for line in lines)
    assert threading.active_count() < threads


@ranks(2, 4)
def test_what_is_read_is_what_is_counted(rank, world_size):
    """All ranks lend as much as they read."""
    with comm_that_reads() as comm:
        with WireObserver() as wire, memory_reads() as seen:
            comm.gather(torch.ones(NUMEL), "gather", "unit").wait()
        assert wire.by_op() == {"lend": sum(seen)} == {"lend": NUMEL * 4 * (world_size - 1) // world_size}


def refuse(*args):
    raise PermissionError("Operation not permitted")


HINDRANCES = {
    "reads": mock.patch.object(Neighbours, "read", refuse),
    "another process": mock.patch.object(Neighbours, "_finds", return_value=False),
    "calls": mock.patch.object(Neighbours, "_call", refuse),
    "sockets": mock.patch("socket.socket.bind", refuse),
    "kinds of sockets": mock.patch("shardwise.neighbours.socket.AF_UNIX", 12345),
}


@ranks(2, 3)
@pytest.mark.parametrize("hindrance", HINDRANCES)
def test_one_rank_that_cannot_makes_all_use_sockets(rank, world_size, hindrance):
    with HINDRANCES[hindrance] if rank == 1 else contextlib.nullcontext():
        engine = shardwise.initialize(MLP(width=1500, depth=2), torch.optim.SGD, "zero3")
    assert not engine.comm._readers
    with WireObserver() as wire:
        engine.backward(engine(torch.ones(2, 1500)))
        engine.step()
    assert set(wire.by_op()) == {"isend"}
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_process_with_the_same_number_elsewhere_is_not_taken_for_the_rank(rank, world_size, is_mapped):
    """It may have other values there, or nothing at all."""
    store = dist.PrefixStore(f"elsewhere {is_mapped}", c10d._get_default_store())
    other = ctypes.create_string_buffer(64)
    with mock.patch("ctypes.addressof", return_value=ctypes.addressof(other) if is_mapped else 4096):
        assert Neighbours.meet(store, rank, world_size, ("gather",)) is None


@ranks(3)
def test_an_engine_of_a_part_of_the_ranks_uses_sockets(rank, world_size):
    two = dist.new_group([0, 1])
    if rank < 2:
        comm = Comm(two, torch.device("cpu"))
        assert not comm._readers
        comm.close()


@ranks(2)
def test_an_interrupted_wait_ends_when_nobody_reads_any_more(rank, world_size):
    with comm_that_reads() as comm:
        full = torch.full((NUMEL,), float(rank))
        if rank:
            time.sleep(1.0)
        gather = comm.gather(full, "gather", "unit")
        if rank:
            gather.wait()
            assert full.view(2, -1)[:, 0].tolist() == [0.0, 1.0]
        else:
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                gather.wait()
            full.fill_(-1.0)  # as whoever catches it may do


def interrupt(number, frame):
    raise KeyboardInterrupt


@ranks(2)
def test_nothing_is_waited_for_after_the_end(rank, world_size):
    with comm_that_reads() as comm:
        pass
    with mock.patch.object(swaps, "LEAST_BYTES", 1), pytest.raises(RuntimeError, match="engine was destroyed"):
        comm.gather(torch.ones(NUMEL), "gather", "unit").wait()


SCRIPT = """
import torch, shardwise
from shardwise.models import MLP
model = MLP(width=1500, depth=6)
engine = shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero1")
assert engine.comm._readers
engine.backward(engine(torch.ones(2, 1500)))
engine.step()
"""


def test_a_script_may_end_while_values_are_read(tmp_path):
    """Without a word to the engine, with gathers under way."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "shardwise", "run", "-n", "2", str(tmp_path / "script.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@ranks(2)
def test_memory_that_is_gone_is_an_error_and_no_crash(rank, world_size):
    met = Neighbours([os.getpid()])
    with pytest.raises(OSError, match=r"memory of rank 0 cannot be read: Bad address"):
        met.read(0, [Run(4096, 4 << 16)], torch.empty(1 << 16))
    lost = Neighbours([2**22 + 1])
    with pytest.raises(OSError, match="No such process"):
        lost.read(0, [Run(4096, 16)], torch.empty(4))
    with pytest.raises(ValueError, match="rank 0 has 16 bytes where 20 are expected"):
        met.read(0, [Run(4096, 16)], torch.empty(5))
