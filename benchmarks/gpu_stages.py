"""Several ranks on one GPU over Gloo: the peak and the step of every stage, with the peers in the same run.

    python benchmarks/gpu_stages.py --precision fp16 --peers fsdp2,deepspeed
    CUBLAS_WORKSPACE_CONFIG=:4096:8 python benchmarks/gpu_stages.py --model gpt-1m --nproc 3 --bits

One JSON line per row: peak allocated and reserved MiB of rank 0 over all steps, seconds per step after the warm ones,
losses, and with --bits a hash over master weights and moments of ours (torch's deterministic algorithms on, fresh
buffers poisoned). Each row runs in processes of its own: peers leave things behind.
"""

import argparse
import hashlib
import json
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardwise
from shardwise.compare import Settings
from shardwise.compare.job import SEED, CompareJob, CompareRow, parse_rows
from shardwise.compare.systems import make_system
from shardwise.models import loading

WARM_STEPS = 2


def digest(engine: shardwise.Engine) -> str:
    sha = hashlib.sha256()
    for name, _ in engine.module.named_parameters():
        for tensor in (engine.full_param(name), *(value for _, value in sorted(engine.full_state(name).items()))):
            assert not tensor.isnan().any(), name
            sha.update(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return sha.hexdigest()[:16]


def measure(row: CompareRow, rank: int, args: argparse.Namespace) -> dict:
    settings = Settings(args.model, args.nproc, args.precision, "cuda", args.accumulate, steps=args.steps)
    torch.manual_seed(SEED)
    model, make_batch = loading.load(args.model, "cuda:0")
    system = make_system(CompareJob(settings, row, rank), model)
    batches = [
        {key: value.cuda() for key, value in make_batch(rank, index).items()} for index in range(args.accumulate)
    ]
    losses, started = [], 0.0
    torch.cuda.reset_peak_memory_stats()
    for step in range(args.steps):
        if step == WARM_STEPS:
            torch.cuda.synchronize()
            started = time.perf_counter()
        for micro, batch in enumerate(batches):
            is_last = micro == args.accumulate - 1
            loss = system.forward(batch, is_last)
            system.backward(loss, is_last)
        system.update()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    seen = {
        "row": row.name,
        "world_size": args.nproc,
        "precision": args.precision,
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20, 1),
        "reserved_mib": round(torch.cuda.max_memory_reserved() / 2**20, 1),
        "step_s": round((time.perf_counter() - started) / (args.steps - WARM_STEPS), 4),
        "losses": [loss.item() for loss in losses],
        "sha256": digest(system.wrapped) if args.bits and row.peer is None else None,
    }
    if row.peer is None:
        system.wrapped.destroy()
    return seen


def worker(rank: int, row: CompareRow, args: argparse.Namespace, store: str) -> None:
    os.environ |= {"LOCAL_RANK": "0", "RANK": str(rank), "WORLD_SIZE": str(args.nproc)}
    os.environ |= {"SHARDWISE_POISON": "1"} if args.bits else {}
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", store=dist.FileStore(store, args.nproc), rank=rank, world_size=args.nproc)
    torch.use_deterministic_algorithms(args.bits)
    seen = measure(row, rank, args)
    if rank == 0:
        print(json.dumps(seen), flush=True)
    os._exit(0)  # a peer's threads may not end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mlp-0.5b")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--presets", default="zero0,zero1,zero2,zero3")
    parser.add_argument("--peers", default="")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--bits", action="store_true")
    args = parser.parse_args()
    # What shardwise chooses by itself, for every row alike.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    for row in parse_rows(args.presets, args.peers):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, (row, args, os.path.join(folder, "store")), nprocs=args.nproc)


if __name__ == "__main__":
    main()
