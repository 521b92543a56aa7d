"""The command `deepspeed script.py`: processes on this machine, started by torchrun."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from shardwise.compat.hosts import fetch_hostfile, parse_inclusion_exclusion
from shardwise.errors import CompatibilityError

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")


def main(args: Sequence[str] | None = None) -> None:
    """Replace this process by torchrun. Options that only DeepSpeed's launcher of several machines has are refused."""
    from shardwise.machine.launch import run

    options = _parser().parse_args(args)
    if (options.include or options.exclude) and (options.num_nodes > 0 or options.num_gpus > 0):
        raise ValueError("--include and --exclude choose the devices: leave out --num_gpus and --num_nodes")
    pool = fetch_hostfile(options.hostfile) or {}
    if options.num_nodes > 1 or len(pool) > 1:
        raise CompatibilityError(
            "`deepspeed` on several machines is not served by shardwise: start torchrun on each of them, with "
            "--nnodes, --node-rank and --rdzv-endpoint"
        )
    count = options.num_gpus if options.num_gpus > 0 else _devices(pool, options.include, options.exclude)
    target = ["-m", options.user_script] if options.module else [options.user_script]
    if not options.no_local_rank:
        target = ["-m", "shardwise.compat.launcher", *target]
    run(count, [*target, *options.user_args])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("deepspeed", description="Start a script on this machine's devices.")
    parser.add_argument("--num_gpus", type=int, default=-1, help="Processes (default: one for each GPU).")
    parser.add_argument("--num_nodes", type=int, default=-1)
    parser.add_argument("-H", "--hostfile", default="/job/hostfile", help="A file of one line: this host, its slots.")
    parser.add_argument("-i", "--include", default="", help="Devices, as in localhost:0,1")
    parser.add_argument("-e", "--exclude", default="", help="Devices to leave out, as in localhost:0,1")
    parser.add_argument("--master_addr", default="")
    parser.add_argument("--master_port", default="")
    parser.add_argument("--module", action="store_true", help="The script is the name of a module.")
    parser.add_argument("--no_local_rank", action="store_true", help="Do not pass --local_rank to the script.")
    parser.add_argument("--no_python", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser


def _devices(pool: dict[str, int], include: str, exclude: str) -> int:
    """How many processes to start; a filter also chooses the devices."""
    import torch

    available = pool or {"localhost": max(1, torch.cuda.device_count())}
    chosen = [slot for slots in parse_inclusion_exclusion(available, include, exclude).values() for slot in slots]
    if not chosen:
        raise ValueError(f"--include {include!r} and --exclude {exclude!r} leave no device of {available}")
    if include or exclude:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, chosen))
    return len(chosen)


def launched(arguments: Sequence[str]) -> None:
    """Run the script in a process of torchrun, with the argument by which DeepSpeed's launcher tells the rank."""
    is_module = arguments[0] == "-m"
    script, *own = arguments[1:] if is_module else arguments
    sys.argv = [script, f"--local_rank={os.environ['LOCAL_RANK']}", *own]
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    launched(sys.argv[1:])
