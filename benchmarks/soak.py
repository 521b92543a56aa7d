"""Injects faults into small trainings, one after the other, and checks that none hangs, hides its cause or loses bits.

    python benchmarks/soak.py --minutes 20 --seed 0        (`make soak`)

A *chain* is a training with a random configuration: preset, ranks, model, accumulation, precision. Each launch has one
fault (a signal at a random place of a step, an exception, a full disk, a kill inside a save, a cut checkpoint file,
a request to stop); the next launch resumes from the newest checkpoint, often with another number of ranks; the last one
has no fault. Checked after every launch:

- It ends in time, and no process ends by a signal that it was not sent.
- Every surviving rank ends with an error of shardwise that names the rank at fault, and the rank that raised shows its
  own exception. Signals to the only rank, or to all of them, leave no survivors: these count as `alone`.
- What a launch loads, and what the last one ends with, has the same bits as an undisturbed run of the same
  configuration, which is run for it. If the number of ranks changes, the undisturbed run changes it at the same step.
- The checkpoint that is loaded is not older than the last save that had returned, unless its file was cut.

A fault counts once it has happened; a place that a configuration never reaches does not. The result goes into a dated
file. The same seed chooses the same chains; how far a launch gets before it notices a fault depends on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.machine.env import made, versions
from support.fork_server import Forked, close_fork_server, fork_server
from support.nccl import nccl_environment

WORKER = Path(__file__).with_name("soak_worker.py")
STEPS = 8
LIMIT_S = 120.0
"""How long a launch may take on a busy machine. The seconds from a fault to the last error are in the result."""
FROZEN_S = 6.0
SMALL_DISK_BYTES = 48 << 20
PRESETS = ["zero0", "zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload", "zero3_nvme"]
MODELS = ["mlp", "gpt", "tied", "odd"]
PLACES = ["data", "forward", "backward", "hook", "optimizer"]
SIGNALS = [signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV]
KINDS = {
    "kill": 5, "raise": 5, "freeze": 2, "kill in save": 4, "full disk": 2, "cut": 2, "preempt": 2, "other W": 2,
}  # fmt: skip
"""The kinds of faults and how often they are drawn. `other W`: a clean end, after which the number of ranks changes."""

Path_ = tuple[tuple[int, int], ...]
"""How states came about: (ranks, first step) of each part. A restart with the same number of ranks adds no part."""


@dataclass(frozen=True)
class Setting:
    """What a chain trains."""

    preset: str
    model: str
    accumulation: int
    compute: str
    clips: bool

    @classmethod
    def draw(cls, rng: random.Random) -> Setting:
        compute = rng.choice(["fp32", "fp32", "bf16"])
        return cls(rng.choice(PRESETS), rng.choice(MODELS), rng.choice([1, 1, 2]), compute, rng.random() < 0.5)

    def config(self, disk: Path) -> dict[str, Any]:
        config: dict[str, Any] = {
            "preset": self.preset,
            "runtime": {"min_unit_bytes": 1},
            "batch": {"accumulation": self.accumulation},
            "precision": {"compute": self.compute},
        }
        if self.clips:
            config["gradients"] = {"clip_norm": 1.0}
        if "nvme" in self.preset:
            config["offload"] = {"nvme_path": str(disk)}
        return config


@dataclass
class Launch:
    """How the ranks of one launch ended."""

    codes: list[int | None]
    told: list[dict[str, Any]]
    fired: dict[int, float]  # when, by rank
    saved: int
    logs: list[str]
    loaded: dict[str, Any] | None


@dataclass
class Tally:
    """The figures of a soak."""

    injected: Counter[str] = field(default_factory=Counter)
    named: Counter[str] = field(default_factory=Counter)
    alone: Counter[str] = field(default_factory=Counter)
    went_on: Counter[str] = field(default_factory=Counter)
    not_reached: int = 0
    launches: int = 0
    references: int = 0
    chains: int = 0
    naming_ranks: int = 0
    comparisons: int = 0
    hangs: int = 0
    bits_lost: int = 0
    steps_lost: int = 0
    unnamed: int = 0
    wrong_exits: int = 0
    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        return sum(self.injected.values())

    def result(self) -> dict[str, Any]:
        by_kind = {
            kind: {name: getattr(self, name)[kind] for name in ("injected", "named", "alone", "went_on")}
            for kind in sorted(self.injected)
        }
        counts = (
            "not_reached", "chains", "launches", "references", "naming_ranks", "comparisons", "hangs", "bits_lost",
            "steps_lost", "unnamed", "wrong_exits",
        )  # fmt: skip
        found: dict[str, Any] = {"faults": self.faults, "named": sum(self.named.values()), "by_kind": by_kind}
        found |= {name: getattr(self, name) for name in counts}
        if self.seconds:
            found["seconds_to_error"] = {
                "median": round(statistics.median(self.seconds), 2),
                "max": round(max(self.seconds), 2),
            }
        return found | {"failures": self.failures}


class Failed(Exception):
    """A check of the soak did not hold."""


class Soak:
    """Runs chains until the time or the number of faults is reached."""

    def __init__(self, options: argparse.Namespace, root: Path, keep: Callable[[Tally], None]) -> None:
        """`keep` gets the tally whenever a chain has ended, so that a soak that is stopped has a result."""
        self.options = options
        self.tally = Tally()
        self._keep = keep
        self._root = root
        self._lock = threading.Lock()
        self._numbers = self._chains_begun = 0
        self._references: dict[tuple[Setting, Path_], tuple[Path, dict[int, str]]] = {}
        self._reference_locks: dict[tuple[Setting, Path_], threading.Lock] = {}
        self._started = time.monotonic()

    def run(self) -> None:
        with ThreadPoolExecutor(self.options.jobs) as pool:
            list(pool.map(lambda _: self._work(), range(self.options.jobs)))

    def is_over(self) -> bool:
        minutes = (time.monotonic() - self._started) / 60
        return minutes >= self.options.minutes or bool(self.options.faults and self.tally.faults >= self.options.faults)

    def _work(self) -> None:
        while not self.is_over():
            with self._lock:
                number = self._chains_begun
                self._chains_begun += 1
            chain = Chain(self, random.Random(f"{self.options.seed}-{number}"), self._root / f"chain{number}")
            try:
                chain.run()
            except Exception as failure:  # a mistake of the soak itself is a failure too
                self.say(f"FAILED {failure}")
                self.tally.failures.append(f"chain {number}: {failure}")
            finally:
                chain.close()
                with self._lock:
                    self.tally.chains += 1
                    self._keep(self.tally)

    def say(self, line: str) -> None:
        seconds = time.monotonic() - self._started
        print(f"[{self.tally.faults:4d} faults {seconds:6.0f} s] {line}", flush=True)

    def _next_number(self) -> int:
        with self._lock:
            self._numbers += 1
            return self._numbers - 1

    # Processes

    def launch(self, folder: Path, world_size: int, **spec: Any) -> Launch:
        """Start the ranks of one launch and wait until they have ended, or the time is over."""
        run = self._root / f"run{self._next_number()}"
        run.mkdir()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        spec = {"launch": 0, "fault": None, "is_reference": False, "blocking": True, "keep": None, "every": 2, **spec}
        spec |= {"destroys": True, "load_tag": "latest", "load_from": None} | spec
        spec |= {"run": str(run), "folder": str(folder), "world_size": world_size, "port": store.port, "steps": STEPS}
        spec |= {"backend": self.options.backend, "timeout_s": LIMIT_S}
        (run / "spec.json").write_text(json.dumps(spec))
        processes = [self._start(run, rank) for rank in range(world_size)]
        frozen = spec["fault"]["ranks"] if spec["fault"] and spec["fault"]["kind"] == "freeze" else []
        codes = self._await(run, processes, frozen)
        logs = [(run / f"log{rank}").read_text(errors="replace") for rank in range(world_size)]
        told = [_read_json(run / f"rank{rank}.json") for rank in range(world_size)]
        fired = {int(path.name.removeprefix("fired")): float(path.read_text()) for path in run.glob("fired*")}
        saved = int((run / "saved").read_text()) if (run / "saved").exists() else 0
        loaded = _read_json(run / "loaded.json") or None
        with self._lock:
            self.tally.launches += 1
        shutil.rmtree(run)
        return Launch(codes, told, fired, saved, logs, loaded)

    def _start(self, run: Path, rank: int) -> Any:
        names = {"RANK": str(rank), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "SHARDWISE_POISON": "1"}
        names |= {"SHARDWISE_FROZEN_S": str(FROZEN_S), "SHARDWISE_AGREEMENT_POLL_S": "0.1"}
        command = [sys.executable, str(WORKER), str(run / "spec.json")]
        if self.options.backend == "nccl":
            names |= {**nccl_environment(rank), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        with (run / f"log{rank}").open("w") as log, self._lock:  # the fork server answers one request at a time
            return Forked(command, env={**os.environ, **names}, stdout=log, stderr=subprocess.STDOUT)

    def _await(self, run: Path, processes: list[Any], frozen: list[int]) -> list[int | None]:
        """The exit codes; None for a rank that hung. A rank that was frozen is killed once all others have ended."""
        deadline = time.monotonic() + LIMIT_S
        others = [process for rank, process in enumerate(processes) if rank not in frozen]
        while _running(others) and time.monotonic() < deadline:
            time.sleep(0.02)
        while frozen and not _running(others) and _running(processes) and time.monotonic() < deadline:
            for rank in frozen:
                if (run / f"fired{rank}").exists():
                    processes[rank].send_signal(signal.SIGKILL)
            time.sleep(0.02)
        hung = _running(processes)
        for process in hung:
            process.send_signal(signal.SIGUSR1)  # its stacks
        time.sleep(0.5 if hung else 0.0)
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
        return [None if process in hung else process.returncode for process in processes]

    # Undisturbed runs

    def reference(self, setting: Setting, path: Path_) -> tuple[Path, dict[int, str]]:
        """The checkpoints of an undisturbed run, and its digests after every step."""
        key = (setting, path)
        with self._lock:
            lock = self._reference_locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._references:
                self._references[key] = self._run_reference(setting, path)
        return self._references[key]

    def _run_reference(self, setting: Setting, path: Path_) -> tuple[Path, dict[int, str]]:
        folder = self._root / f"reference{self._next_number()}"
        folder.mkdir()
        world_size, first = path[-1]
        source: dict[str, Any] = {}
        if len(path) > 1:
            before, _ = self.reference(setting, path[:-1])
            source = {"load_from": str(before), "load_tag": f"launch-0-step-{first}"}
        config = setting.config(self._root)
        launch = self.launch(
            folder, world_size, config=config, model=setting.model, is_reference=True, every=1, **source
        )
        if any(code != 0 for code in launch.codes):  # None: it was still running at the limit
            raise Failed(f"the undisturbed run of {setting} ended with {launch.codes}: {_last(launch.logs)}")
        with self._lock:
            self.tally.references += 1
        return folder, {int(step): text for step, text in launch.told[0]["digests"].items()}


class Chain:
    """One training through several faults."""

    def __init__(self, soak: Soak, rng: random.Random, home: Path) -> None:
        self._soak, self._rng, self._home = soak, rng, home
        self._setting = Setting.draw(rng)
        self._folder = home / "checkpoints"
        self._folder.mkdir(parents=True)
        self._world_size = rng.choice([1, 2, 2, 3, 4])
        self._paths: list[Path_] = []  # of every launch: how the states came about that it writes
        self._saved = 0
        self._cut: Path | None = None
        self._falls_back = False  # whether there is another checkpoint beside the one that was cut
        self._has_small_disk = False

    def close(self) -> None:
        if self._has_small_disk:
            subprocess.run(["umount", "-l", str(self._folder)], check=False)
        shutil.rmtree(self._home, ignore_errors=True)

    def run(self) -> None:
        for _ in range(self._rng.randint(2, 5)):
            if self._soak.is_over() or self._newest_step() == STEPS:
                break
            fault = self._draw_fault()
            self._launch(fault)
            if fault["kind"] == "other W" or self._rng.random() < 0.3:
                self._world_size = self._rng.choice([size for size in (1, 2, 3, 4) if size != self._world_size])
        self._launch(None)

    def _draw_fault(self) -> dict[str, Any]:
        rng = self._rng
        kinds = self._soak.options.kinds or list(KINDS)
        kind = rng.choices(kinds, [KINDS[kind] for kind in kinds])[0]
        first = self._newest_step()
        fault: dict[str, Any] = {"kind": kind, "module": rng.randrange(100), "at": "", "signal": signal.SIGKILL}
        fault["step"] = rng.randrange(first, STEPS)
        everyone = list(range(self._world_size))
        fault["ranks"] = [rng.randrange(self._world_size)]
        if kind in ("kill", "raise", "freeze", "preempt"):
            fault["at"] = rng.choice(PLACES) if kind != "preempt" else "data"
        if kind == "kill":
            fault["signal"] = rng.choice(SIGNALS)
        if kind == "freeze":
            fault["signal"] = signal.SIGSTOP
        if kind in ("kill in save", "full disk"):
            fault["at"] = "save" if kind == "kill in save" else "before save"
            fault["step"] = min(fault["step"] // 2 * 2 + 1, STEPS - 1)  # a step after which it saves
            if kind == "kill in save" and rng.random() < 0.3:
                fault["ranks"] = everyone
        if kind == "full disk":
            self._make_small_disk()
        if kind in ("other W", "cut"):
            fault["ranks"] = []
        return fault

    def _newest_step(self) -> int:
        steps = [int(path.name.rpartition("-")[2]) for path in self._checkpoints()]
        return max(steps, default=0)

    def _checkpoints(self) -> list[Path]:
        return [path for path in self._folder.glob("launch-*-step-*") if path.is_dir() and path != self._cut]

    def _make_small_disk(self) -> None:
        """A disk of its own for the checkpoints, if this process may mount one."""
        if self._has_small_disk or any(self._folder.iterdir()):
            return
        size = f"size={SMALL_DISK_BYTES}"
        command = ["mount", "-t", "tmpfs", "-o", size, "soak", str(self._folder)]
        self._has_small_disk = subprocess.run(command, check=False, capture_output=True).returncode == 0

    def _launch(self, fault: dict[str, Any] | None) -> None:
        number, world_size = len(self._paths), self._world_size
        self._paths.append(((world_size, 0),))
        spec = {
            "config": self._setting.config(self._home),
            "model": self._setting.model,
            "launch": number,
            "fault": fault,
            "blocking": self._rng.random() < 0.7,
            "destroys": self._rng.random() < 0.5,
            "keep": self._rng.choice([None, 3]),
            "load_from": str(self._folder) if self._checkpoints() or self._cut else None,
        }
        launch = self._soak.launch(self._folder, world_size, **spec)
        (self._folder / "filler").unlink(missing_ok=True)
        what = self._describe(fault, world_size)
        try:
            if self._cut is not None and not self._falls_back:
                words = self._check_damage_named(launch)
                self._soak.say(f"{what}: {words}")
                return
            words = self._check(launch, fault, number)
        except Failed as failure:
            raise Failed(f"{what}: {failure}") from None
        if launch.saved:
            self._saved = launch.saved
        if fault is not None and fault["kind"] == "cut" and launch.fired:
            words += f"; {self._cut_file()}"
        self._soak.say(f"{what}: {words}")

    def _describe(self, fault: dict[str, Any] | None, world_size: int) -> str:
        setting = self._setting
        text = f"{setting.preset:<13} {setting.model:<4} {setting.compute} K={setting.accumulation} W={world_size} "
        if fault is None:
            return text + "no fault"
        where = f" in {fault['at']}" if fault["at"] and fault["kind"] not in ("full disk", "kill in save") else ""
        how = f" {signal.Signals(fault['signal']).name}" if fault["kind"] == "kill" else ""
        ranks = f" rank {', '.join(map(str, fault['ranks']))}" if fault["ranks"] else ""
        return f"{text}{fault['kind']}{how}{ranks} at step {fault['step']}{where}"

    # Checks

    def _check(self, launch: Launch, fault: dict[str, Any] | None, number: int) -> str:
        tally, kind = self._soak.tally, fault["kind"] if fault is not None else None
        words = [self._check_loaded(launch, number)]
        if None in launch.codes:
            tally.hangs += 1
            raise Failed(
                f"HANG of ranks {[r for r, c in enumerate(launch.codes) if c is None]}:\n{_last(launch.logs, 60)}"
            )
        has_fired = fault is not None and bool(launch.fired)
        if kind is not None and not has_fired:
            tally.not_reached += 1
        elif kind not in (None, "cut"):
            tally.injected[kind] += 1
        goes_on = not has_fired or kind in ("other W", "cut", "preempt")
        if goes_on:
            self._expect(launch, dict.fromkeys(range(len(launch.codes)), 0))
            steps = launch.told[0]["steps"]
            self._compare(launch.told[0]["digest"], number, steps, "the end of the launch")
            words.append(f"went on to step {steps} with the same bits")
            if has_fired and kind != "cut":
                tally.went_on[kind] += 1
        else:
            assert fault is not None
            words.append(self._check_named(launch, fault))
        return "; ".join(filter(None, words))

    def _check_loaded(self, launch: Launch, number: int) -> str:
        loaded = launch.loaded
        if loaded is None:
            return ""
        writer, step = self._paths[loaded["launch"]], loaded["step"]
        world_size = len(launch.codes)
        self._paths[number] = writer if writer[-1][0] == world_size else (*writer, (world_size, step))
        self._compare(loaded["digest"], loaded["launch"], step, "what was loaded")
        is_older = step < self._saved
        if is_older and self._cut is None:
            self._soak.tally.steps_lost += 1
            raise Failed(f"step {step} was loaded, and the save of step {self._saved} had returned")
        if self._cut is not None:
            self._soak.tally.went_on["cut"] += 1
            self._forget_cut()
        self._saved = step
        return f"resumed from step {step}, same bits"

    def _check_damage_named(self, launch: Launch) -> str:
        """The only checkpoint was cut: every rank says so, and the chain begins again."""
        self._expect(launch, dict.fromkeys(range(len(launch.codes)), 1))
        for rank, told in enumerate(launch.told):
            if not told.get("is_ours"):
                self._soak.tally.unnamed += 1
                raise Failed(f"rank {rank} does not name the damage: {told}")
        self._soak.tally.named["cut"] += 1
        self._soak.tally.naming_ranks += len(launch.told)
        self._forget_cut()
        return f"{launch.told[0]['error']} on {len(launch.told)}, and there was no other checkpoint"

    def _forget_cut(self) -> None:
        assert self._cut is not None
        shutil.rmtree(self._cut)
        self._cut = None

    def _compare(self, digest: str, launch: int, step: int, what: str) -> None:
        _, digests = self._soak.reference(self._setting, self._paths[launch])
        self._soak.tally.comparisons += 1
        if digests[step] != digest:
            self._soak.tally.bits_lost += 1
            raise Failed(f"{what}, step {step}, differs from the undisturbed run {self._paths[launch]}")

    def _check_named(self, launch: Launch, fault: dict[str, Any]) -> str:
        tally, kind = self._soak.tally, fault["kind"]
        at_fault = sorted(launch.fired)  # of several ranks, one may be stopped by the death of another before its own
        shows = [rank for rank in range(len(launch.codes)) if kind == "full disk" or rank not in at_fault]
        codes = dict.fromkeys(shows, 1)
        codes |= dict.fromkeys([] if kind == "full disk" else at_fault, 1 if kind == "raise" else -fault["signal"])
        if kind == "freeze":
            codes |= dict.fromkeys(at_fault, -signal.SIGKILL)
        self._expect(launch, codes)
        for rank in at_fault if kind == "raise" else ():
            if launch.told[rank].get("error") != "InjectedError":
                tally.unnamed += 1
                raise Failed(f"rank {rank} raised, and shows {launch.told[rank]}")
        for rank in shows:
            told = launch.told[rank]
            names = kind == "full disk" or any(f"rank {culprit}" in told.get("text", "") for culprit in at_fault)
            if not told.get("is_ours") or not names:
                tally.unnamed += 1
                raise Failed(f"rank {rank} does not name the fault: {told}")
        if kind == "raise":
            shows = list(range(len(launch.codes)))
        if not shows:
            tally.alone[kind] += 1
            return "no survivors"
        seconds = max(launch.told[rank]["ended"] for rank in shows) - max(launch.fired.values())
        tally.seconds.append(seconds)
        tally.named[kind] += 1
        tally.naming_ranks += len(shows)
        return f"{launch.told[shows[0]]['error']} on {len(shows)} in {seconds:.1f} s"

    def _expect(self, launch: Launch, codes: dict[int, int]) -> None:
        found = dict(enumerate(launch.codes))
        if found != codes:
            self._soak.tally.wrong_exits += 1
            raise Failed(f"exit codes {found} instead of {codes}:\n{_last(launch.logs, 30)}")

    def _cut_file(self) -> str:
        """Cut a file of the newest checkpoint."""
        checkpoints = sorted(self._checkpoints(), key=lambda path: path.stat().st_mtime)
        victims = sorted(path for path in checkpoints[-1].rglob("*") if path.is_file() and path.stat().st_size)
        victim = self._rng.choice(victims)
        os.truncate(victim, self._rng.randrange(victim.stat().st_size))
        self._cut, self._falls_back = checkpoints[-1], len(checkpoints) > 1
        self._saved = 0
        self._soak.tally.injected["cut"] += 1
        return f"cut {victim.relative_to(self._folder)}"


def _running(processes: list[Any]) -> list[Any]:
    return [process for process in processes if process.poll() is None]


def _read_json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        return dict(json.loads(path.read_text()))
    return {}


def _last(logs: list[str], lines: int = 8) -> str:
    return "\n".join(f"-- rank {rank}\n" + "\n".join(log.splitlines()[-lines:]) for rank, log in enumerate(logs))


def main(words: list[str] | None = None, report: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--faults", type=int, help="end after so many faults, if the time is not over before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo", help="nccl: all ranks on one GPU")
    parser.add_argument("--jobs", type=int, default=3, help="chains at a time")
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), help="only faults of these kinds")
    parser.add_argument("--out", type=Path, help="the result, benchmarks/results/DATE-soak-BACKEND.json by default")
    options = parser.parse_args(words)
    started = time.monotonic()
    head = {**made(), "versions": versions(), "backend": options.backend, "seed": options.seed, "jobs": options.jobs}
    if options.kinds:
        head["kinds"] = options.kinds
    out = options.out or Path(__file__).parent / "results" / f"{head['date']}-soak-{options.backend}.json"

    def keep(tally: Tally) -> None:
        result = {**head, "seconds": round(time.monotonic() - started, 1), **tally.result()}
        out.write_text(json.dumps(result, indent=1) + "\n")

    fork_server()
    with tempfile.TemporaryDirectory(prefix="shardwise-soak-") as root:
        soak = Soak(options, Path(root), keep)
        soak.run()
    report(json.dumps(soak.tally.result(), indent=1))
    report(f"written to {out}")
    return 1 if soak.tally.failures else 0


if __name__ == "__main__":
    try:
        code = main()
    finally:
        close_fork_server()
    sys.exit(code)
