"""The command `deepspeed script.py`: processes on this machine, started by torchrun; its hostfiles and filters."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shardwise.errors import CompatibilityError

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


def main(args: Sequence[str] | None = None) -> None:
    """Replace this process by torchrun. Options that only DeepSpeed's launcher of several machines has are refused."""
    from shardwise.machine.launch import run

    options = _parser().parse_args(args)
    if (options.include or options.exclude) and (options.num_nodes > 0 or options.num_gpus > 0):
        raise ValueError("--include and --exclude choose the devices: leave out --num_gpus and --num_nodes")
    if options.no_python:
        raise CompatibilityError("`deepspeed --no_python` is not served by shardwise: start torchrun with --no-python")
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
    parser.add_argument(
        "--num_gpus", "--num_accelerators", type=int, default=-1, help="Processes (default: one for each GPU)."
    )
    parser.add_argument("--num_nodes", type=int, default=-1)
    parser.add_argument("-H", "--hostfile", default="/job/hostfile", help="A file of one line: this host, its slots.")
    parser.add_argument("-i", "--include", default="", help="Devices, as in localhost:0,1")
    parser.add_argument("-e", "--exclude", default="", help="Devices to leave out, as in localhost:0,1")
    parser.add_argument("--master_addr", default="")
    parser.add_argument("--master_port", default="")
    parser.add_argument("--module", action="store_true", help="The script is the name of a module.")
    parser.add_argument("--no_local_rank", action="store_true", help="Do not pass --local_rank to the script.")
    parser.add_argument("--no_python", action="store_true", help=argparse.SUPPRESS)  # refused
    parser.add_argument("--bind_cores_to_rank", action="store_true", help="No effect: start it under numactl.")
    parser.add_argument("--bind_core_list", help="No effect: start it under numactl.")
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


def fetch_hostfile(path: str) -> dict[str, int] | None:
    """The slots of each host in a file; None if there is no such file."""
    return _parse_hostfile(Path(path).read_text().splitlines()) if Path(path).is_file() else None


def _parse_hostfile(lines: Iterable[str]) -> dict[str, int]:
    """The slots of each host, from lines such as `worker-0 slots=4`."""
    slots: dict[str, int] = {}
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"hostfile: {line!r} is not of the form `HOST slots=N`")
        if found[1] in slots:
            raise ValueError(f"hostfile: {found[1]} stands there twice, keep one line")
        slots[found[1]] = int(found[2])
    if not slots:
        raise ValueError("hostfile: it names no host, write lines of the form `HOST slots=N`")
    return slots


def parse_range_list(range_str: str) -> list[int]:
    """The numbers that a text such as `0,2-4,6` names; they rise."""
    numbers: list[int] = []
    for part in range_str.split(","):
        first, _, last = part.partition("-")
        named = range(int(first), int(last or first) + 1)
        if not named or (numbers and named[0] <= numbers[-1]):
            raise ValueError(f"the list of cores is {range_str!r}: numbers and ranges have to rise, as in 0,2-4,6")
        numbers += named
    return numbers


def parse_inclusion_exclusion(pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """The slots that a filter leaves of a pool of hosts, by number."""
    return parse_resource_filter({host: list(range(count)) for host, count in pool.items()}, inclusion, exclusion)


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """The slots that are named, or not named, by a filter such as `worker-0@worker-1:0,2`."""
    if include_str and exclude_str:
        raise ValueError("include_str and exclude_str are mutually exclusive: give one of them")
    named = _named(host_info, include_str or exclude_str)
    if not include_str:
        named = {host: set(slots) - named.get(host, set()) for host, slots in host_info.items()}
    return {host: sorted(named[host]) for host in host_info if named.get(host)}


def _named(host_info: Mapping[str, Sequence[int]], text: str) -> dict[str, set[int]]:
    """The slots that a filter names; all of a host that is named alone."""
    named: dict[str, set[int]] = {}
    for part in filter(None, text.split("@")):
        host, _, numbers = part.partition(":")
        if host not in host_info:
            raise ValueError(f"Hostname '{host}' not found: there are {', '.join(host_info)}")
        slots = {int(number) for number in numbers.split(",")} if numbers else set(host_info[host])
        for slot in sorted(slots - set(host_info[host])):
            raise ValueError(f"No slot '{slot}' specified on host '{host}'")
        named.setdefault(host, set()).update(slots)
    return named


if __name__ == "__main__":
    launched(sys.argv[1:])
