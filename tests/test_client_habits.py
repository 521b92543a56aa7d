"""Habits of a loop for DistributedDataParallel, under an engine: each is right, refused or warned about, by name.

`HABITS` is the list. Every habit runs under zero1 and zero3, in fp32 and in bf16, on two ranks. An outcome is RIGHT,
where the habit itself asserts that nothing is lost, or the words of the error or the warning that say what to write
instead.
"""

import warnings

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import GradientError, HabitWarning, ModelChangedError
from support import ranks
from support.training import make_batch, make_model, make_sgd

RIGHT = "right"


class Loop:
    """What a user's script has: the model and optimizer that were passed to `initialize`, and the engine."""

    def __init__(self, preset, compute, rank):
        self.rank = rank
        self.model = make_model("mlp")
        self.optimizer = make_sgd(self.model)
        config = {"preset": preset, "precision": {"compute": compute}}
        self.engine = shardwise.initialize(self.model, self.optimizer, config)

    def loss(self, step=0, rank=None):
        return self.model(make_batch(self.model, self.rank if rank is None else rank, step)).float()

    def weights(self):
        return {name: self.engine.full_param(name) for name, _ in self.model.named_parameters()}


def same(left, right, **tolerance):
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], **(tolerance or {"rtol": 0, "atol": 0}))


def clip_grad_norm(loop, tmp_path):
    loop.loss().backward()
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)


def optimizer_step(loop, tmp_path):
    loop.loss().backward()
    loop.optimizer.step()


def optimizer_zero_grad(loop, tmp_path):
    before = loop.weights()
    loop.loss().backward()
    loop.optimizer.zero_grad()
    loop.engine.step()
    same(loop.weights(), before)


def grad_scaler(loop, tmp_path):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loop.loss()).backward()
    scaler.step(loop.optimizer)


def backward_twice(loop, tmp_path):
    together = Loop(loop.preset, loop.compute, loop.rank)
    (together.loss(0) + together.loss(1)).backward()
    together.engine.step()
    expected = together.weights()
    together.engine.destroy()
    loop.loss(0).backward()
    loop.loss(1).backward()
    loop.engine.step()
    close = {"rtol": 1e-5, "atol": 1e-7} if loop.compute == "fp32" else {"rtol": 1e-2, "atol": 1e-3}
    same(loop.weights(), expected, **close)


def state_dict_on_one_rank(loop, tmp_path):
    if loop.rank == 0:
        state = loop.model.state_dict()
        assert not any(value.isnan().any() for value in state.values())
    loop.loss().backward()
    loop.engine.step()


def torch_save(loop, tmp_path):
    loop.loss().backward()
    loop.engine.step()
    torch.save(loop.model.state_dict(), tmp_path / f"{loop.rank}.pt")
    plain = make_model("mlp").to(next(loop.model.parameters()).dtype)
    plain.load_state_dict(torch.load(tmp_path / f"{loop.rank}.pt"))
    expected = {name: value.to(plain.get_parameter(name).dtype) for name, value in loop.weights().items()}
    same({name: param.detach() for name, param in plain.named_parameters()}, expected)


def read_grad(loop, tmp_path):
    loop.loss().backward()
    loop.model.layers[0].weight.grad.norm()


def write_data(loop, tmp_path):
    name, weight = next(iter(loop.model.named_parameters()))
    before = loop.engine.full_param(name).clone()
    weight.data.add_(1.0)
    (0 * loop.loss()).backward()
    loop.engine.step()
    torch.testing.assert_close(loop.engine.full_param(name), before + 1.0)


def no_distributed_sampler(loop, tmp_path):
    for step in range(12):
        loop.loss(step, rank=0).backward()
        loop.engine.step()


CLIP = (GradientError, r"engine\.clip_grad_norm_\(max_norm\) instead of torch\.nn\.utils\.clip_grad_norm_")
STEP = (GradientError, r"call engine\.step\(\)")
SCALER = (GradientError, r"Instead of torch\.amp\.GradScaler set precision\.compute: fp16")
READ = (GradientError, r"to read, engine\.full_grad\(name\)")
TWICE = (RuntimeError, r"already reduced in this step.*sum of the losses, or inside engine\.no_sync\(\)")
ALONE = (shardwise.DisagreementError, r"state_dict .* under sharded weights.*a call behind `if rank == 0`")
WRITTEN = (ModelChangedError, r"written in place.*inside `with shardwise\.gathered\(params, write=True\):`")
NOWHERE = (RuntimeError, r"add_ would write nowhere: write inside `with shardwise\.gathered\(params, write=True\):`")
SAMPLER = (HabitWarning, r"torch\.utils\.data\.DistributedSampler")

# habit: what is done; zero1 in fp32; zero1 in bf16; zero3
HABITS = {
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)": (clip_grad_norm, CLIP, CLIP, CLIP),
    "optimizer.step()": (optimizer_step, STEP, STEP, STEP),
    "optimizer.zero_grad()": (optimizer_zero_grad, RIGHT, RIGHT, RIGHT),
    "GradScaler": (grad_scaler, SCALER, SCALER, SCALER),
    "loss.backward() twice": (backward_twice, TWICE, TWICE, RIGHT),
    "model.state_dict() on one rank": (state_dict_on_one_rank, RIGHT, RIGHT, ALONE),
    "torch.save(model.state_dict(), path)": (torch_save, RIGHT, RIGHT, RIGHT),
    "p.grad.norm()": (read_grad, READ, READ, READ),
    "p.data.add_(1.0)": (write_data, RIGHT, WRITTEN, NOWHERE),
    "no DistributedSampler": (no_distributed_sampler, SAMPLER, SAMPLER, SAMPLER),
}
CASES = [("zero1", "fp32"), ("zero1", "bf16"), ("zero3", "fp32"), ("zero3", "bf16")]


@ranks(2)
@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_is_never_silently_wrong(rank, world_size, habit, tmp_path):
    do, *outcomes = HABITS[habit]
    for (preset, compute), outcome in zip(CASES, (*outcomes, outcomes[-1]), strict=True):
        loop = Loop(preset, compute, rank)
        loop.preset, loop.compute = preset, compute
        if outcome == RIGHT:
            with warnings.catch_warnings():
                warnings.simplefilter("error", HabitWarning)
                do(loop, tmp_path)
        elif outcome is SAMPLER:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                do(loop, tmp_path)
            said = [str(each.message) for each in caught if issubclass(each.category, HabitWarning)]
            assert len(said) == (rank == 0)
            assert not said or outcome[1].replace("\\", "") in said[0]
        else:
            with pytest.raises(outcome[0], match=outcome[1]):
                do(loop, tmp_path)
        loop.engine.destroy()
