"""Training data: the bytes of text files, or a memory-mapped token file.

Text files are read in place, as if concatenated with a zero byte after each. A corpus may therefore be larger than
memory, and every rank reads only the samples it trains on.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwise.errors import ConfigError
from shardwise.sizes import format_bytes, format_count

BYTES = 256
"""The vocabulary size of text, which is read as bytes."""
HEAD_BYTES = 4096
TOKEN_SUFFIXES = (".npy", ".bin")
MOST_IN_BIN = 2**16
# Tests and tables: much text of little variety.
STANDARD_LIBRARY_SKIPS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}


class TextFile:
    """A file, its size and the checksum of its first bytes."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        try:
            with path.open("rb") as file:
                head = file.read(HEAD_BYTES)
                self.size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        self.head_crc = zlib.crc32(head)
        self.is_binary = b"\0" in head

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop`; position `size` is a zero byte."""
        with self.path.open("rb") as file:
            text = os.pread(file.fileno(), min(stop, self.size) - start, start) if start < self.size else b""
        if len(text) != max(0, min(stop, self.size) - start):
            raise ConfigError(f"{self.path}: has become shorter than the {self.size} bytes it had at the start")
        return text + b"\0" * (stop > self.size)


class TextCorpus:
    """Concatenated text files."""

    vocabulary = BYTES
    is_text = True

    def __init__(self, files: Sequence[TextFile], title: str = "") -> None:
        self._title = title
        self._files = list(files)
        self._ends = list(accumulate(file.size + 1 for file in self._files))
        self.length = self._ends[-1] if self._ends else 0

    def __str__(self) -> str:
        count = len(self._files)
        return f"{self._title}{count} file{'s' * (count != 1)}, {format_bytes(round(self.length, -5) or self.length)}"

    @property
    def fingerprint(self) -> str:
        """The same for the same data in any folder."""
        lines = [f"{file.name} {file.size} {file.head_crc}" for file in self._files]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The tokens from `start` up to `stop`."""
        text, index = b"", bisect_right(self._ends, start)
        while start < stop:
            begin, end = self._ends[index] - self._files[index].size - 1, min(stop, self._ends[index])
            text += self._files[index].read(start - begin, end - begin)
            start, index = end, index + 1
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)


@dataclass(frozen=True)
class TokenCorpus:
    """A memory-mapped array of token numbers, each below `vocabulary`."""

    path: Path
    array: npt.NDArray[np.integer]
    vocabulary: int

    is_text = False

    @property
    def length(self) -> int:
        return len(self.array)

    def __str__(self) -> str:
        return f"{self.path}: {format_count(self.length)} tokens of {self.vocabulary}"

    @property
    def fingerprint(self) -> str:
        head = zlib.crc32(np.ascontiguousarray(self.array[:HEAD_BYTES]).tobytes())
        return f"{self.length}-{self.array.dtype}-{head:08x}"

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        tokens = self.array[start:stop].astype(np.int64)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            bad = next(int(token) for token in tokens if not 0 <= token < self.vocabulary)
            raise ConfigError(f"{self.path}: token {bad} near position {start} is not below --vocab {self.vocabulary}")
        return tokens


Corpus = TextCorpus | TokenCorpus


def open_corpus(paths: Sequence[str], pattern: str = "*", vocabulary: int | None = None) -> Corpus:
    """The corpus of `paths`: a token file (.npy or .bin) or text; without paths, Python's standard library."""
    if not paths:
        return standard_library()
    if any(not path.strip() for path in paths):
        raise ConfigError("one of the paths of the data is empty: name text files or folders, or none at all")
    if any(Path(path).suffix in TOKEN_SUFFIXES for path in paths):
        return _tokens(paths, vocabulary)
    if vocabulary is not None:
        raise ConfigError(f"--vocab {vocabulary}: text is read as bytes; only .npy and .bin files have a vocabulary")
    files = [file for path in paths for file in _text_files(Path(path), pattern) if file.size]
    if not files:
        raise ConfigError(f"no text in {', '.join(paths)}" + (f" (--glob {pattern!r})" if pattern != "*" else ""))
    return TextCorpus(files)


def standard_library() -> TextCorpus:
    """The source files of this Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in _below(root, "*.py") if not STANDARD_LIBRARY_SKIPS & set(path.relative_to(root).parts)]
    if not paths:
        raise ConfigError(
            f"this Python ({sys.executable}) has no sources of its standard library: name text files or "
            "folders to train on, as in `shardwise train notes.txt src/`"
        )
    files = [TextFile(path, path.relative_to(root).as_posix()) for path in paths]
    return TextCorpus(files, "Python's standard library, ")


def _text_files(path: Path, pattern: str) -> Iterator[TextFile]:
    """A single file, or the matching text files of a folder in the order of their names."""
    if not path.exists():
        raise ConfigError(f"there is no file or folder {str(path)!r}")
    if not path.is_dir():
        yield TextFile(path, path.name)
        return
    for found in _below(path, pattern):
        file = TextFile(found, found.relative_to(path).as_posix())
        if not file.is_binary:
            yield file


def _below(root: Path, pattern: str) -> list[Path]:
    """The files below `root`, sorted, without hidden files and compiled Python."""
    try:
        found = [path for path in root.rglob(pattern) if path.is_file()]
    except (OSError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"{root}: cannot be searched for {pattern!r}: {error}") from None
    parts = {path: path.relative_to(root).parts for path in found}
    return sorted(path for path in found if not any(part[0] == "." or part == "__pycache__" for part in parts[path]))


def _tokens(paths: Sequence[str], vocabulary: int | None) -> TokenCorpus:
    path = Path(paths[0])
    if len(paths) > 1:
        raise ConfigError(f"{path} is a token file: give it alone, without the {len(paths) - 1} other path(s)")
    if vocabulary is None:
        raise ConfigError(f"{path} is a token file: give its vocabulary size, --vocab N")
    if path.suffix == ".bin" and vocabulary > MOST_IN_BIN:
        raise ConfigError(
            f"{path}: a .bin file holds 16-bit tokens, at most {MOST_IN_BIN} different ones, and --vocab is "
            f"{vocabulary}: save wider tokens as .npy"
        )
    try:
        if path.suffix == ".npy":
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            array = np.memmap(path, dtype=np.uint16, mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{path}: cannot be read as tokens: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "ui":
        raise ConfigError(f"{path}: expected a 1-D array of integers, found {array.ndim}-D {array.dtype}")
    return TokenCorpus(path, array, vocabulary)
