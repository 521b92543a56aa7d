"""From the optimizer and scheduler sections to torch objects."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from shardwise.config import schedules
from shardwise.config.elementwise import Lion, UncorrectedAdam
from shardwise.config.sections import OptimizerSection, SchedulerSection
from shardwise.config.values import flag, left_open_out, nearest, real
from shardwise.errors import ConfigError

_REFUSED = {
    "LBFGS": "it evaluates the loss several times a step",
    "SparseAdam": "it needs sparse gradients",
    "Optimizer": "it is the base class",
}
_FLAGS = {"amsgrad", "bias_correction", "capturable", "centered", "decoupled_weight_decay", "differentiable"} | {
    "foreach",
    "fused",
    "maximize",
    "nesterov",
}
_NUMBERS = {"alpha", "dampening", "eps", "initial_accumulator_value", "lambd", "lr", "lr_decay", "momentum"} | {
    "momentum_decay",
    "rho",
    "t0",
    "weight_decay",
}


def check_optimizer(name: str, params: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The optimizer's proper name and its parameters with proper types, or ValueError."""
    known = {other.lower(): other for other in [*_torch_names(), "Lion"]}
    found = known.get(name.strip().lower())
    if found is None:
        raise ValueError(f"name {name!r}: neither Lion nor a name of torch.optim{nearest(name, known.values())}")
    if found in _REFUSED:
        raise ValueError(f"name {name!r}: {found} is not supported: {_REFUSED[found]}")
    allowed = _parameters(found)
    result = {}
    for key, value in left_open_out(params).items():
        if key not in allowed:
            raise ValueError(f"params.{key}: unknown key of {found}{nearest(key, allowed)}")
        try:
            result[key] = _typed(key, value)
        except ValueError as error:
            raise ValueError(f"params.{key} = {value!r}: {error}") from None
    return found, result


def build_optimizer(section: OptimizerSection, params: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimizer of a section on `params` (tensors, named tensors or parameter groups).

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> build_optimizer(OptimizerSection(name="AdamW", params={"lr": 1e-4}), [weight]).defaults["lr"]
    0.0001
    """
    arguments = dict(section.params)
    corrected = arguments.pop("bias_correction", True)
    kind: Any = Lion if section.name == "Lion" else getattr(torch.optim, section.name)
    if not corrected:
        kind, arguments["decoupled"] = UncorrectedAdam, section.name == "AdamW"
    try:
        built: torch.optim.Optimizer = kind(params, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer {section.name} with {section.params}: {error}") from error
    return built


def build_scheduler(
    section: SchedulerSection, optimizer: torch.optim.Optimizer, *, total_steps: int | None = None
) -> LRScheduler:
    """The schedule of a section on an optimizer. `total_steps` stands in for a total_num_steps that was left open.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    >>> section = SchedulerSection(name="WarmupLR", params={"warmup_num_steps": 10, "warmup_type": "linear"})
    >>> build_scheduler(section, optimizer).get_last_lr()
    [0.0]
    """
    params = dict(section.params)
    if schedules.needs_total_steps(section.name) and params.setdefault("total_num_steps", total_steps) is None:
        raise ConfigError(
            f"scheduler {section.name}: params.total_num_steps was left open; give it in the configuration, "
            "or pass total_steps"
        )
    return FormulaLR(optimizer, section.name, params)


class FormulaLR(LRScheduler):
    """A torch scheduler whose rates (and for OneCycle momenta) are formulas of the iteration."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, params: dict[str, Any]) -> None:
        first = params.pop("last_batch_iteration", -1)
        bases = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
        self._offset = first
        self._rates = [schedules.rate(name, params, float(base), i) for i, base in enumerate(bases)]
        self._momentum = schedules.momentum(params, 0) if name == "OneCycle" else None
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        iteration = self.last_epoch + self._offset
        if self._momentum is not None:
            self._set_momentum(self._momentum(iteration))
        return [rate(iteration) for rate in self._rates]

    def _set_momentum(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (value, *group["betas"][1:])
            elif "momentum" in group:
                group["momentum"] = value

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "_last_lr": self._last_lr}


def _torch_names() -> list[str]:
    everything = vars(torch.optim).items()
    return [name for name, kind in everything if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)]


def _parameters(name: str) -> list[str]:
    kind: Any = Lion if name == "Lion" else getattr(torch.optim, name)
    own = [key for key in inspect.signature(kind.__init__).parameters if key not in ("self", "params")]
    return [*own, "bias_correction"] if name in ("Adam", "AdamW") else own


def _typed(key: str, value: Any) -> Any:
    if key in _FLAGS:
        return None if value is None else flag(value)
    if key in _NUMBERS:
        number = real(value)
        if number < 0:
            raise ValueError("expected a number >= 0")
        return number
    if key == "betas":
        pair = tuple(real(each) for each in value) if isinstance(value, list | tuple) else ()
        if len(pair) != 2 or not all(0 <= each < 1 for each in pair):
            raise ValueError("expected two numbers in [0, 1), such as [0.9, 0.999]")
        return pair
    return value
