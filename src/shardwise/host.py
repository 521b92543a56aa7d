"""Host memory that the device copies from and to: of just the size asked for, page-locked where that helps.

torch's own pinned allocator rounds up to powers of two, which can double what rests on the host. So slabs are mapped
and registered here, one by one, to the page.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

from shardwise.memory import Entry, Ledger


class Slab:
    """One flat tensor in host memory, zeros at first."""

    def __init__(self, ledger: Ledger, entry: Entry, numel: int, dtype: torch.dtype, pinned: bool) -> None:
        self.size_bytes = numel * dtype.itemsize
        self._ledger, self._entry = ledger, entry
        self._address = 0
        self.tensor = self._pinned(numel, dtype) if pinned and numel else torch.zeros(numel, dtype=dtype)
        ledger.add(entry, self.size_bytes)

    def free(self) -> None:
        """Give the memory back; no copy may be under way."""
        if self._address:
            _check(torch.cuda.cudart().cudaHostUnregister(self._address), "released")
        self._address = 0
        self._ledger.remove(self._entry, self.size_bytes)
        self.size_bytes = 0
        self.tensor = torch.empty(0, dtype=self.tensor.dtype)

    def __del__(self) -> None:
        # Mapped memory that is gone but still registered would be handed to the device again.
        with contextlib.suppress(Exception):
            if self._address:
                torch.cuda.cudart().cudaHostUnregister(self._address)

    def _pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # Anonymous maps lie on page boundaries; torch keeps the map for as long as the tensor lives.
        pages = mmap.mmap(-1, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(pages, dtype=dtype, count=numel)
        _check(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), self.size_bytes, 0), "page-locked")
        self._address = tensor.data_ptr()
        return tensor


def _check(status: object, verb: str) -> None:
    code = int(getattr(status, "value", status))  # type: ignore[call-overload]  # an enum of torch's, or a number
    if code:
        raise MemoryError(
            f"host memory could not be {verb} (CUDA error {code}): free host memory, raise `ulimit -l`, or set "
            "offload.pin_memory to false, which makes copies slower"
        )
