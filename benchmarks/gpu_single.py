"""W = 1 over NCCL: tokens/s and peak of each stage beside two plain torch recipes, in one run on one GPU.

    python benchmarks/gpu_single.py --size 1.3b
    python benchmarks/gpu_single.py --size 1.3b --compile

Rows: `plain_bf16` (bf16 weights, fp32 master copies), `plain_autocast` (fp32 weights), and presets. All with fused
AdamW, clipping at 1.0 and activation checkpointing of every block; with --compile, every block through torch.compile.

Each row is made, measured and dropped before the next. With --rounds, all are made first and take turns, so that noise
hits all alike, and the median of the rounds counts: for small models, whose steps are bound by the host.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.models.built_in import GPT

SIZES = {"0.1b": (768, 12, 12), "1.3b": (2048, 24, 16), "7b": (4096, 32, 32)}
LENGTH, VOCABULARY, WARM_STEPS = 2048, 32000, 3

Step = Callable[[torch.Tensor], torch.Tensor]


class Checkpointed(torch.nn.Module):
    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def build(args: argparse.Namespace, dtype: torch.dtype = torch.float32, checkpointed: bool = True) -> GPT:
    hidden, layers, heads = SIZES[args.size]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(hidden, layers, heads, VOCABULARY, LENGTH + 1).to(dtype)
    for block in model.blocks if args.compile else ():
        block.compile()
    if checkpointed:
        model.blocks = torch.nn.ModuleList(Checkpointed(block) for block in model.blocks)
    return model


def plain_bf16(args: argparse.Namespace) -> Step:
    model = build(args, torch.bfloat16)
    params = list(model.parameters())
    masters = [param.detach().float().requires_grad_() for param in params]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

    def step(data: torch.Tensor) -> torch.Tensor:
        loss = model(data)
        loss.backward()
        for master, param in zip(masters, params, strict=True):
            master.grad, param.grad = param.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_copy_([param.data for param in params], masters)
        return loss

    return step


def plain_autocast(args: argparse.Namespace) -> Step:
    model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(data: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(data)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def ours(args: argparse.Namespace, preset: str) -> Step:
    model = build(args, checkpointed=False)
    config = {
        "preset": preset,
        "precision": {"compute": "bf16"},
        "gradients": {"clip_norm": 1.0},
        "checkpointing": {"enabled": True},
    }
    engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-4), config)

    def step(data: torch.Tensor) -> torch.Tensor:
        loss = engine(data)
        engine.backward(loss)
        engine.step()
        return loss

    return step


class Row:
    """One way to train, warmed up; its peak is what it added to what was there."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        plain = {"plain_bf16": plain_bf16, "plain_autocast": plain_autocast}
        self.name, self._args = name, args
        self._step_s: list[float] = []
        self._issue_s: list[float] = []
        before = torch.cuda.memory_allocated()
        self._step = plain[name](args) if name in plain else ours(args, name)
        self._data = torch.randint(VOCABULARY, (args.batch, LENGTH + 1), device="cuda")
        torch.cuda.reset_peak_memory_stats()
        for _ in range(WARM_STEPS):
            self._step(self._data)
        torch.cuda.synchronize()
        self._peak_bytes = torch.cuda.max_memory_allocated() - before

    def turn(self) -> None:
        """Take some steps by the clock."""
        count = self._args.steps
        started = time.perf_counter()
        for _ in range(count):
            self._loss = self._step(self._data)
        self._issue_s.append((time.perf_counter() - started) / count)
        torch.cuda.synchronize()
        self._step_s.append((time.perf_counter() - started) / count)

    def result(self) -> dict:
        step_s = statistics.median(self._step_s)
        return {
            "row": self.name,
            "compiled": self._args.compile,
            "tokens_per_s": round(self._args.batch * LENGTH / step_s),
            "step_ms": round(step_s * 1e3, 2),
            "step_ms_of_rounds": [round(seconds * 1e3, 2) for seconds in self._step_s],
            "host_ms": round(statistics.median(self._issue_s) * 1e3, 2),
            "peak_gib": round(self._peak_bytes / 2**30, 2),
            "loss": self._loss.item(),
        }


def in_turn(names: list[str], args: argparse.Namespace) -> None:
    rows = [Row(name, args) for name in names]
    for _ in range(args.rounds):
        for row in rows:
            row.turn()
    for row in rows:
        print(json.dumps(row.result()), flush=True)


def one_by_one(names: list[str], args: argparse.Namespace) -> None:
    for name in names:
        row = Row(name, args)
        row.turn()
        print(json.dumps(row.result()), flush=True)
        del row
        torch._dynamo.reset()  # what it compiled keeps the model
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="1.3b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=0, help="so many turns of --steps steps each, all rows at once")
    parser.add_argument("--rows", default="plain_bf16,plain_autocast,zero0,zero1,zero2,zero3")
    parser.add_argument("--compile", action="store_true", help="every block through torch.compile")
    args = parser.parse_args()
    torch.cuda.set_device(0)
    small = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda")
    _ = small @ small  # cuBLAS takes its workspace, which would count for the first row alone
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    (in_turn if args.rounds else one_by_one)(args.rows.split(","), args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
