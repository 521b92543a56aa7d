"""The model of time against real steps: every case, the bad ones too.

    python benchmarks/time_model.py cpu --ranks 2     # free links, ranks on this machine
    sudo python benchmarks/time_model.py links --ranks 4 --rate 1gbit   # two network namespaces, as in two_hops.py
    python benchmarks/time_model.py h200              # against results/*gpu*.json; one row calibrates, the others check
    python benchmarks/time_model.py published         # torchtitan's tables; one row calibrates, the next is predicted
    python benchmarks/time_model.py gpu               # on a machine with a GPU: calibrate, then steps of each size

Each part enters its rows into results/DATE-time-model.json. On the CPU a calibration runs first, in the same processes:
each kernel in its form, by all ranks at once, and the collectives of the engine. Of the steps nothing is used.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu import PARTS, results
from gpu import run as gpu_script
from two_hops import down, up

import shardwise
from shardwise.comm import Hop, ProcessGroupComm
from shardwise.config import Config
from shardwise.config.shape import NodeShape
from shardwise.dry_run.dry_run import Scenario, dry_run
from shardwise.dry_run.kernels import CPU, CUDA
from shardwise.estimate import calibration
from shardwise.estimate.seconds import fitted, recorded, sketched
from shardwise.estimate.sketch import Sketch, sketch_units
from shardwise.machine import env
from shardwise.models import loading
from shardwise.models.built_in import GPT
from shardwise.models.catalog import find
from shardwise.models.workload import Workload, from_dimensions
from shardwise.timing.calibrate import measure_forms, measure_fresh, measure_issue_s
from shardwise.timing.device import FREE, DeviceTimes, Link, published
from shardwise.timing.tape import Tape

RESULTS = Path(__file__).parent / "results"
STEPS, ROUNDS, WARM_STEPS, REPEATS, PASSES = 2, 6, 2, 5, 2
SMALL, LARGE = 1 << 16, 1 << 24
HEADERS = 1448 / 1514
"""The part of what a link carries that is payload."""
CASES = {
    "cpu": [(model, preset) for model in ("mlp-33m", "gpt-26m") for preset in ("zero1", "zero3")],
    "links": [("mlp-33m", "zero1"), ("mlp-33m", "zero3"), ("gpt-26m", "zero1"), ("gpt-26m", "zero3")],
}


# One rank


def worker(part: str, links: dict[str, Any]) -> None:
    """Calibrate, then train every case; rank 0 prints both as one line of JSON."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group("gloo")
    shape = NodeShape(links.get("nodes", 1), world_size // links.get("nodes", 1))
    tapes = {case: tape_of(*case, shape) for case in CASES[part]}
    device = calibrated(tapes, world_size, links)
    rows = []
    for case, tape in tapes.items():
        foreseen = recorded(tape.entries, tape.start, device)
        seconds = measured(*case)
        rows.append(row(f"{case[0]}, {case[1]}, W = {world_size}", seconds, foreseen.step_s, waits=foreseen.waits_s))
    if rank == 0:
        link = device.inner._asdict()
        made = {"issue_s": device.issue_s, "fresh": device.fresh, "link": link, "kernels": len(device.kernels)}
        print(json.dumps({"calibration": made, "rows": rows}), flush=True)
    dist.destroy_process_group()


def row(case: str, seconds: float, foreseen: float, **more: Any) -> dict[str, Any]:
    return {"case": case, "step_s": seconds, "foreseen_s": foreseen, "error": foreseen / seconds - 1, **more}


def tape_of(model: str, preset: str, shape: NodeShape) -> Tape:
    tape = Tape(keeps_calls=True)
    dry_run(Scenario(partial(loading.load, model, "cpu"), Config.load({"preset": preset}), shape, CPU), tape)
    return tape


def calibrated(tapes: dict[Any, Tape], world_size: int, links: dict[str, Any]) -> DeviceTimes:
    cpu = torch.device("cpu")
    forms = {form.key: form for tape in tapes.values() for entry in tape.entries for form in entry.kernels}
    if world_size > 1:
        dist.barrier()
    issue_s = measure_issue_s(tiny_step, cpu)
    if world_size > 1:
        dist.barrier()
    passes = [measure_forms([forms[key] for key in sorted(forms)], cpu) for _ in range(PASSES)]
    kernels = {key: min(each[key] for each in passes) for key in passes[0]}
    inner = outer = links_of(world_size) if "free" not in links else Link(**links["free"])
    if "rate" in links:  # ranks of a node share the link, which sends headers too
        outer = inner._replace(rate=links["rate"] * HEADERS / 8 / (world_size / links["nodes"]))
    nothing = ((1.0, 0.0), (1e9, 0.1))
    kinds = {"kernels": kernels, "issue_s": issue_s, "is_ahead": False, "fresh": measure_fresh(cpu)}
    return DeviceTimes("cpu", "calibrated", (), {}, nothing, inner, outer, **kinds)


def tiny_step() -> None:
    global _tiny
    if _tiny is None:
        _tiny = GPT(32, 4, 2, 64, 8)
    _tiny(torch.zeros(1, 9, dtype=torch.long)).backward()


_tiny: GPT | None = None


def links_of(world_size: int) -> Link:
    """Of the engine's own gathers and exchanges: the latency of small ones, the rate of large ones."""
    if world_size == 1:
        return Link(FREE)
    comm = ProcessGroupComm(None, torch.device("cpu"))
    hop = Hop("inner", world_size, comm.rank)

    def gather(size: int) -> None:
        comm.gather(torch.zeros(size // 4), "gather", f"probe {size}").wait()

    def exchange(size: int) -> None:
        rows = torch.zeros(world_size, size // 4 // world_size)
        comm.exchange(torch.zeros_like(rows[1:]), rows, "reduce", f"probe {size}", hop)[0].wait()

    def seconds(size: int) -> float:
        found = []
        for _ in range(REPEATS):
            dist.barrier()
            started = time.perf_counter()
            gather(size)
            exchange(size)
            found.append((time.perf_counter() - started) / 2)
        return min(found)

    seconds(LARGE)
    small, large = seconds(SMALL), seconds(LARGE)
    comm.close()
    rate = (LARGE - SMALL) * (world_size - 1) / world_size / (large - small)
    return Link(rate, small, 0.0, rate)


def measured(model: str, preset: str) -> float:
    """Seconds of a step in the middle of many, by rank 0's clock: the fastest of several rounds, as of the kernels."""
    torch.manual_seed(0)
    built, make_batch = loading.load(model, "cpu")
    engine = shardwise.initialize(built, torch.optim.AdamW(built.parameters(), lr=1e-4), preset)
    batches = [make_batch(dist.get_rank(), number) for number in range(2)]

    def steps(count: int) -> float:
        dist.barrier()
        started = time.perf_counter()
        for number in range(count):
            engine.backward(engine(**batches[number % 2]))
            engine.step()
        return (time.perf_counter() - started) / count

    steps(WARM_STEPS)
    seconds = min(steps(STEPS) for _ in range(ROUNDS))
    engine.destroy()
    return seconds


# Ranks


# glibc returns large blocks when they are freed, more or fewer depending on what it has served before, and the first
# touch of new pages takes up to a fifth of a step of the MLP. Here it keeps them, as other allocators do.
KEPT_MEMORY = {"MALLOC_MMAP_MAX_": 0, "MALLOC_TRIM_THRESHOLD_": 1 << 34}


def on_this_machine(part: str, world_size: int, links: dict[str, Any], namespaces: bool = False) -> dict[str, Any]:
    processes = []
    per_node = world_size // links.get("nodes", 1)
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world_size):
            variables = {
                "RANK": rank,
                "WORLD_SIZE": world_size,
                "LOCAL_RANK": rank % per_node,
                "LOCAL_WORLD_SIZE": per_node,
                "MASTER_ADDR": "10.78.0.1" if namespaces else "127.0.0.1",
                "MASTER_PORT": 29455,
                "OMP_NUM_THREADS": max(1, (os.cpu_count() or 1) // world_size),
                **KEPT_MEMORY,
                **({"GLOO_SOCKET_IFNAME": "eth0"} if namespaces else {}),
            }
            inside = ["ip", "netns", "exec", f"hop{rank // per_node}"] if namespaces else []
            command = [*inside, sys.executable, __file__, "worker", "--part", part, "--links", json.dumps(links)]
            environment = os.environ | {key: str(value) for key, value in variables.items()}
            with Path(folder, f"{rank}.log").open("w") as log:
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
                )
        try:
            outputs = [process.communicate(timeout=600)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(process.returncode for process in processes):
            raise SystemExit("\n".join(path.read_text()[-2000:] for path in sorted(Path(folder).glob("*.log"))))
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return found


def cpu(ranks: int) -> dict[str, Any]:
    return on_this_machine("cpu", ranks, {})


def limited(ranks: int, rate: str, free: dict[str, Any]) -> dict[str, Any]:
    bits = {"mbit": 1e6, "gbit": 1e9}[rate[-4:]] * float(rate[:-4])
    up(rate)
    try:
        return on_this_machine("links", ranks, {"nodes": 2, "rate": bits, "free": free}, namespaces=True)
    finally:
        down()


# Published tables

TITAN = "torchtitan, llama3_h100_202412: Llama 3.1 8B, FSDP, 2 x 8192 tokens a GPU, selective recomputation"
TRAINY = "torchtitan, llama3-8b_h200_202506: the same with torch.compile and float8, gathers in 8 bits"


def published_rows() -> dict[str, Any]:
    """Tokens/s a GPU: calibrated on the first number of each pair, the second is predicted."""
    rows = []
    for name, device, wire, (first, known), (second, told) in (
        (f"{TITAN}, eager", "h100", "fp32", (8, 5762), (128, 5605)),
        (f"{TITAN}, torch.compile", "h100", "fp32", (8, 6667), (128, 6514)),
        (TRAINY, "h200", "fp32", (32, 10938), (64, 10753)),
    ):
        foreseen = predict_titan(device, wire, first, known, second)
        row_of = row(f"{name}: {first} GPUs {known} -> {second} GPUs {told}", 16384 / told, 16384 / foreseen)
        rows.append(row_of | {"tokens_per_s": told, "foreseen_tokens_per_s": foreseen})
    return {"calibration": "the speed of computation, on the first row of each pair", "rows": rows}


def predict_titan(device: str, wire: str, first: int, known: float, second: int) -> float:
    """Tokens/s a GPU on `second` GPUs, where `first` reach `known`."""
    model = from_dimensions(find("llama3-8b"), None)
    step = Workload(sequence=8192, micro_batch=2, checkpointing=False)
    config = step.config("zero3")
    config = config.model_copy(update={"precision": config.precision.model_copy(update={"reduce_dtype": wire})})
    shapes = [NodeShape(max(1, gpus // 8), 8) for gpus in (first, second)]
    tape = Sketch(sketch_units(model, step), config, shapes[0], 1, 0.0).run()
    times = replace(published(device), ranks=first)
    times = fitted(times, step.tokens / known, tape.entries, tape.start, f"{first} GPUs")
    return step.tokens / sketched(model, step, config, shapes[1], replace(times, ranks=second)).step_s


# One H200, from its result files

SINGLE = "2026-11-16-gpu-single.json"
GPTS = {"0.1b": (768, 12, 12), "1.3b": (2048, 24, 16), "2.7b": (2560, 32, 20), "7b": (4096, 32, 32)}


def gpt_tape(
    size: str,
    batch: int,
    length: int,
    preset: str,
    world_size: int = 1,
    vocabulary: int = 32000,
    keeps_calls: bool = False,
) -> Tape:
    hidden, layers, heads = GPTS[size]
    config = {
        "preset": preset,
        "precision": {"compute": "bf16"},
        "gradients": {"clip_norm": 1.0},
        "checkpointing": {"enabled": True},
    }

    def build() -> Any:
        model = GPT(hidden, layers, heads, vocabulary, length + 1)
        return model, lambda rank, step: {"tokens": torch.zeros(batch, length + 1, dtype=torch.long)}

    tape = Tape(keeps_calls)
    dry_run(Scenario(build, Config.load(config), world_size, CUDA), tape)
    return tape


def result_rows(name: str) -> list[tuple[str, dict[str, Any]]]:
    runs = json.loads((RESULTS / name).read_text())["runs"]
    return [(run["command"], each) for run in runs for each in run["rows"] if not each.get("compiled")]


def h200() -> dict[str, Any]:
    """Calibrated on one row (1.3 B, zero2, resident): a factor on the published figures of an H200. PCIe has the rate
    of its inference result, 54 GB/s one way; both ways at once were not measured."""
    seen: dict[tuple[str, int, str], float] = {}
    for name in (SINGLE, "2026-11-15-gpu-7b.json"):
        for command, each in result_rows(name):
            words = command.split()
            key = words[words.index("--size") + 1], int(words[words.index("--batch") + 1]), each["row"]
            if each["row"].startswith("zero"):
                seen[key] = each["step_ms"] / 1e3
    tape = gpt_tape("1.3b", 4, 2048, "zero2")
    reference = replace(published("h200"), up=54e9, down=54e9)
    times = fitted(reference, seen["1.3b", 4, "zero2"], tape.entries, tape.start, "1.3 B, zero2")
    rows = []
    for (size, batch, preset), seconds in seen.items():
        if preset in ("zero2", "zero3") and (size, preset) != ("1.3b", "zero2"):
            tape = gpt_tape(size, batch, 2048, preset)
            found = recorded(tape.entries, tape.start, times)
            rows.append(row(f"{size}, batch {batch}, {preset}, resident", seconds, found.step_s, bound=found.bound_by))
    for name, preset in (
        ("offload-ours", "zero2_offload"),
        ("offload-zero3", "zero3_offload"),
    ):
        seconds = next(
            each["step_ms"] for _, each in result_rows(f"2026-11-16-gpu-{name}.json") if each["row"] == preset
        )
        seconds /= 1e3
        tape = gpt_tape("2.7b", 8, 1024, preset)
        found = recorded(tape.entries, tape.start, times)
        rows.append(row(f"2.7b, batch 8, {preset}", seconds, found.step_s, bound=found.bound_by, waits=found.waits_s))
    for _, each in result_rows("2026-11-15-gpu-overlap.json"):
        delayed = replace(times, inner=Link(400e9 / 8, 20e-6))
        tape = gpt_tape("1.3b", 16, 2047, each["preset"], 8, 4000)
        found = recorded(tape.entries, tape.start, delayed)
        case = f"1.3b, batch 16, {each['preset']}, W = 8 with delay kernels"
        rows.append(row(case, each["step_ms"] / 1e3, found.step_s, bound=found.bound_by))
    made = {"slowdown": times.slowdown, "on": "1.3b, batch 4, zero2, resident", "of": reference.source}
    return {"calibration": made, "rows": rows}


GPU_LINES = [
    *(line for line in (*PARTS["single"], *PARTS["7b"]) if "0.1b --batch 4" not in line),  # that one waits for the host
    "gpu_offload.py --row zero2_offload",
    "gpu_offload.py --row zero3_offload",
    *(line for line in PARTS["overlap"] if "zero2" not in line),
]


def gpu() -> dict[str, Any]:
    """Calibrate here, each kernel of each tape in its form, and predict the steps of scripts. Those of which a result
    of today is there (`gpu.py single 7b offload overlap`) are not run again."""
    device = torch.device("cuda", 0)
    tapes = {(line, preset): tape for line in GPU_LINES for preset, tape in tapes_of(line)}
    times = calibration.calibrate(device)
    forms = {form.key: form for tape in tapes.values() for entry in tape.entries for form in entry.kernels}
    times = replace(times, kernels={**times.kernels, **measure_forms(forms.values(), device)})
    rows = []
    for line in GPU_LINES:
        for each in todays_rows(line) or gpu_script(line):
            preset = each.get("preset") or each["row"]
            if (line, preset) in tapes:
                tape = tapes[line, preset]
                links = replace(times, inner=Link(400e9 / 8, 20e-6)) if "overlap" in line else times
                found = recorded(tape.entries, tape.start, links)
                rows.append(row(f"{line}: {preset}", each["step_ms"] / 1e3, found.step_s, bound=found.bound_by))
    return {"calibration": {"issue_s": times.issue_s, "up": times.up, "down": times.down}, "rows": rows}


def tapes_of(line: str) -> Iterator[tuple[str, Tape]]:
    """The presets that a script runs, and the tape of a step of each."""
    words = dict(zip(line.split()[1::2], line.split()[2::2], strict=True))
    if "offload" in line:
        yield words["--row"], gpt_tape("2.7b", 8, 1024, words["--row"], keeps_calls=True)
    elif "overlap" in line:
        yield words["--preset"], gpt_tape("1.3b", 16, 2047, words["--preset"], 8, 4000, True)
    else:
        for preset in ("zero2", "zero3"):
            yield preset, gpt_tape(words["--size"], int(words["--batch"]), 2048, preset, keeps_calls=True)


def todays_rows(line: str) -> list[dict[str, Any]]:
    """What a script printed today on this machine, from the results of `gpu.py`."""
    for path in sorted(results().glob(f"{env.made()['date']}-gpu-*.json")):
        for run in json.loads(path.read_text())["runs"]:
            if run["command"] == f"python benchmarks/{line}" and all("step_ms" in each for each in run["rows"]):
                return list(run["rows"])
    return []


def result_path() -> Path:
    return results() / f"{env.made()['date']}-time-model.json"


def enter(name: str, found: dict[str, Any]) -> None:
    """Into the dated file, with the largest and the median error of all its rows."""
    path = result_path()
    kept = json.loads(path.read_text()) if path.exists() else {**env.made(), "versions": env.versions(), "parts": {}}
    kept["parts"][name] = found
    path.write_text(json.dumps(kept, indent=1) + "\n")
    for each in found["rows"]:
        print(f"{each['case']:<60}{each['step_s']:>9.4f}{each['foreseen_s']:>9.4f} {each['error']:>+7.1%}")
    errors = [abs(each["error"]) for each in found["rows"]]
    print(f"{name}: median {statistics.median(errors):.1%}, worst {max(errors):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("cpu", "links", "h200", "published", "gpu", "worker"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--part", dest="of")
    parser.add_argument("--links", default="{}")
    args = parser.parse_args()
    if args.part == "worker":
        worker(args.of, json.loads(args.links))
    elif args.part == "cpu":
        enter(f"cpu, {args.ranks} ranks", cpu(args.ranks))
    elif args.part == "links":
        free = json.loads(result_path().read_text())["parts"][f"cpu, {args.ranks} ranks"]["calibration"]["link"]
        enter(f"cpu, {args.ranks} ranks on two nodes, {args.rate}", limited(args.ranks, args.rate, free))
    else:
        enter(args.part, {"published": published_rows, "h200": h200, "gpu": gpu}[args.part]())


if __name__ == "__main__":
    main()
