"""A rank of one axis that is lost is named on the ranks of all axes, soon and by all of them."""

import gc
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise.agreement.agreement import poll_interval_s
from shardwise.models.built_in import GPT
from shardwise.models.tensor_parallel import tensor_parallel
from support import ranks, run_ranks

LIMIT_S = 10.0
LOST = 3


def sgd(params):
    return torch.optim.SGD(params, lr=0.01)


def make_gpt():
    torch.manual_seed(1)
    return GPT(16, 4, 2, 32, 8, fused=False)


def tokens_of(step):
    return torch.randint(0, 32, (8, 9), generator=torch.Generator().manual_seed(step))


class Pipe:
    """Two stages under zero2."""

    def __init__(self):
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        self.engine = shardwise.pipeline(make_gpt(), self.mesh, sgd, "zero2", micro_batches=4)
        self.module = next(iter(self.engine.engines.values())).module

    def step(self, step):
        self.engine.train_step(tokens_of(step))


class Cut:
    """Matrices cut over two ranks, under zero1: a step sends nothing over dp before the last backward."""

    def __init__(self):
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = tensor_parallel(make_gpt(), self.mesh["tp"])
        self.engine = shardwise.initialize(model, sgd, "zero1", mesh=self.mesh)
        self.module = self.engine.module

    def step(self, step):
        self.engine.backward(self.engine(tokens_of(step)))
        self.engine.step()


def told(work, *args):
    """The text of the DisagreementError that `work` ends with, and after how many seconds."""
    before = time.monotonic()
    with pytest.raises(shardwise.DisagreementError) as caught:
        work(*args)
    return str(caught.value), time.monotonic() - before


def lose_a_rank(rank, world_size, axes, how):
    dist.init_process_group("gloo")
    training = {"pipe": Pipe, "cut": Cut}[axes]()
    training.step(0)

    def fault(module, args):
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("a broken sample")

    if rank == LOST:
        block = next(each for name, each in training.module.named_modules() if re.fullmatch(r"blocks\.3", name))
        block.register_forward_pre_hook(fault)
        with pytest.raises((ValueError, RuntimeError)):  # torch's schedules wrap the former
            training.step(1)
        time.sleep(LIMIT_S / 2)  # it lives on, and does not come back
        return "", 0.0
    return told(training.step, 1)


@pytest.mark.parametrize(("axes", "how"), [("pipe", "dies"), ("pipe", "raises"), ("cut", "dies")])
def test_a_rank_that_is_lost_is_named_on_all_axes(axes, how):
    outcomes = run_ranks(lose_a_rank, 4, axes, how, fresh=True, init=False, torchrun=True, check=False)
    reason = "died" if how == "dies" else "was stopped by ValueError: a broken sample"
    for outcome in (each for each in outcomes if each.rank != LOST):
        text, seconds = outcome.value
        assert f"rank {LOST} {reason}" in text, outcome.describe()
        assert seconds < LIMIT_S


def leave_early(rank, world_size):
    dist.init_process_group("gloo")
    pipe = Pipe()
    pipe.step(0)
    if rank == LOST:
        pipe.engine.destroy()
        return "", 0.0
    return told(pipe.step, 1)


def test_a_rank_that_runs_fewer_steps_is_named_on_all_axes():
    outcomes = run_ranks(leave_early, 4, fresh=True, init=False, torchrun=True, check=False)
    for outcome in (each for each in outcomes if each.rank != LOST):
        text, seconds = outcome.value
        assert f"rank {LOST} left after 1 steps, and others run step 2" in text, outcome.describe()
        assert seconds < LIMIT_S


@ranks(4)
def test_another_number_of_micro_batches_is_refused(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    with pytest.raises(shardwise.DisagreementError, match=r"micro_batches: 4 on ranks 0, 1, 2, 8 on rank 3"):
        shardwise.pipeline(make_gpt(), mesh, sgd, "zero2", micro_batches=8 if rank == 3 else 4)


@ranks(4)
def test_an_engine_that_is_gone_sooner_on_one_rank_does_not_stop_the_next(rank, world_size):
    """Engines that were not destroyed end when they are collected, which is another moment on each rank."""
    old, is_gone = Cut(), threading.Event()
    watch = old.engine.comm.watch
    if rank == 2:
        old.engine.__dict__["_kept"] = old  # a cycle, so that one rank keeps its engine for longer
    del old
    if rank != 2:
        gc.collect()
        while not watch._is_closed.is_set():
            is_gone.wait(0.05)
    dist.barrier()
    pipe = Pipe()
    gc.collect()
    for step in range(3):
        pipe.step(step)
        is_gone.wait(2.5 * poll_interval_s())
    pipe.engine.destroy()
