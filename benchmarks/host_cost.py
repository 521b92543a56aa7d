"""What the engine costs the host, per unit and pass: a deep GPT of tiny layers, beside the same loop in plain torch.

    python benchmarks/host_cost.py --device cuda

The layers are so small that the host is the bottleneck; passes are forward, backward and update. Seconds are of the
host alone: on CUDA the device is waited for between steps, outside the clock. One JSON line per row: `inside` is what
goes by in the engine's hooks and in `step()`, launches included; `more` is what a step takes more than plain torch's,
which has a clipping and an optimizer of its own.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import shardwise
from shardwise.engine.engine import Engine
from shardwise.models.built_in import GPT
from shardwise.partition.policy import DTYPES
from shardwise.schedule.autograd import OncePerBackward
from shardwise.schedule.backward import BackwardPass
from shardwise.schedule.forward import ForwardHooks

LAYERS, PASSES, WARM_STEPS = 48, 3, 10

Step = Callable[[], None]


class Meter:
    """Seconds in functions of the engine, those that one calls in another counted once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def watch(self, owner: type, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable) -> Callable:
        def timed(*args: object, **kwargs: object) -> object:
            self._depth += 1
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                self.seconds += 0.0 if self._depth else time.perf_counter() - started

        return timed


def build(device: str) -> GPT:
    torch.manual_seed(0)
    return GPT(hidden=64, layers=LAYERS, heads=2, vocabulary=64, length=9).to(device)


def plain(device: str, data: torch.Tensor, precision: str) -> tuple[Step, int]:
    model = build(device).to(DTYPES[precision])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(data).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, 1


def ours(device: str, data: torch.Tensor, precision: str, preset: str) -> tuple[Step, int]:
    model = build(device)
    config = {
        "preset": preset,
        "precision": {"compute": precision},
        "gradients": {"clip_norm": 1.0},
        "runtime": {"min_unit_bytes": 1},
    }
    engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters()), config)

    def step() -> None:
        engine.backward(engine(data))
        engine.step()

    return step, len(engine.units)


def seconds(step: Step, device: str) -> float:
    started = time.perf_counter()
    step()
    taken = time.perf_counter() - started
    if device == "cuda":
        torch.cuda.synchronize()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--presets", default="zero0,zero1,zero2,zero3")
    args = parser.parse_args()
    torch.set_num_threads(1)
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    data = torch.randint(64, (1, 9), device=args.device)
    meter = Meter()
    meter.watch(ForwardHooks, "_enter", "_leave")
    meter.watch(BackwardPass, "begin", "end")
    meter.watch(OncePerBackward, "__call__")
    meter.watch(Engine, "step")
    made = {"plain": plain(args.device, data, args.precision)}
    made |= {preset: ours(args.device, data, args.precision, preset) for preset in args.presets.split(",")}
    times: dict[str, list[float]] = {row: [] for row in made}
    inside: dict[str, list[float]] = {row: [] for row in made}
    for _ in range(WARM_STEPS + args.steps):  # in turn, so that noise hits all alike
        for row, (step, _) in made.items():
            meter.seconds = 0.0
            times[row].append(seconds(step, args.device))
            inside[row].append(meter.seconds)
    taken, own = ({row: statistics.median(v[WARM_STEPS:]) for row, v in each.items()} for each in (times, inside))
    for row, (step, units) in made.items():
        count = units * PASSES
        result = {
            "row": row,
            "host_ms": round(taken[row] * 1e3, 2),
            "inside_us_per_unit_and_pass": round(own[row] / count * 1e6),
            "more_us_per_unit_and_pass": round((taken[row] - taken["plain"]) / count * 1e6),
        }
        print(json.dumps(result))
        if args.profile:
            profile = cProfile.Profile()
            profile.runcall(lambda step=step: [step() for _ in range(10)])
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
