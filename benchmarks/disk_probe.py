"""A disk's bandwidth: reads, writes, and both at once, with 8 threads and O_DIRECT, of a file that exists already.

python benchmarks/disk_probe.py --folder /nvme --gib 16
"""

import argparse
import contextlib
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BLOCK_BYTES = 1 << 20
THREADS = 8


def probe(folder: str, size_bytes: int) -> dict[str, float]:
    """GB/s of reading and of writing `size_bytes`, and of both at once, with half of the threads for each."""
    part = size_bytes // THREADS // BLOCK_BYTES * BLOCK_BYTES
    with _file(folder, part * THREADS) as path:
        parts = [(number * part, part) for number in range(THREADS)]
        writes = [(os.pwritev, start, size) for start, size in parts]
        reads = [(os.preadv, start, size) for start, size in parts]
        _seconds(path, writes)  # the first write allocates the blocks
        return {
            "write": part * THREADS / _seconds(path, writes) / 1e9,
            "read": part * THREADS / _seconds(path, reads) / 1e9,
            "both": part * THREADS / _seconds(path, writes[: THREADS // 2] + reads[THREADS // 2 :]) / 1e9,
        }


def yardstick_gbs(rates: dict[str, float], read_bytes: float, written_bytes: float) -> float:
    """The bandwidth that this traffic could reach: reads and writes in turn or at once, whichever is faster."""
    total = read_bytes + written_bytes
    in_turn = total / (read_bytes / rates["read"] + written_bytes / rates["write"])
    return max(in_turn, rates["both"])


@contextlib.contextmanager
def _file(folder: str, size_bytes: int) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile(dir=folder, prefix="disk-probe-") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        yield Path(file.name)


def _seconds(path: Path, jobs: list[tuple[Callable[..., int], int, int]]) -> float:
    def work(job: tuple[Callable[..., int], int, int]) -> None:
        transfer, start, size = job
        handle = os.open(path, os.O_RDWR | os.O_DIRECT)
        with contextlib.closing(mmap.mmap(-1, BLOCK_BYTES)) as block:
            block.write(os.urandom(BLOCK_BYTES))
            for offset in range(start, start + size, BLOCK_BYTES):
                if transfer(handle, [block], offset) != BLOCK_BYTES:
                    raise OSError(f"{path}: a request transferred only a part")
        os.close(handle)

    begun = time.perf_counter()
    with ThreadPoolExecutor(len(jobs)) as threads:
        list(threads.map(work, jobs))
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--gib", type=float, default=4)
    args = parser.parse_args()
    rates = probe(args.folder, int(args.gib * 2**30))
    print(json.dumps({way: round(rate, 3) for way, rate in rates.items()}))


if __name__ == "__main__":
    main()
