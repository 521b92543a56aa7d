"""Accuracy of the plan: cases from a seeded grid, each predicted and measured from outside, in one dated table.

    python benchmarks/plan_accuracy.py                    # 60 cases on CPU, ranks over Gloo
    python benchmarks/plan_accuracy.py --device cuda      # 20 cases; the ranks share one GPU
    python benchmarks/plan_accuracy.py --device cuda --confine   # each rank limited to what the plan says

It measures what `shardwise compare` measures: the peak of a rank over two steps after two warm-up steps. On the CPU the
observer of tensor storage measures it, and offloaded states count, as they are in the same memory. On CUDA torch's
allocator measures it, and they do not. A confined rank may use the predicted peak, 3 % more, and what the plan reserves
for the allocator's pages (200 MiB). A case that fails under this limit is measured again without one, and its row says
so. Writes results/DATE-plan-accuracy-DEVICE.json and .md after every case.
"""

import argparse
import gc
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardwise.compare import Settings
from shardwise.compare.job import CompareJob, CompareRow
from shardwise.compare.session import foresee_settings
from shardwise.compare.worker import Worker
from shardwise.dry_run.dry_run import Foreseen
from shardwise.estimate.hardware import PAGES_BYTES
from shardwise.machine import env, launch

HERE = Path(__file__).parent
PRESETS = ("zero0", "zero1", "zero2", "zero3")
OFFLOADS = ("zero1_offload", "zero2_offload", "zero3_offload")
POINT = ("model", "preset", "world_size", "accumulate", "precision")
KINDS = ("weights", "grads", "optim", "activations", "in_flight")


@dataclass(frozen=True)
class Case:
    """One point of the grid."""

    model: str
    preset: str
    world_size: int
    accumulate: int
    precision: str

    def settings(self, device: str) -> Settings:
        own = f"{HERE / 'plan_models.py'}:{self.model}"
        name = self.model if "-" in self.model else own
        return Settings(name, self.world_size, self.precision, device, self.accumulate)


def cpu_cases(counts: tuple[int, int], seed: int) -> list[Case]:
    """`counts` cases with all states on the device, and with states on the host."""
    models = ("mlp-100k", "gpt-1m", "gpt", "gpt_recomputed", "tied", "tied_recomputed", "decoder", "one_unit")
    rest = ((1, 2, 3, 4), (1, 2), ("fp32", "bf16", "fp16"))
    return [case for presets, count in zip((PRESETS, OFFLOADS), counts, strict=True)
            for case in drawn(itertools.product(models, presets, *rest), count, seed)]  # fmt: skip


def cuda_cases(counts: tuple[int, int], seed: int) -> list[Case]:
    """Section by section: the 0.5 B MLP on two ranks in both precisions, then points of the grids."""
    first = [Case("mlp-0.5b", preset, 2, 1, precision) for precision in ("fp16", "bf16") for preset in PRESETS]
    models = ("gpu_gpt", "gpu_gpt_recomputed", "gpu_decoder")
    rest = ((1, 2, 4), (1, 2), ("bf16", "fp16", "fp32"))
    return first + [case for presets, count in zip((PRESETS, OFFLOADS), counts, strict=True)
                    for case in drawn(itertools.product(models, presets, *rest), count, seed)]  # fmt: skip


def drawn(grid: Iterable[tuple], count: int, seed: int) -> list[Case]:
    """Points of a grid, the same for the same seed."""
    return [Case(*point) for point in random.Random(seed).sample(list(grid), count)]


def measure(rank: int, cases: list[tuple[int, Case]], device: str, folder: str) -> None:
    """One process that takes part in all cases with enough ranks, one after the other. It starts when it receives its
    limits: the bytes that a rank may use in each case, or 0."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")
    while not (told := Path(folder, f"{cases[0][0]}.limits")).exists():
        if not Path(folder).exists():
            os._exit(1)  # whoever would tell is gone
        time.sleep(0.05)
    for (number, case), limit in zip(cases, json.loads(told.read_text()), strict=True):
        if rank < case.world_size:
            if limit:
                total = torch.cuda.get_device_properties(0).total_memory
                torch.cuda.set_per_process_memory_fraction(limit / total)
            store = dist.FileStore(os.path.join(folder, f"store{number}"), case.world_size)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=case.world_size, timeout=timedelta(minutes=3)
            )
            seen = observe(CompareJob(case.settings(device), CompareRow(case.preset), rank))
            dist.destroy_process_group()
            write(Path(folder, f"{number}-{rank}.json"), seen)
    os._exit(0)


def write(path: Path, value: Any) -> None:
    """Write the file atomically: another process waits for it."""
    path.with_suffix(".tmp").write_text(json.dumps(value))
    path.with_suffix(".tmp").rename(path)


def limit_bytes(foreseen: Foreseen | str) -> int:
    """The predicted peak, start-up included, 3 % more, and what the plan reserves for pages; 0 is no limit."""
    if isinstance(foreseen, str):
        return 0
    return int(1.03 * max(foreseen.peak_bytes, foreseen.startup_bytes)) + PAGES_BYTES


def observe(job: CompareJob) -> dict:
    try:
        seen = Worker(job).observe()
    except Exception as error:
        seen = {"error": f"{type(error).__name__}: {error}"}
    gc.collect()
    if job.device.type == "cuda":
        seen["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return seen


def foresee(case: Case, device: str) -> tuple[Foreseen | str, float]:
    """The prediction, or the error; and the seconds it took."""
    started = time.process_time()
    try:
        found: Foreseen | str = foresee_settings(case.settings(device), case.preset)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    return found, time.process_time() - started


def compared(case: Case, foreseen: Foreseen | str, took_s: float, ranks: list[dict]) -> dict:
    """Predicted and measured values of the rank with the highest peak."""
    if isinstance(foreseen, str):
        return {**asdict(case), "error": f"foreseeing: {foreseen}"}
    errors = [rank["error"] for rank in ranks if "error" in rank]
    if errors or len(ranks) < case.world_size:
        return {**asdict(case), "error": f"measuring: {errors[0] if errors else 'a rank ended early'}"}
    highest = max(ranks, key=lambda rank: rank["peak_bytes"])
    split = foreseen.categories
    return {
        **asdict(case),
        "predicted_bytes": foreseen.peak_bytes,
        "measured_bytes": highest["peak_bytes"],
        "off": foreseen.peak_bytes / highest["peak_bytes"] - 1,
        "predicted_split": {
            "weights": split["weights"],
            "grads": split["grads"],
            "optim": split["master"] + split["moments"],
            "activations": split["activations"] + split["logits"],
            "in_flight": split["in flight"] + split["overhead"],
        },
        "measured_split": highest["peak_split_bytes"],
        "predicted_startup_bytes": foreseen.startup_bytes,
        "measured_startup_bytes": max(rank["startup_peak_bytes"] for rank in ranks),
        "reserved_bytes": highest.get("reserved_bytes"),
        "foreseen_in_cpu_s": round(took_s, 2),
    }


def line(row: dict) -> str:
    name = f"{row['model']} {row['preset']} W={row['world_size']} K={row['accumulate']} {row['precision']}"
    if "error" in row:
        return f"{name:<44} {row['error']}"
    split = "  ".join(f"{k} {mb(row['predicted_split'][k])}/{mb(row['measured_split'].get(k, 0))}" for k in KINDS)
    peaks = f"{mb(row['predicted_bytes'])} / {mb(row['measured_bytes'])} MB"
    return f"{name:<44} {row['off']:+8.3%}  {peaks:>20}   {split}"


def mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.4g}"


def summary(rows: list[dict]) -> str:
    good = [abs(row["off"]) for row in rows if "off" in row]
    worst, middle = max(good, default=float("nan")), median(good) if good else float("nan")
    return f"{len(good)} of {len(rows)} cases; off by {worst:.3%} at worst, {middle:.3%} at the median"


def confinement(rows: list[dict]) -> str:
    """The result for confined ranks."""
    limited = [row for row in rows if "limit_bytes" in row or "confined" in row]
    short = sum("confined" in row for row in limited)
    ran = f"{len(limited) - short} of {len(limited)} cases ran"
    return f"Given what was foreseen, 3 % and the plan's {PAGES_BYTES >> 20} MiB for pages, {ran}. " if limited else ""


def table(result: dict) -> str:
    lines = [
        f"# Predicted and measured peaks on {result['device']}",
        "",
        f"{result['made']['date']}, commit {result['made']['commit']}, torch {result['versions']['torch']}; "
        f"{summary(result['rows'])}. {confinement(result['rows'])}"
        f"Made by `{result['command']}`.",
        "",
        "| model | preset | W | K | precision | predicted MB | measured MB | off |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [row[key] for key in POINT]
        known = "off" in row
        cells += (
            [mb(row["predicted_bytes"]), mb(row["measured_bytes"]), f"{row['off']:+.2%}"]
            if known
            else ["", "", row["error"]]
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def merged(before: list[dict], again: list[dict]) -> list[dict]:
    """All rows; rows that were measured again replace the old ones."""
    points = {tuple(row[key] for key in POINT): row for row in again}
    return [points.get(tuple(row[key] for key in POINT), row) for row in before]


class Bench:
    """Measures cases one after the other. On CUDA each case has its own processes, because the allocator keeps memory
    of earlier cases; they start ahead of time."""

    def __init__(self, cases: list[Case], device: str, predictions: list[Future], confines: bool) -> None:
        self.device, self.confines, self.predictions = device, confines, predictions
        numbered = list(enumerate(cases))
        self.groups = [[each] for each in numbered] if device == "cuda" or not cases else [numbered]
        self.started = time.perf_counter()

    def rows(self) -> Iterator[dict]:
        """One row per case, printed when it is known."""
        crews: list[Any] = []
        with tempfile.TemporaryDirectory() as folder:
            try:
                for index, group in enumerate(self.groups):
                    while len(crews) < min(index + 3, len(self.groups)):
                        crews.append(self._start(self.groups[len(crews)], folder))
                    yield from self._measured(group, crews[index], folder)
            finally:
                for process in (process for crew in crews for process in crew.processes):
                    process.terminate()

    def _measured(self, group: list[tuple[int, Case]], crew: Any, folder: str) -> Iterator[dict]:
        limits = [limit_bytes(self.predictions[n].result()[0]) if self.confines else 0 for n, _ in group]
        write(Path(folder, f"{group[0][0]}.limits"), limits)
        for (number, case), limit in zip(group, limits, strict=True):
            yield self._row(number, case, limit, crew, folder)
        while not ended(crew, 600):
            pass

    def _start(self, group: list[tuple[int, Case]], folder: str) -> Any:
        most = max(case.world_size for _, case in group)
        return mp.spawn(measure, (group, self.device, folder), nprocs=most, join=False)

    def _row(self, number: int, case: Case, limit: int, crew: Any, folder: str) -> dict:
        files = [Path(folder, f"{number}-{rank}.json") for rank in range(case.world_size)]
        while not all(file.exists() for file in files) and not ended(crew, 0.2):
            pass
        seen = [json.loads(file.read_text()) for file in files if file.exists()]
        row = compared(case, *self.predictions[number].result(), seen)
        row |= {"limit_bytes": limit} if limit else {}
        print(f"{time.perf_counter() - self.started:5.0f} s  {line(row)}", flush=True)
        return row


def ended(crew: Any, timeout_s: float) -> bool:
    """Whether all processes of a case have ended; a failed one is noted in its row, and the other cases go on."""
    try:
        return bool(crew.join(timeout=timeout_s))
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        print(error, file=sys.stderr)
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--confine", action="store_true")
    parser.add_argument("--only", help="measure the cases of this model again, and replace them in the file")
    args = parser.parse_args()
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if args.device == "cpu":
        os.environ |= launch.matmul_environment()
    cases = cpu_cases((44, 16), args.seed) if args.device == "cpu" else cuda_cases((8, 4), args.seed)
    cases = [case for case in cases if args.only in (None, case.model)]
    with ProcessPoolExecutor(min(8, launch.cores())) as pool:
        predictions = [pool.submit(foresee, case, args.device) for case in cases]
        kept = Kept(args)
        for row in Bench(cases, args.device, predictions, args.confine).rows():
            kept.add(row)
        failed = [number for number, row in enumerate(kept.rows) if "limit_bytes" in row and "error" in row]
        again = Bench([cases[n] for n in failed], args.device, [predictions[n] for n in failed], False)
        for number, row in zip(failed, again.rows(), strict=True):
            kept.replace(number, {**row, "confined": kept.rows[number]["error"]})
    print(summary(kept.rows), confinement(kept.rows))


class Kept:
    """The result files, with all rows known so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rows: list[dict] = []
        options = f" --device {args.device}" + " --confine" * args.confine
        self._result = {
            "device": args.device,
            "command": f"python benchmarks/plan_accuracy.py{options}",
            "made": env.made(),
            "versions": env.versions(),
            "seed": args.seed,
        }
        name = f"{self._result['made']['date']}-plan-accuracy-{args.device}"
        self._stem = Path(os.environ.get("OUT", HERE / "results")) / name
        self._before = json.loads(self._file("json").read_text())["rows"] if args.only else None

    def add(self, row: dict) -> None:
        self.rows.append(row)
        self._write()

    def replace(self, number: int, row: dict) -> None:
        self.rows[number] = row
        self._write()

    def _write(self) -> None:
        rows = self.rows if self._before is None else merged(self._before, self.rows)
        result = {**self._result, "rows": rows}
        self._file("json").write_text(json.dumps(result, indent=1) + "\n")
        self._file("md").write_text(table(result))

    def _file(self, kind: str) -> Path:
        return self._stem.with_name(f"{self._stem.name}.{kind}")


if __name__ == "__main__":
    main()
