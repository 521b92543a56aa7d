"""Optimizers and schedules built from their sections, against the documented formulas."""

import math

import pytest
import torch

from shardwise.config import Config
from shardwise.config.sections import OptimizerSection, SchedulerSection
from shardwise.errors import ConfigError


def parameter(*values):
    weight = torch.nn.Parameter(torch.tensor(values or (1.0, -2.0)))
    weight.grad = torch.tensor([0.5, -0.25][: len(weight)])
    return weight


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Lion", "adagrad", "NAdam", "RMSprop"])
def test_optimizers_step(name):
    weight = parameter()
    optimizer = OptimizerSection(name=name, params={"lr": 0.1}).build([weight])
    before = weight.detach().clone()
    optimizer.step()
    assert type(optimizer).__name__.lower() == name.lower()
    assert not torch.equal(before, weight)


def test_parameter_groups_are_kept():
    groups = [{"params": [parameter()], "weight_decay": 0.0}, {"params": [parameter()]}]
    optimizer = OptimizerSection(name="AdamW", params={"lr": 0.1, "weight_decay": 0.5}).build(groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.5]


def test_lion_follows_its_paper():
    weight = parameter()
    optimizer = OptimizerSection(name="Lion", params={"lr": 0.1, "betas": [0.9, 0.99], "weight_decay": 0.1}).build(
        [weight]
    )
    value, mean, grad = 1.0, 0.0, 0.5
    for _ in range(3):
        optimizer.step()
        value = value * (1 - 0.1 * 0.1) - 0.1 * math.copysign(1, 0.9 * mean + 0.1 * grad)
        mean = 0.99 * mean + 0.01 * grad
    assert weight[0].item() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adam_without_bias_correction(name):
    weight = parameter()
    params = {"lr": 0.1, "bias_correction": False, "weight_decay": 0.2, "betas": (0.8, 0.9)}
    optimizer = OptimizerSection(name=name, params=params).build([weight])
    value, mean, square = 1.0, 0.0, 0.0
    for _ in range(3):
        optimizer.step()
        grad = 0.5 + (0.2 * value if name == "Adam" else 0.0)
        value *= 1 - (0.1 * 0.2 if name == "AdamW" else 0.0)
        mean, square = 0.8 * mean + 0.2 * grad, 0.9 * square + 0.1 * grad**2
        value -= 0.1 * mean / (math.sqrt(square) + 1e-8)
    assert weight[0].item() == pytest.approx(value, rel=1e-5)


def rates(name, steps, lr=1.0, total_steps=None, **params):
    optimizer = torch.optim.SGD([parameter()], lr=lr, momentum=0.5)
    scheduler = SchedulerSection(name=name, params=params).build(optimizer, total_steps=total_steps)
    seen = []
    for _ in range(steps):
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        scheduler.step()
    return [rate for rate, _ in seen], [momentum for _, momentum in seen]


def test_warmup_lr():
    seen, _ = rates("WarmupLR", 8, warmup_min_lr=0.1, warmup_max_lr=0.5, warmup_num_steps=4, warmup_type="linear")
    assert seen == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])
    seen, _ = rates("WarmupLR", 6, warmup_max_lr=0.5, warmup_num_steps=4)
    assert seen == pytest.approx([0, 0, 0.5 * math.log(2) / math.log(4), 0.5 * math.log(3) / math.log(4), 0.5, 0.5])


def test_warmup_decay_lr():
    seen, _ = rates("WarmupDecayLR", 9, warmup_max_lr=0.6, warmup_num_steps=2, warmup_type="linear", total_num_steps=6)
    assert seen == pytest.approx([0, 0, 0.3, 0.6, 0.45, 0.3, 0.15, 0, 0])
    open_ended = {"warmup_max_lr": 0.6, "warmup_num_steps": 2, "warmup_type": "linear"}
    assert rates("WarmupDecayLR", 9, total_steps=6, **open_ended)[0] == seen
    with pytest.raises(ConfigError, match=r"WarmupDecayLR: params\.total_num_steps was left open"):
        rates("WarmupDecayLR", 1, **open_ended)


def test_warmup_cosine_lr():
    seen, _ = rates(
        "WarmupCosineLR", 8, lr=2.0, total_num_steps=6, warmup_num_steps=2, warmup_type="linear", cos_min_ratio=0.1
    )
    cosine = [2 * (0.1 + 0.9 * (1 + math.cos(math.pi * i / 4)) / 2) for i in (1, 2, 3, 4)]
    assert seen == pytest.approx([0, 0, 1.0, *cosine, 0.2])


def test_one_cycle():
    seen, momenta = rates(
        "OneCycle",
        8,
        cycle_min_lr=0.1,
        cycle_max_lr=0.5,
        cycle_first_step_size=2,
        cycle_second_step_size=4,
        decay_lr_rate=1.0,
        decay_step_size=1,
    )
    assert seen == pytest.approx([0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05])
    assert momenta == pytest.approx([0.9, 0.85, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9])


def test_one_cycle_moves_betas_and_can_leave_momentum_alone():
    adam = torch.optim.Adam([parameter()], betas=(0.5, 0.99))
    SchedulerSection(name="OneCycle", params={"cycle_min_lr": 0.1, "cycle_max_lr": 1}).build(adam)
    assert adam.param_groups[0]["betas"] == (0.9, 0.99)
    assert rates("OneCycle", 3, cycle_min_lr=0.1, cycle_max_lr=1, cycle_momentum=False)[1] == [0.5] * 3


def test_lr_range_test():
    seen, _ = rates("LRRangeTest", 4, lr_range_test_min_lr=0.1, lr_range_test_step_size=2, lr_range_test_step_rate=1.0)
    assert seen == pytest.approx([0.1, 0.15, 0.2, 0.25])
    stairs = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2, "lr_range_test_staircase": True}
    assert rates("LRRangeTest", 4, **stairs)[0] == pytest.approx([0.1, 0.1, 0.2, 0.2])


def test_a_schedule_resumes():
    def fresh():
        optimizer = torch.optim.SGD([parameter()], lr=1.0)
        section = SchedulerSection(name="WarmupLR", params={"warmup_num_steps": 10, "warmup_type": "linear"})
        return section.build(optimizer)

    one, two = fresh(), fresh()
    for _ in range(4):
        one.optimizer.step()
        one.step()
    two.load_state_dict(one.state_dict())
    for each in (one, two):
        each.optimizer.step()
        each.step()
    assert one.get_last_lr() == two.get_last_lr()


def test_built_from_a_deepspeed_file():
    config = Config.load(
        {"optimizer": {"type": "Adam", "params": {"lr": 3e-5, "bias_correction": False}}, "fp16": {"enabled": True}}
    )
    optimizer = config.optimizer.build([parameter()])
    assert optimizer.param_groups[0]["decoupled"] is True
    assert optimizer.param_groups[0]["lr"] == 3e-5
