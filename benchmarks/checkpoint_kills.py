"""Kill ranks while they save, again and again; after each kill the newest complete checkpoint must load.

    python benchmarks/checkpoint_kills.py --kills 1000 --log benchmarks/results/DATE-checkpoint-kills.jsonl

Ranks save without pause, blocking and asynchronously in turn. At a random moment one of them, or all, get SIGKILL.
Then a process of its own loads the newest checkpoint: every value of it must be that of one save, and that save not
older than the last one that had returned. A line of the log says where each kill fell, told from what lay on disk with
all ranks stopped: `inside` is after the first byte was written and before the rename.

Processes are forked from one that has imported everything, so a kill costs a fraction of a second. Several of these
with seeds of their own can run at once and append to one log.
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
import torch._dynamo  # by the parent, once: every engine needs it
import torch.distributed as dist

import shardwise
import shardwise.engine.initialize
from shardwise.checkpoint import files, folder

PR_SET_PDEATHSIG = 1
LIMIT_S = 60.0
BUSY, RETURNED = 0, 8  # in the memory that parent and ranks share: files begun so far, the last save that returned


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


def kill_once(root: Path, chance: random.Random, ranks: int, width: int, newest: int) -> dict[str, Any]:
    """Start ranks, kill at a random moment, look at what is left, load."""
    shared = mmap.mmap(-1, 16)
    store = root / f"store-{chance.random()}"
    pids = [fork(lambda rank=rank: save_for_ever(rank, ranks, root, store, shared, width)) for rank in range(ranks)]
    victims = chance.choice([*([rank] for rank in range(ranks)), list(range(ranks))])
    wait_for_write(shared, chance, ranks)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # so that what is on disk is what the kill finds
    where = place_of(root)
    for rank, pid in enumerate(pids):
        os.kill(pid, signal.SIGKILL if rank in victims else signal.SIGCONT)
    time.sleep(chance.choice([0.0, 0.05]))  # survivors may still commit, or fail
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


def wait_for_write(shared: mmap.mmap, chance: random.Random, ranks: int) -> None:
    """Until some file has got its first bytes, then perhaps a little longer."""
    deadline = time.monotonic() + LIMIT_S
    begun = chance.randrange(3 * ranks)
    while struct.unpack_from("q", shared, BUSY)[0] <= begun and time.monotonic() < deadline:
        time.sleep(0.0002)
    time.sleep(chance.uniform(0, chance.choice([0.0, 0.002, 0.01, 0.05])))


def place_of(root: Path) -> str:
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


def save_for_ever(rank: int, ranks: int, root: Path, store: Path, shared: mmap.mmap, width: int) -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the kill)
    meeting = dist.FileStore(str(store), ranks)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks, timeout=timedelta(seconds=LIMIT_S))
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
            for _, piece in unit.weights.pieces:
                moments = ("exp_avg", "exp_avg_sq")
                engine.optimizer.state[piece] = {key: torch.full_like(piece, number) for key in moments}
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
