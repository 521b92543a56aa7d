"""What it costs to check that all ranks issue the same operations, as a share of a step.

    torchrun --nproc-per-node 2 benchmarks/agreement_cost.py --model gpt-26m --preset zero3

Two engines take steps in turn in the same processes, one with the check and one without; the ratio of their times is
noisy on a busy machine. So the parts are measured alone as well: what an operation pays in issuing and waiting, times
the operations of a step, and the polls of the thread beside. One JSON line, of rank 0.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import shardwise
from shardwise.agreement import agreement as watch
from shardwise.agreement.log import Log, Ticket
from shardwise.models.built_in import BUILT_IN

WARM_STEPS, CALLS, POLLS = 3, 20_000, 200


class Unchecked(watch.Agreement):
    """Sends and waits as the check does, each operation under a tag of its own, and polls nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        self._issued = 0

    def name_units(self, names: Sequence[str]) -> None:
        pass

    def issue(self, channel: str, text: str, has_tags: bool, unit: str = "") -> Ticket:
        self._issued += 1
        return Ticket(channel, self._issued, text, self._issued)

    def wait(self, ticket: Ticket, works: list[Any], sends: list[Any]) -> None:
        for pending in (works, sends):
            while pending:
                pending.pop(0).wait()

    def close(self, why: str = "") -> None:
        pass


def build(name: str, preset: str) -> shardwise.Engine:
    torch.manual_seed(0)
    model = BUILT_IN[name].build()
    config = {"preset": preset, "gradients": {"clip_norm": 1.0}}
    return shardwise.initialize(model, torch.optim.AdamW(model.parameters()), config)


def seconds(engine: shardwise.Engine, name: str, index: int) -> float:
    batch = BUILT_IN[name].make_batch(dist.get_rank(), index)
    dist.barrier()
    started = time.perf_counter()
    engine.backward(engine(**batch))
    engine.step()
    for unit in engine.units:
        unit.weights.wait_gather()
    return time.perf_counter() - started


def count(agreement: watch.Agreement) -> int:
    return sum(issued[-1].number + 1 for issued in agreement._log._issued.values())


def alone(agreement: watch.Agreement) -> tuple[float, float]:
    """Seconds of one operation's bookkeeping, and of one poll."""
    other = Log()
    with mock.patch.object(agreement, "_log", other):
        started = time.perf_counter()
        for _ in range(CALLS):
            agreement.wait(agreement.issue("gather", f"gather blocks.{7}, {1024} elements", True), [], [])
        operation_s = (time.perf_counter() - started) / CALLS
    started = time.thread_time()
    for _ in range(POLLS):
        agreement.poll()
    return operation_s, (time.thread_time() - started) / POLLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(BUILT_IN), default="gpt-26m")
    parser.add_argument("--preset", default="zero3")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    checked = build(args.model, args.preset)
    with mock.patch("shardwise.comm.comm.Agreement", Unchecked):
        plain = build(args.model, args.preset)
    agreement = checked._comm._agreement
    assert agreement is not None
    times: dict[str, list[float]] = {"checked": [], "plain": []}
    for index in range(WARM_STEPS + args.steps):
        before = count(agreement)
        turns = [("checked", checked), ("plain", plain)]
        for name, engine in turns if index % 2 else reversed(turns):
            times[name].append(seconds(engine, args.model, index))
        operations = count(agreement) - before
    step_s = {name: statistics.median(values[WARM_STEPS:]) for name, values in times.items()}
    ratios = [c / p for c, p in zip(times["checked"][WARM_STEPS:], times["plain"][WARM_STEPS:], strict=True)]
    operation_s, poll_s = alone(agreement)
    share = operations * operation_s / step_s["plain"] + poll_s / agreement.poll_s
    if dist.get_rank() == 0:
        found = {
            "model": args.model,
            "preset": args.preset,
            "units": len(checked.units),
            "operations_per_step": operations,
            "step_ms": round(step_s["plain"] * 1e3, 1),
            "checked_over_plain": round(statistics.median(ratios), 3),
            "operation_us": round(operation_s * 1e6, 2),
            "poll_us": round(poll_s * 1e6),
            "share_percent": round(share * 100, 3),
        }
        print(json.dumps(found), flush=True)
    dist.barrier()
    checked.destroy()
    plain.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
