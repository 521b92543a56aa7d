"""Loss scaling in fp16: the scale's course, and steps that are skipped on all ranks without a trace."""

import random

import pytest
import torch

import shardwise
from shardwise.config.sections import LossScale
from shardwise.optim.loss_scale import Scaler
from support import ranks
from support.training import digest, make_batch, make_model, make_optimizer, make_sgd, start, train_step

STAGES = ["zero0", "zero1", "zero2", "zero3"]


class Reference:
    """The rules as the documentation of fp16 settings gives them, in plain numbers."""

    def __init__(self, settings):
        self.settings = settings
        self.scale = settings.initial
        self.patience = settings.hysteresis
        self.iteration, self.last_overflow = 0, -1

    def update(self, overflow):
        settings = self.settings
        if overflow:
            if self.patience == 1:
                self.scale = max(self.scale / 2, settings.minimum)
            else:
                self.patience -= 1
            self.last_overflow = self.iteration
        else:
            if settings.consecutive_hysteresis:
                self.patience = settings.hysteresis
            if (self.iteration - self.last_overflow) % settings.window == 0:
                self.scale *= 2
                self.patience = settings.hysteresis
        self.iteration += 1


@pytest.mark.parametrize("window", [1, 3, 10])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("consecutive", [False, True])
def test_the_scale_follows_the_reference(window, hysteresis, consecutive):
    settings = LossScale(
        initial=2.0**10, window=window, hysteresis=hysteresis, consecutive_hysteresis=consecutive, minimum=0.5
    )
    scaler, reference = Scaler(settings, torch.device("cpu")), Reference(settings)
    draw = random.Random(f"{window}-{hysteresis}-{consecutive}")
    for _ in range(300):
        overflow = draw.random() < 0.4 or reference.scale > 2.0**24
        scaler.update(torch.tensor(overflow))
        reference.update(overflow)
        assert scaler.scale.item() == reference.scale


def test_a_constant_scale_stays():
    scaler = Scaler(LossScale(dynamic=False, initial=128.0), torch.device("cpu"))
    for overflow in (True, False, True):
        scaler.update(torch.tensor(overflow))
    assert scaler.scale.item() == 128.0


def fp16(preset, **loss_scale):
    return {"preset": preset, "precision": {"compute": "fp16", "loss_scale": {"initial": 256.0, **loss_scale}}}


def make_rmsprop(model):
    """Has no fused kernel, so that the host decides."""
    return torch.optim.RMSprop(model.parameters(), lr=0.01)


def plant(engine, rank, value):
    """Have one element of one gradient of one rank overflow in the next backward."""
    weight = engine.module.layers[2].weight

    def hook(grad):
        handle.remove()
        grad = grad.clone()
        grad[1, 1] = value if rank == 1 else 0.0
        return grad

    handle = weight.register_hook(hook)


@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("make", [make_optimizer, make_sgd, make_rmsprop])
def test_an_overflow_on_one_rank_skips_the_step_on_all(rank, world_size, preset, value, make):
    engine = start("mlp", fp16(preset, hysteresis=1, window=2), make)
    scales = []
    for step in range(6):
        before = digest(engine)
        if step in (0, 3):
            plant(engine, rank, value)
        train_step(engine, rank, step)
        assert engine.was_skipped == (step in (0, 3))
        assert (digest(engine) == before) == engine.was_skipped
        scales.append(engine.loss_scale)
    assert scales == [128.0, 128.0, 256.0, 128.0, 128.0, 256.0]
    assert engine.steps == 6
    assert engine.skipped_steps == 2
    assert not engine.grad_norm.isnan()
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_stages_agree_through_skipped_steps(rank, world_size, accumulation):
    seen = {}
    for preset in STAGES:
        order = "sharded" if accumulation > 1 else None
        config = {**fp16(preset), "batch": {"accumulation": accumulation}, "gradients": {"clip_norm": 0.1}}
        config["gradients"] |= {"order": order} if order else {}
        engine = start("mlp", config)
        hashes = []
        for step in range(5):
            if step in (1, 3):
                plant(engine, rank, torch.inf)
            train_step(engine, rank, step)
            hashes.append((digest(engine), engine.loss_scale, engine.grad_norm.item()))
        seen[preset] = str(hashes)
        engine.destroy()
    assert len(set(seen.values())) == 1


@ranks(2)
@pytest.mark.parametrize("autocast", [False, True])
def test_fp16_follows_fp32(rank, world_size, autocast):
    losses = []
    for precision in ({"compute": "fp32"}, {"compute": "fp16", "autocast": autocast}):
        engine = start("gpt", {"preset": "zero3", "precision": precision})
        for _ in range(8):
            loss = train_step(engine, rank, 0)
        losses.append(loss)
        engine.destroy()
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@ranks(1)
def test_the_scheduler_sits_skipped_steps_out(rank, world_size):
    model = make_model("mlp")
    engine = shardwise.initialize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        fp16("zero1"),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    for step in range(3):
        if step == 1:
            model.layers[2].weight.register_hook(lambda grad: grad * torch.inf if engine.steps == 1 else grad)
        train_step(engine, 0, step)
    assert engine.skipped_steps == 1
    assert engine.lr_scheduler.get_last_lr() == pytest.approx([2.5e-4])
    engine.destroy()


def test_overflow_at_the_smallest_scale_is_an_error():
    engine = start("mlp", fp16("zero1", initial=1.0, minimum=1.0, hysteresis=1))
    engine.module.layers[2].weight.register_hook(lambda grad: grad * torch.inf)
    train_step(engine, 0, 0)
    assert engine.skipped_steps == 1  # a look does not raise: one rank alone may look
    for step in (1, 2):
        with pytest.raises(FloatingPointError, match="smallest loss scale"):
            train_step(engine, 0, step)
    engine.destroy()


class OwnStep(torch.optim.AdamW):
    """Has a step of its own, which knows nothing of `found_inf`."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["lr"] * param.grad


def test_an_optimizer_with_a_step_of_its_own_is_skipped_by_the_host():
    engine = start("mlp", fp16("zero1"), lambda model: OwnStep(model.parameters(), lr=0.01))
    train_step(engine, 0, 0)
    before = digest(engine)
    engine.module.layers[2].weight.register_hook(lambda grad: grad * torch.inf)
    train_step(engine, 0, 1)
    assert engine.was_skipped
    assert digest(engine) == before
    engine.destroy()


def test_scaled_losses_have_plain_backwards():
    """As many as there are, in any order; a loss that is not scaled is refused all the same."""
    engine, plain = (start("mlp", fp16("zero2"), make_sgd) for _ in range(2))
    x, y = (make_batch(engine.module, 0, step) for step in range(2))
    first, second = engine.scale(engine(x)), engine.scale(engine(y))
    with pytest.raises(RuntimeError, match="Loss scaling is required"):
        engine(x).backward()
    second.backward(retain_graph=True)
    first.backward()
    second.backward()
    for batch in (y, x, y):
        plain.backward(plain(batch))
    for name, _ in plain.module.named_parameters():
        torch.testing.assert_close(engine.full_grad(name), plain.full_grad(name))
    engine.destroy()
    plain.destroy()


def test_a_plain_backward_is_refused():
    engine = start("mlp", fp16("zero2"))
    loss = engine(make_batch(engine.module, 0, 0))
    with pytest.raises(RuntimeError, match=r"engine\.backward\(loss\)"):
        loss.backward()
    train_step(engine, 0, 0)
    engine.destroy()
