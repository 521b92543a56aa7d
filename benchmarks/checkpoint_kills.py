"""Kill ranks while they save, many times; after each kill the newest complete checkpoint must load.

    python benchmarks/checkpoint_kills.py --kills 1000 --log benchmarks/results/DATE-checkpoint-kills.jsonl

Ranks save without pause, blocking and asynchronously in turn. At a random moment one of them, or all, get SIGKILL.
Then a new process loads the newest checkpoint: all of its values must be from one save, and that save must not be older
than the last one that had returned. The log has a line for each kill, with the moment at which it happened, as the
files showed while all ranks were stopped: `inside` is after the first byte was written and before the rename.

Processes are forked from one that has imported everything, so a kill takes a fraction of a second. Several runs with
different seeds can append to one log at the same time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once, in the parent: every engine needs it
import torch.distributed as dist

import shardwise
import shardwise.engine.initialize
from shardwise.checkpoint import files, folder

PR_SET_PDEATHSIG = 1
LIMIT_S = 60.0
BUSY, RETURNED = 0, 8  # offsets in the shared memory: files begun so far, the last save that returned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--log", type=Path, help="append a line of JSON for every kill")
    options = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="shardwise-kills-"))
    counts: dict[str, int] = {}
    newest = 0
    try:
        for number in range(options.kills):
            row = kill_once(root, random.Random(f"{options.seed}-{number}"), options.ranks, options.width, newest)
            row = {"seed": options.seed, "kill": number, "ranks": options.ranks, **row}
            newest = row.get("loaded", 0)
            counts[row["where"]] = counts.get(row["where"], 0) + 1
            if options.log:
                with options.log.open("a") as log:
                    log.write(json.dumps(row) + "\n")
            if not row["ok"]:
                sys.exit(f"after kill {number}: {row}")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps({"kills": options.kills, "loaded": options.kills, **counts}))


def kill_once(root: Path, rng: random.Random, ranks: int, width: int, newest: int) -> dict[str, Any]:
    """Start ranks, kill some of them at a random moment, and load what is left in a new process."""
    shared = mmap.mmap(-1, 16)
    store = root / f"store-{rng.random()}"
    pids = [fork(lambda rank=rank: save_forever(rank, ranks, root, store, shared, width)) for rank in range(ranks)]
    victims = rng.choice([*([rank] for rank in range(ranks)), list(range(ranks))])
    wait_for_write(shared, rng, ranks)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # so that the files do not change before the kill
    where = moment_of(root)
    for rank, pid in enumerate(pids):
        os.kill(pid, signal.SIGKILL if rank in victims else signal.SIGCONT)
    time.sleep(rng.choice([0.0, 0.05]))  # survivors may still commit, or fail
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    returned = max(newest, struct.unpack_from("q", shared, RETURNED)[0])
    report = root / "report.json"
    report.unlink(missing_ok=True)
    _, status = os.waitpid(fork(lambda: load_newest(root, returned, report, width)), 0)
    outcome = json.loads(report.read_text()) if report.exists() else {"error": f"exit status {status}"}
    store.unlink(missing_ok=True)
    return {"ok": status == 0, "where": where, "victims": victims, "returned": returned, **outcome}


def wait_for_write(shared: mmap.mmap, rng: random.Random, ranks: int) -> None:
    """Wait until some file has its first bytes, and then for a random time."""
    deadline = time.monotonic() + LIMIT_S
    begun = rng.randrange(3 * ranks)
    while struct.unpack_from("q", shared, BUSY)[0] <= begun and time.monotonic() < deadline:
        time.sleep(0.0002)
    time.sleep(rng.uniform(0, rng.choice([0.0, 0.002, 0.01, 0.05])))


def moment_of(root: Path) -> str:
    drafts = [path for path in root.glob(".tmp-*") if not path.name.startswith(".tmp-removed")]
    written = [file for draft in drafts for file in draft.glob("*.safetensors") if file.stat().st_size]
    return "inside" if written else "before the first byte" if drafts else "between saves"


def fork(work: object) -> int:
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the line above
    try:
        work()  # type: ignore[operator]  # any callable
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)


def start(width: int) -> shardwise.Engine:
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
    return shardwise.initialize(model, torch.optim.AdamW(model.parameters()), "zero3")


def save_forever(rank: int, ranks: int, root: Path, store: Path, shared: mmap.mmap, width: int) -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the kill)
    file_store = dist.FileStore(str(store), ranks)
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=ranks, timeout=timedelta(seconds=LIMIT_S))
    write = files.BlockWriter.write

    def count(writer: files.BlockWriter, data: memoryview) -> None:
        is_first = not writer.size_bytes
        write(writer, data)
        if is_first:
            struct.pack_into("q", shared, BUSY, struct.unpack_from("q", shared, BUSY)[0] + 1)

    files.BlockWriter.write = count  # type: ignore[method-assign]  # to know when to kill
    engine = start(width)
    number = engine.load(root, fallback=False)["number"] if folder.list_checkpoints(root) else 0
    while True:
        number += 1
        for unit in engine.units:
            unit.weights.master.fill_(number)
            for piece in unit.weights.pieces:
                moments = ("exp_avg", "exp_avg_sq")
                engine.optimizer.state[piece.param] = {key: torch.full_like(piece.param, number) for key in moments}
        blocking = bool(number % 2)
        engine.save(root, f"number-{number}", blocking=blocking, state={"number": number}, keep=2)
        if rank == 0:
            struct.pack_into("q", shared, RETURNED, number if blocking else number - 1)


def load_newest(root: Path, returned: int, report: Path, width: int) -> None:
    outcome: dict[str, object] = {}
    try:
        engine = start(width)
        # The very first save of all may be the one that was killed.
        is_empty = not returned and not folder.list_checkpoints(root)
        number = 0 if is_empty else engine.load(root)["number"]
        outcome["loaded"] = number
        assert number >= returned, f"save {returned} had returned, and {number} is the newest that loads"
        for name, _ in engine.module.named_parameters() if number else ():
            state = engine.full_state(name)
            for value in (engine.full_param(name), state["exp_avg"], state["exp_avg_sq"]):
                assert value.eq(number).all(), f"{name} is not that of save {number}"
    except BaseException as error:
        outcome["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        report.write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
