"""Several ranks on one GPU over Gloo: the peak of every stage, and whether the stages agree in bits.

    python benchmarks/gpu_stages.py                                             # 0.5 B MLP, two ranks, bf16
    CUBLAS_WORKSPACE_CONFIG=:4096:8 python benchmarks/gpu_stages.py --model gpt --nproc 3 --bits

One JSON line per stage: peak allocated and reserved MiB of rank 0 from the third step on, seconds per step, losses, and
with --bits a hash over master weights and moments (torch's deterministic algorithms on, fresh buffers poisoned).
"""

import argparse
import gc
import hashlib
import json
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardwise
from shardwise import memory
from shardwise.models import GPT, MLP

WARM_STEPS = 2


def build(name: str):
    torch.manual_seed(0)
    with torch.device("cuda"):
        if name == "mlp":
            return MLP(4096, 32), lambda: torch.randn(16, 4096, device="cuda")
        return GPT(256, 4, 4, 1000, 128), lambda: torch.randint(1000, (4, 128), device="cuda")


def digest(engine: shardwise.Engine) -> str:
    sha = hashlib.sha256()
    for name, _ in engine.module.named_parameters():
        for tensor in (engine.full_param(name), *(value for _, value in sorted(engine.full_state(name).items()))):
            assert not tensor.isnan().any(), name
            sha.update(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return sha.hexdigest()[:16]


def measure(preset: str, rank: int, args: argparse.Namespace) -> dict:
    model, make_batch = build(args.model)
    config = {
        "preset": preset,
        "precision": {"compute": args.precision},
        "batch": {"accumulation": args.accumulate},
        "gradients": {"clip_norm": 1.0},
    }
    engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-4), config)
    losses, started = [], 0.0
    for step in range(args.steps):
        if step == WARM_STEPS:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
        torch.manual_seed(1000 * step + rank)
        for _ in range(args.accumulate):
            loss = engine(make_batch())
            engine.backward(loss)
            engine.step()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    row = {
        "preset": preset,
        "world_size": args.nproc,
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20, 1),
        "reserved_mib": round(torch.cuda.max_memory_reserved() / 2**20, 1),
        "step_s": round((time.perf_counter() - started) / (args.steps - WARM_STEPS), 4),
        "losses": [loss.item() for loss in losses],
        "sha256": digest(engine) if args.bits else None,
    }
    engine.destroy()
    return row


def worker(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", store=dist.FileStore(store, args.nproc), rank=rank, world_size=args.nproc)
    torch.use_deterministic_algorithms(args.bits)
    memory.POISON = args.bits
    for preset in args.presets.split(","):
        row = measure(preset, rank, args)
        if rank == 0:
            print(json.dumps(row), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["mlp", "gpt"], default="mlp")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--presets", default="zero0,zero1,zero2,zero3")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--bits", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args, os.path.join(folder, "store")), nprocs=args.nproc)


if __name__ == "__main__":
    main()
