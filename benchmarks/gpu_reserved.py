"""What torch's allocator reserves beside what is allocated at the peak, preset by preset.

    PYTHONPATH=src:tests python benchmarks/gpu_reserved.py --nproc 2    # a 0.15 B GPT, two NCCL ranks on one GPU
    python benchmarks/gpu_reserved.py --size 2.7b --presets zero2_offload,zero3_offload

One JSON line per row: peak allocated and reserved MiB of rank 0, the MiB that each stream's pool reserved, and the
seconds of a step. What the allocator reserves and does not use it gives back when a GPU is full: with --limit 1.1, more
steps follow within 1.1 times the allocated peak, and their seconds are beside those without a limit. The row "plain" is
torch alone. With --trace, every event of the allocator goes into a pickle in $OUT.
"""

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardwise
from shardwise.models.built_in import GPT
from support.nccl import nccl_environment

SIZES = {"0.15b": (576, 30, 9, 49152), "2.7b": (2560, 32, 20, 32000)}
PRESETS = "zero0,zero1,zero2,zero3,zero1_offload,zero2_offload,zero3_offload"
MIB = 2**20


def plain(model: GPT) -> Callable[[torch.Tensor], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(data: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(data)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(model: GPT, preset: str, args: argparse.Namespace) -> Callable[[torch.Tensor], None]:
    config = {
        "preset": preset,
        "precision": {"compute": "bf16"},
        "gradients": {"clip_norm": 1.0},
        "offload": json.loads(args.offload) | ({"nvme_path": args.nvme_path} if "nvme" in preset else {}),
    }
    engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-4), config)

    def step(data: torch.Tensor) -> None:
        engine.backward(engine(data))
        engine.step()

    return step


def seconds_a_step(step: Callable[[torch.Tensor], None], data: torch.Tensor, steps: int) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step(data)
    torch.cuda.synchronize()
    return round((time.perf_counter() - started) / steps, 4)


def measure(preset: str, rank: int, args: argparse.Namespace) -> dict:
    hidden, layers, heads, vocabulary = SIZES[args.size]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(hidden, layers, heads, vocabulary, args.length + 1, tied=True, recompute=True)
    step = plain(model) if preset == "plain" else ours(model, preset, args)
    data = torch.randint(vocabulary, (args.batch, args.length + 1), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    is_traced = args.trace and rank == 0
    if is_traced:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    seconds_a_step(step, data, 2)
    free_s = seconds_a_step(step, data, args.steps)
    if is_traced:
        torch.cuda.memory._dump_snapshot(os.path.join(os.environ["OUT"], f"{args.size}-{preset}.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
    pools: Counter[str] = Counter()
    for segment in torch.cuda.memory_snapshot():
        kind = "compute" if segment["stream"] == 0 else f"stream {segment['stream']:x}"
        pools[f"{kind}, {segment['segment_type']}"] += segment["total_size"]
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    seen = {
        "preset": preset,
        "size": args.size,
        "world_size": args.nproc,
        "tokens": args.batch * args.length,
        "allocated_mib": round(allocated / MIB, 1),
        "reserved_mib": round(reserved / MIB, 1),
        "ratio": round(reserved / allocated, 3),
        "pools_mib": {name: round(size / MIB, 1) for name, size in pools.most_common()},
        "step_s": free_s,
    }
    if args.limit:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.limit * allocated / total)
        seen["limited_step_s"] = seconds_a_step(step, data, args.steps)
        seen["limited_reserved_mib"] = round(torch.cuda.max_memory_reserved() / MIB, 1)
        seen["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    return seen


def worker(rank: int, preset: str, args: argparse.Namespace, store: str) -> None:
    os.environ |= nccl_environment(rank)
    torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl" if args.backend == "nccl" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(store, args.nproc), rank=rank, world_size=args.nproc)
    seen = measure(preset, rank, args)
    if rank == 0:
        print(json.dumps(seen), flush=True)
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="0.15b")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--presets", default=PRESETS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--offload", default="{}", help="the configuration's offload section, as JSON")
    parser.add_argument("--nvme-path", default=os.path.join(tempfile.gettempdir(), "shardwise-reserved"))
    parser.add_argument("--limit", type=float, help="times the allocated peak, as the limit of further steps")
    parser.add_argument("--trace", action="store_true")
    args = parser.parse_args()
    for preset in args.presets.split(","):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, (preset, args, os.path.join(folder, "store")), nprocs=args.nproc)


if __name__ == "__main__":
    main()
