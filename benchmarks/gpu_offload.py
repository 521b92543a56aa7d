"""Training off the device on one GPU: tokens/s, device peak and host memory, one row in one process.

    python benchmarks/gpu_offload.py --row zero2_offload
    python benchmarks/gpu_offload.py --row deepspeed_zero2_offload
    python benchmarks/gpu.py offload     # the comparison, every row in a process of its own

A 2.68 B GPT (hidden 2560, 32 layers, vocabulary 32000, 8 x 1024 tokens) in bf16 with AdamW, clipping at 1.0 and
activation checkpointing, unless `--size` names another. Peers run with the settings of `shardwise compare` and their
own optimizers for the CPU.

Where states rest on the disk, below `--nvme-path` (or SHARDWISE_NVME), what the disk gives by itself is measured first
(see `disk_probe`): `of_raw` is what their traffic reached of that, all of a step's time counted.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from disk_probe import probe, yardstick_gbs
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.compare.job import peer_settings
from shardwise.models.built_in import GPT

SIZES = {
    "0.1b": (768, 12, 12),
    "2.7b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "15b": (5120, 48, 40),
    "17b": (5120, 54, 40),
    "20b": (6144, 44, 48),
    "30b": (7168, 48, 56),
}
LENGTH, VOCABULARY, WARM_STEPS = 1024, 32000, 3
RATE = 1e-4

Step = Callable[[torch.Tensor], torch.Tensor]


def build(args: argparse.Namespace) -> GPT:
    hidden, layers, heads = SIZES[args.size]
    torch.manual_seed(0)
    with torch.device("cuda"):
        return GPT(hidden, layers, heads, VOCABULARY, LENGTH + 1)


def checkpointed(model: GPT) -> GPT:
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    return model


def uses_disk(args: argparse.Namespace) -> bool:
    return "nvme" in args.row or '"disk"' in args.placement


def ours(args: argparse.Namespace) -> tuple[Step, Any]:
    config: dict[str, Any] = {
        "preset": args.row,
        "placement": json.loads(args.placement),
        "precision": {"compute": "bf16"},
        "gradients": {"clip_norm": 1.0},
        "checkpointing": {"enabled": True},
        "offload": {"nvme_path": args.nvme_path, **json.loads(args.offload)},
    }
    model = build(args)
    engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters(), lr=RATE), config)

    def step(data: torch.Tensor) -> torch.Tensor:
        loss = engine(data)
        engine.backward(loss)
        engine.step()
        return loss

    return step, engine


def deepspeed(args: argparse.Namespace) -> tuple[Step, Any]:
    import deepspeed

    deepspeed.utils.logger.setLevel("ERROR")
    stage = args.row.removeprefix("deepspeed_").removesuffix("_offload")
    config = peer_settings(f"deepspeed_{stage}")
    model = checkpointed(build(args))
    zero = config["zero_optimization"]
    numel = sum(param.numel() for param in model.parameters())
    for key, value in zero.items():
        if value == "auto":
            zero[key] = min(numel, 500_000_000)
    zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if stage == "zero3":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config |= {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01}},
    }
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(data: torch.Tensor) -> torch.Tensor:
        loss = engine(data)
        engine.backward(loss)
        engine.step()
        return loss

    return step, None


def fsdp2(args: argparse.Namespace) -> tuple[Step, Any]:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    model = checkpointed(build(args))
    mesh = dist.device_mesh.init_device_mesh("cuda", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    options = {"mesh": mesh, "mp_policy": policy, "offload_policy": CPUOffloadPolicy(pin_memory=True)}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def step(data: torch.Tensor) -> torch.Tensor:
        loss = model(data)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, None


def host_gib(field: str) -> float:
    """A line of /proc/self/status: VmRSS now, VmHWM at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith(field)) / 2**20, 2)


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """The row, and the engine, which is still there."""
    make = deepspeed if args.row.startswith("deepspeed") else fsdp2 if args.row.startswith("fsdp2") else ours
    rates = {}
    if uses_disk(args):
        Path(args.nvme_path).mkdir(parents=True, exist_ok=True)
        rates = probe(args.nvme_path, int(args.probe_gib * 2**30))
    started = time.perf_counter()
    step, engine = make(args)
    built_s = time.perf_counter() - started
    data = torch.randint(VOCABULARY, (args.batch, LENGTH + 1), device="cuda")
    note(f"built in {built_s:.0f} s")
    losses = [step(data) for _ in range(args.warm)]
    torch.cuda.synchronize()
    note(f"warm after {time.perf_counter() - started:.0f} s")
    torch.cuda.reset_peak_memory_stats()
    moved = dict(engine.report().moved_bytes) if engine is not None else {}
    started = time.perf_counter()
    losses += [step(data) for _ in range(args.steps)]
    issued_s = time.perf_counter() - started
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    numel = sum(getattr(param, "ds_numel", param.numel()) for param in _parameters(engine, step))
    seen: dict[str, Any] = {
        "row": args.name or args.row,
        "size": args.size,
        "parameters": numel,
        "tokens_per_s": round(args.batch * LENGTH * args.steps / seconds),
        "step_ms": round(seconds / args.steps * 1e3, 1),
        "host_ms": round(issued_s / args.steps * 1e3, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "rss_gib": host_gib("VmRSS"),
        "peak_rss_gib": host_gib("VmHWM"),
        "built_s": round(built_s, 1),
        "losses": [round(loss.item(), 4) for loss in losses],
    }
    if engine is not None:
        report = engine.report()
        seen["moved_gb_per_step"] = {
            way: round((size - moved.get(way, 0)) / args.steps / 1e9, 3) for way, size in report.moved_bytes.items()
        }
        seen["tier_gib"] = {tier: round(size / 2**30, 2) for tier, size in report.tier_bytes.items()}
        seen["tier_peak_gib"] = {tier: round(size / 2**30, 2) for tier, size in report.tier_peak_bytes.items()}
        if rates:
            seen |= _of_raw(rates, seen["moved_gb_per_step"], seconds / args.steps)
    return seen, engine


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _of_raw(rates: dict[str, float], moved_gb: dict[str, float], step_s: float) -> dict[str, Any]:
    """What the traffic of states reached, and what the disk gives for as much of either kind."""
    read, written = moved_gb["disk to host"], moved_gb["host to disk"]
    reached, raw = (read + written) / step_s, yardstick_gbs(rates, read, written)
    return {
        "raw_gbs": {way: round(rate, 3) for way, rate in rates.items()},
        "disk_gbs": round(reached, 3),
        "of_raw": round(reached / raw, 3),
    }


def _parameters(engine: Any, step: Step) -> list[torch.Tensor]:
    if engine is not None:
        return [param for unit in engine.units for param in unit.params]
    cells = {name: cell.cell_contents for name, cell in zip(step.__code__.co_freevars, step.__closure__, strict=True)}
    return list((cells.get("model") or cells["engine"].module).parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", default="zero2_offload", help="a preset, deepspeed_zero2_offload, ..., fsdp2_offload")
    parser.add_argument("--name", help="how the row is called in the result")
    parser.add_argument("--offload", default="{}", help="the configuration's offload section, as JSON")
    parser.add_argument("--placement", default="{}", help="the configuration's placement section, as JSON")
    folder = os.environ.get("SHARDWISE_NVME", str(Path(tempfile.gettempdir()) / "shardwise-nvme"))
    parser.add_argument("--nvme-path", default=folder, help="a folder on the disk to use")
    parser.add_argument("--probe-gib", type=float, default=16, help="how much the raw measurement reads and writes")
    parser.add_argument("--size", choices=SIZES, default="2.7b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm", type=int, default=WARM_STEPS)
    args = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    row, engine = measure(args)
    print(json.dumps(row), flush=True)
    if engine is not None:
        engine.destroy()  # a minute, where a hundred GiB of the host are to be unpinned
    os._exit(0)  # a peer's threads may not end


if __name__ == "__main__":
    main()
