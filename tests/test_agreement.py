"""Contract C4: ranks that cannot agree all stop with one error; ranks that can are left alone, however slow."""

import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.agreement import agreement, judge, sight
from shardwise.agreement.log import Outstanding, Ticket
from shardwise.agreement.posts import Answer, Post, RankState, digest
from shardwise.comm import ProcessGroupComm
from support import ranks, run_ranks
from support.fork_server import Forked
from support.training import make_batch, start, train_step

LIMIT_S = 10.0


def begin(preset, model="gpt", poll_s=0.1, **config):
    os.environ[agreement.POLL_VARIABLE] = str(poll_s)  # the rank's process gets its environment back after the test
    return start(model, {"preset": preset, "runtime": {"min_unit_bytes": 1}, **config})


def forward(engine, rank, index=0):
    return engine(make_batch(engine.module, rank, index))


# Faults: what rank 1 does, or fails to do, while the others train on


def extra_forward(engine, rank):
    if rank == 1:
        forward(engine, rank)
    train_on(engine, rank)


def extra_evaluation(engine, rank):
    if rank == 1:
        with torch.no_grad():
            forward(engine, rank)
    train_on(engine, rank)


def lone_state_dict(engine, rank):
    if rank == 1:
        engine.state_dict()
    train_on(engine, rank)


def lone_full_param(engine, rank):
    if rank == 1:
        engine.full_param("head.weight")
    train_on(engine, rank)


def lone_gathered(engine, rank):
    if rank == 1:
        with shardwise.gathered(engine.module.parameters()):
            pass
    train_on(engine, rank)


def lone_step(engine, rank):
    for index in range(4):
        try:
            engine.backward(forward(engine, rank, index))
        except shardwise.DisagreementError:
            raise
        except RuntimeError:  # rank 1 is told at once what it did where gradients are replicated
            assert rank == 1
        if rank != 1 or index != 1:
            engine.step()


def forgotten_backward(engine, rank):
    for index in range(4):
        loss = forward(engine, rank, index)
        if rank != 1 or index != 1:
            engine.backward(loss)
        engine.step()


def other_boundary(engine, rank):
    for index in range(4):
        engine.set_boundary(index % 2 == (rank == 1))
        engine.backward(forward(engine, rank, index))
        engine.step()


def early_end(engine, rank):
    for index in range(2 if rank == 1 else 4):
        train_step(engine, rank, index)


def dropped_gradients(engine, rank):
    engine.backward(forward(engine, rank))
    if rank == 1:
        engine.zero_grad()
    engine.step()
    train_on(engine, rank)


def caught_exception_in_forward(engine, rank):
    with failing(engine.module.blocks[1], rank == 1):
        skip_bad_batches(engine, rank)


def caught_exception_in_backward(engine, rank):
    for index in range(3):
        loss = forward(engine, rank, index)
        if rank == 1 and index == 1:
            loss = Fails.apply(loss)
        try:
            engine.backward(loss)
        except ValueError:
            continue
        engine.step()


def caught_exception_in_step(engine, rank):
    engine.register_grad_hook(lambda name, shard: 1 / (rank != 1))
    for index in range(3):
        engine.backward(forward(engine, rank, index))
        try:
            engine.step()
        except ZeroDivisionError:
            engine.zero_grad()


def train_on(engine, rank):
    for index in range(1, 4):
        train_step(engine, rank, index)


def commit(fault, engine, rank):
    fault(engine, rank)
    # A rank may have come out even with the others, a batch behind: what comes next tells.
    engine.full_param("head.weight")


class failing:
    """Within it, `module` raises if `fails`."""

    def __init__(self, module, fails):
        self.handle = module.register_forward_hook(self.fail) if fails else None

    def fail(self, *args):
        raise ValueError("a bad batch")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.handle is not None:
            self.handle.remove()


def skip_bad_batches(engine, rank):
    for index in range(3):
        try:
            loss = forward(engine, rank, index)
        except ValueError:
            continue
        engine.backward(loss)
        engine.step()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("a bad gradient")


EVERYWHERE = ["zero0", "zero1", "zero2", "zero3"]
FAULTS = [
    (extra_forward, ["zero3"]),
    (extra_evaluation, ["zero3"]),
    (lone_state_dict, ["zero3"]),
    (lone_full_param, ["zero1", "zero3"]),
    (lone_gathered, ["zero3"]),
    (lone_step, ["zero0", "zero2", "zero3"]),
    (forgotten_backward, ["zero1", "zero3"]),
    (other_boundary, ["zero1", "zero2", "zero3"]),
    (early_end, ["zero1", "zero3"]),
    (dropped_gradients, ["zero1", "zero3"]),
    (caught_exception_in_forward, ["zero3"]),
    (caught_exception_in_backward, ["zero0", "zero1", "zero2", "zero3"]),
    (caught_exception_in_step, ["zero1", "zero3"]),
]


@ranks(2, timeout=30)
@pytest.mark.parametrize(("fault", "preset"), [(fault, preset) for fault, presets in FAULTS for preset in presets])
def test_every_rank_stops_with_the_same_error(rank, world_size, fault, preset):
    engine = begin(preset)
    train_step(engine, rank, 0)
    started = time.monotonic()
    with pytest.raises(shardwise.DisagreementError) as caught:
        commit(fault, engine, rank)
    assert time.monotonic() - started < LIMIT_S
    check_told(str(caught.value), world_size)
    engine.destroy()


def check_told(text, world_size):
    """All ranks have the same text; it names every rank, an operation and a unit."""
    texts = [None] * world_size
    dist.all_gather_object(texts, text)
    assert texts == [text] * world_size
    rows = [line for line in text.splitlines() if line.startswith("  rank")]
    named = {number for row in rows for number in row.split(":")[0].replace(",", "").split()[1:]}
    assert named == {str(rank) for rank in range(world_size)}, text
    assert any(verb in text for verb in ("gather", "reduce", "share")), text
    assert any(unit in text for unit in ("(root)", "embed", "position", "blocks", "norm", "head")), text


@ranks(3, timeout=30)
def test_the_ranks_that_agree_are_told_from_the_one_that_does_not(rank, world_size):
    engine = begin("zero3")
    train_step(engine, rank, 0)
    with pytest.raises(shardwise.DisagreementError) as caught:
        commit(extra_forward, engine, rank)
    check_told(str(caught.value), world_size)
    assert "\n  ranks 0, 2: " in str(caught.value)
    assert "\n  rank 1: gather" in str(caught.value)
    engine.destroy()


class WithoutTags(ProcessGroupComm):
    """As over NCCL: nothing on the wire tells operations apart."""

    def __init__(self, *args):
        super().__init__(*args)
        self._sends_directly = False


@ranks(2, timeout=30)
@pytest.mark.parametrize(
    ("fault", "preset"),
    [(extra_forward, "zero3"), (lone_full_param, "zero1"), (lone_step, "zero2"), (caught_exception_in_step, "zero1")],
)
def test_without_tags_nothing_is_issued_that_others_do_not_issue(rank, world_size, fault, preset):
    with mock.patch("shardwise.engine.initialize.ProcessGroupComm", WithoutTags):
        engine = begin(preset)
    train_step(engine, rank, 0)
    with pytest.raises(shardwise.DisagreementError) as caught:
        commit(fault, engine, rank)
    check_told(str(caught.value), world_size)
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize(("preset", "pieces"), [("zero1", 1), ("zero3", 1), ("zero2", 6)])
def test_without_tags_what_is_repeated_is_not_met_over(rank, world_size, preset, pieces):
    bucket = {"gradients": {"reduce_bucket_bytes": 60_000 // pieces}} if pieces > 1 else {}
    with mock.patch("shardwise.engine.initialize.ProcessGroupComm", WithoutTags):
        engine = begin(preset, batch={"accumulation": 2}, **bucket)
    assert max(unit.plan.reduce_plan.parts for unit in engine.units) >= pieces
    met, meet = [], agreement.Agreement._meet
    with mock.patch.object(agreement.Agreement, "_meet", lambda self, it: (met.append(it.text), meet(self, it))):
        train_step(engine, rank, 0)
    # What an exchange announced is not met over, and after it the same exchange is expected: once in each direction.
    assert len([text for text in met if "gathers next" in text]) == (2 if preset == "zero3" else 0)
    assert len([text for text in met if text.startswith("share the order")]) <= 1
    train_step(engine, rank, 1)
    with mock.patch.object(agreement.Agreement, "_meet", side_effect=AssertionError("met over what is known")):
        for index in range(2, 4):
            train_step(engine, rank, index)
    engine.destroy()


# A rank that is gone


def one_leaves(rank, world_size, how):
    engine = begin("zero3")
    train_step(engine, rank, 0)
    if rank == 1:
        how(engine)
    with pytest.raises(shardwise.DisagreementError) as caught:
        commit(train_on, engine, rank)
    return str(caught.value)


def exits(engine):
    os._exit(3)


def is_killed(engine):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", [pytest.param(exits, marks=pytest.mark.full), is_killed])
def test_a_rank_that_dies_is_named(how):
    started = time.monotonic()
    outcomes = run_ranks(one_leaves, 3, how, fresh=True, check=False, timeout=40, grace=15)
    assert outcomes[1].exitcode is not None
    assert outcomes[0].value == outcomes[2].value is not None, outcomes
    assert "rank 1 died while others wait for gather (root), " in outcomes[0].value
    assert "\n  rank 1: its process (" in outcomes[0].value
    assert "operation 0" not in outcomes[0].value
    assert "loop that ends early" not in outcomes[0].value
    assert time.monotonic() - started < 40


SCRIPT = """
import sys, torch, shardwise
from shardwise.models.built_in import MLP
model = MLP(width=8, depth=3)
engine = shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3")
rank = torch.distributed.get_rank()
for step in range(5):
    if rank == 1 and step == 2:
        {act}
    engine.backward(engine(torch.ones(2, 8)))
    engine.step()
"""


@pytest.mark.parametrize(
    ("act", "told"),
    [
        pytest.param("raise ValueError('a bad batch')", "it ended with ValueError: a bad batch", id="exception"),
        pytest.param("break", "its process ended", id="break", marks=pytest.mark.full),
    ],
)
def test_a_script_that_ends_early_on_one_rank(act, told, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(act=act))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1"}
    common = os.environ | names | {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    files = [tmp_path / f"errors{rank}" for rank in range(2)]
    processes = []
    for rank, errors in enumerate(files):
        with errors.open("w") as opened:
            processes.append(Forked([sys.executable, path], env=common | {"RANK": str(rank)}, stderr=opened))
    for process in processes:
        process.wait(timeout=60)
    first, second = (errors.read_text() for errors in files)
    assert processes[0].returncode == 1
    assert "DisagreementError: rank 1 left while others wait" in first
    assert told in first
    assert processes[1].returncode == ("ValueError" in second)


@ranks(2, timeout=30)
def test_a_rank_whose_engine_was_destroyed_is_named(rank, world_size):
    engine = begin("zero3")
    train_step(engine, rank, 0)
    if rank == 0:
        with pytest.raises(shardwise.DisagreementError, match="its engine was destroyed"):
            train_on(engine, rank)
    engine.destroy()


@ranks(2, timeout=30)
def test_a_rank_that_waits_outside_the_engine_is_named(rank, world_size):
    engine = begin("zero2")
    train_step(engine, rank, 0)
    if rank == 0:
        with pytest.raises(shardwise.DisagreementError, match=r"torch\.distributed\.barrier at .*test_agreement\.py"):
            train_on(engine, rank)
    dist.barrier()
    if rank == 1:
        with pytest.raises(shardwise.DisagreementError, match=r"torch\.distributed\.barrier"):
            train_on(engine, rank)
    engine.destroy()


# Ranks that are to be left alone


@ranks(2, timeout=60)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_a_slow_rank_is_waited_for(rank, world_size, preset):
    engine = begin(preset, poll_s=0.02)  # a second is then as long as half a minute
    for index in range(3):
        if rank == 1:
            time.sleep(1.2)
        train_step(engine, rank, index)
    engine.destroy()


@ranks(2, timeout=60)
def test_ranks_slow_in_turn_and_outside_are_waited_for(rank, world_size):
    engine = begin("zero3", poll_s=0.02)
    for index in range(4):
        if rank == index % 2:
            time.sleep(0.5)
        if index % 2:
            dist.barrier()
        train_step(engine, rank, index)
    engine.destroy()


@ranks(2)
def test_one_rank_alone_may_try_again_where_weights_are_replicated(rank, world_size):
    engine = begin("zero2")
    with (
        failing(engine.module.blocks[1], rank == 1),
        pytest.raises(ValueError, match="bad batch") if rank == 1 else nullcontext(),
    ):
        forward(engine, rank)
    for index in range(2):
        train_step(engine, rank, index)
    engine.destroy()


@ranks(2)
def test_the_thread_ends_with_the_engine(rank, world_size):
    before = [thread for thread in threading.enumerate() if thread.name == "shardwise"]
    engine = begin("zero1")
    train_step(engine, rank, 0)
    assert len([thread for thread in threading.enumerate() if thread.name == "shardwise"]) == len(before) + 1
    engine.destroy()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and len(threading.enumerate()) > len(before) + 1:
        time.sleep(0.05)
    assert len([thread for thread in threading.enumerate() if thread.name == "shardwise"]) <= len(before)


@pytest.mark.parametrize(("name", "waits"), [("isend", False), ("irecv", False), ("barrier", True)])
def test_a_rank_that_sends_does_not_wait_outside(name, waits):
    """Two polls may both find it sending, under load or by chance: another message each time."""
    found, busy, made = [], threading.Lock(), {}
    exec(compile(f"def {name}(busy): busy.acquire()", dist.distributed_c10d.__file__, "exec"), made)

    def look():
        time.sleep(0.05)
        found.append(sight.outside_call())
        busy.release()

    busy.acquire()
    threading.Thread(target=look).start()
    made[name](busy)
    assert (found[0] is not None) == waits


@ranks(2)
def test_a_slow_broadcast_is_no_standstill(rank, world_size):
    """A rank in a broadcast of the engine waits there, for an operation that all have issued, and not outside."""
    engine, seen, broadcast = begin("zero0"), [], dist.broadcast

    def late(*args, **kwargs):
        time.sleep(0.5 * (rank == 0))
        return broadcast(*args, **kwargs)

    look = threading.Timer(0.25, lambda: seen.append(engine.comm._agreement._look()))
    with mock.patch.object(dist, "broadcast", late):
        look.start()
        engine.comm.broadcast(torch.ones(4), unit="blocks.0")
    look.join()
    ticket, outside, _ = seen[0]  # rank 0 is in the call that issues it, as one that makes a communicator is
    assert "broadcast blocks.0" in ticket.text
    assert not outside
    engine.destroy()


def test_a_device_that_does_not_answer_blocks_only_who_asked():
    """CUDA's driver may keep the question after an operation until a kernel has ended that never does."""
    answer, asked = threading.Event(), threading.Event()

    class Stuck:
        def is_completed(self):
            asked.set()
            return answer.wait()

    waits = Outstanding(poll_s=0.01)
    ticket = Ticket("gather", 1, "gather blocks.0", 0)
    waits.add(ticket, Stuck())
    assert asked.wait(LIMIT_S)
    assert waits.oldest() is ticket
    answer.set()
    deadline = time.monotonic() + LIMIT_S
    while waits.oldest() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert waits.oldest() is None
    waits.close()


# The judge alone


def post(state, at=None, gather=(), reduce=(), first=0, **rest):
    issued = {"gather": (first, list(map(digest, gather))), "reduce": (0, list(map(digest, reduce)))}
    waits_for = {"gather": gather, "reduce": reduce}[at[0]][at[1] - first * (at[0] == "gather")] if at else ""
    return Post(state, at, issued, waits_for=waits_for, **rest)


def test_different_operations_under_one_number_are_a_disagreement():
    posts = [post(RankState.WAITS, ("gather", 1), ["a", "b"]), post(RankState.RUNS, None, ["a", "c", "d"])]
    finding = judge.judge(posts)
    assert finding.is_final
    assert (finding.at, finding.untold) == (("gather", 1), [1])
    assert "  rank 0: b\n  rank 1: an operation that it has not described\n" in finding.text
    told = judge.judge(posts, [None, Answer(1, "", "c")])
    assert not told.untold
    assert "  rank 0: b\n  rank 1: c\n" in told.text


def test_the_words_of_an_exception_may_differ():
    broken = "the forward was broken off by OutOfMemoryError: "
    posts = [post(RankState.WAITS, ("gather", 1), [f"{broken}GPU {rank}", "gather head"]) for rank in range(2)]
    assert judge.judge(posts) is None
    posts[1] = post(RankState.WAITS, ("gather", 1), ["the forward was broken off by ValueError: no", "gather head"])
    assert judge.judge(posts).is_final


def test_windows_that_begin_at_different_numbers_are_compared_by_number():
    posts = [
        post(RankState.WAITS, ("gather", 7), ["a", "b", "c"], first=5),
        post(RankState.RUNS, None, ["b", "c"], first=6),
    ]
    assert judge.judge(posts) is None


@pytest.mark.parametrize("state", [RankState.RUNS, RankState.WAITS])
def test_an_operation_that_all_have_issued_may_be_on_its_way(state):
    posts = [post(RankState.WAITS, ("gather", 0), ["a", "b"]), post(state, ("gather", 1), ["a", "b"])]
    assert judge.judge(posts) is None


def test_a_rank_that_runs_is_waited_for():
    assert judge.judge([post(RankState.WAITS, ("gather", 1), ["a", "b"]), post(RankState.RUNS, None, ["a"])]) is None


def test_a_rank_that_is_gone_is_not():
    finding = judge.judge(
        [post(RankState.WAITS, ("gather", 1), ["a", "b"]), post(RankState.GONE, None, ["a"], detail="it ended")]
    )
    assert finding.is_final
    assert "rank 1: gone: it ended" in finding.text


def test_a_rank_that_left_with_nothing_owed_is_no_reason_to_stop():
    posts = [post(RankState.WAITS, ("gather", 0), ["a"]), post(RankState.GONE, None, ["a"])]
    assert judge.judge(posts) is None


def test_ranks_that_wait_for_each_other_in_two_channels_are_at_a_standstill():
    posts = [
        post(RankState.WAITS, ("gather", 0), ["a"]),
        post(RankState.WAITS, ("reduce", 0), [], ["r"]),
    ]
    finding = judge.judge(posts)
    assert finding is not None
    assert not finding.is_final


def test_posts_survive_the_store():
    told = post(RankState.OUTSIDE, ("gather", 3), ["a"], ["b"], first=3, detail="barrier", polls=4)
    assert Post.load(told.dump().encode()) == told
