"""The parts of a checkpoint that need no engine: stored ranges, blocks, plain values, manifest, folder."""

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.checkpoint import folder, storage
from shardwise.checkpoint.files import BlockReader, BlockWriter
from shardwise.checkpoint.manifest import (
    Manifest,
    ParamInfo,
    StoredFile,
    StoredRange,
    StoredTensor,
    gap,
    pieces_over,
    read_manifest,
)
from shardwise.checkpoint.plain import from_plain, to_plain
from shardwise.errors import CheckpointError, DamagedError
from shardwise.partition.layout import Span

# Ranges


@st.composite
def cut_tensors(draw):
    """A tensor's elements in stored ranges, and a span to read."""
    numel = draw(st.integers(1, 60))
    cuts = sorted({0, numel, *draw(st.lists(st.integers(1, numel), max_size=6))})
    ranges = [StoredRange(file, a, b, draw(st.integers(0, 9)) * 4) for file, (a, b) in enumerate(pairwise(cuts))]
    start = draw(st.integers(0, numel))
    return numel, ranges, Span(start, draw(st.integers(start, numel)))


@given(cut_tensors())
def test_what_is_fetched_is_what_was_wanted(case):
    _, ranges, wanted = case
    got = []
    for piece in pieces_over(ranges, 4, wanted):
        stored = ranges[piece.file]
        first = stored.start + (piece.offset - stored.offset) // 4
        assert first == piece.start
        assert stored.start <= first
        assert piece.stop <= stored.stop
        got += range(first, piece.stop)
    assert got == list(range(wanted.start, wanted.stop))


@given(cut_tensors(), st.data())
def test_a_gap_is_found(case, data):
    numel, ranges, _ = case
    assert gap(ranges, numel) is None
    assert gap(ranges, numel + 1) == Span(numel, numel + 1)
    lost = data.draw(st.integers(0, len(ranges) - 1))
    assert gap(ranges[:lost] + ranges[lost + 1 :], numel) is not None
    assert gap(ranges[:lost] + [ranges[lost]] * 2 + ranges[lost + 1 :], numel) is not None


# Plain values

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers(), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=40)
@given(PLAIN)
def test_plain_values_come_back_as_they_were(value):
    tensors = {}
    plain = json.loads(json.dumps(to_plain(value, tensors, "x"), allow_nan=False))
    assert from_plain(plain, tensors.__getitem__) == value


def test_tensors_and_what_schedulers_hold_come_back():
    tensors = {}
    value = {
        "matrix": torch.randn(2, 3),
        "step": torch.tensor(3.0),
        "not": float("nan"),
        "steps": Counter({30: 1, 80: 2}),
        "$tensor": 1,
    }
    back = from_plain(json.loads(json.dumps(to_plain(value, tensors, "x"))), tensors.__getitem__)
    assert list(tensors) == ["x/matrix"]
    assert torch.equal(back["matrix"], value["matrix"])
    assert back["step"].dtype == torch.float32
    assert back["not"] != back["not"]
    assert isinstance(back["steps"], Counter)
    assert back["steps"][80] == 2
    assert back["$tensor"] == 1


def test_what_cannot_be_held_is_named():
    with pytest.raises(CheckpointError, match=r"state/loader/0 is a set.*state_dict"):
        to_plain({"loader": [{1, 2}]}, {}, "state")
    with pytest.raises(CheckpointError, match="the key"):
        to_plain({(1, 2): 3}, {}, "state")


# Blocks


@settings(max_examples=50)
@given(
    data=st.binary(max_size=100),
    cuts=st.lists(st.integers(0, 100), max_size=4),
    part=st.tuples(*[st.integers(0, 100)] * 2),
)
def test_any_part_reads_as_it_was_written(tmp_path_factory, data, cuts, part):
    path = tmp_path_factory.mktemp("blocks") / "file"
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    with BlockWriter(path, block_bytes=16) as writer:
        for a, b in pairwise(edges):
            writer.write(memoryview(data)[a:b])
    reader = BlockReader(path, writer.size_bytes, writer.checksums, block_bytes=16)
    start, stop = sorted(min(edge, len(data)) for edge in part)
    target = bytearray(stop - start)
    reader.read_into(memoryview(target), start)
    reader.close()
    assert target == data[start:stop]


def test_only_the_blocks_that_are_touched_are_verified(tmp_path):
    path = tmp_path / "file"
    with BlockWriter(path, block_bytes=16) as writer:
        writer.write(memoryview(bytes(range(48))))
    damaged = bytearray(path.read_bytes())
    damaged[40] ^= 1
    path.write_bytes(damaged)
    reader = BlockReader(path, 48, writer.checksums, block_bytes=16)
    reader.read_into(memoryview(bytearray(20)), 5)
    with pytest.raises(DamagedError, match=r"file is damaged: its bytes 32 to 48"):
        reader.read_into(memoryview(bytearray(20)), 15)


# Manifest


def make_manifest(**changes):
    fields = {
        "tag": "a",
        "serial": 1,
        "steps": 3,
        "world_size": 1,
        "written_by": "test é",
        "optimizer": None,
        "files": (StoredFile(name="rank-00000.safetensors", size_bytes=48, crc32="00000000"),),
        "params": {"w": ParamInfo(compute="float32")},
        "tensors": {"param/w": StoredTensor(dtype="float32", shape=(3,), pieces=(StoredRange(0, 0, 3, 36),))},
        "training": {"lr": 0.1},
    }
    return Manifest(**{**fields, **changes})


def write_manifest(path, manifest):
    path.mkdir(exist_ok=True)
    (path / "manifest.json").write_text(manifest.to_text())
    return path


def test_a_manifest_reads_as_it_was_written(tmp_path):
    manifest = make_manifest()
    assert read_manifest(write_manifest(tmp_path, manifest)) == manifest
    assert json.loads((tmp_path / "manifest.json").read_text())["manifest"]["tag"] == "a"


def test_any_flipped_bit_of_a_manifest_is_found(tmp_path):
    path = write_manifest(tmp_path, make_manifest()) / "manifest.json"
    good = path.read_bytes()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << random.Random(position).randrange(8)
        path.write_bytes(bad)
        with pytest.raises(DamagedError, match=r"manifest\.json is damaged"):
            read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a/b", "..", ".hidden", "", "a\0b"])
def test_a_manifest_cannot_name_files_elsewhere(name):
    with pytest.raises(ValueError, match="not a plain file name"):
        StoredFile(name=name, size_bytes=1, crc32="")


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(DamagedError, match="link cannot be read"):
        BlockReader(tmp_path / "link", 1, [0])


@pytest.mark.parametrize(
    ("stored_range", "message"),
    [
        (StoredRange(0, 0, 2, 16), "elements 2 to 3 of param/w are missing"),
        (StoredRange(1, 0, 3, 16), "outside of every file"),
        (StoredRange(0, 0, 3, 40), "outside of every file"),
        (StoredRange(0, 0, 3, -1), "outside of every file"),
    ],
)
def test_impossible_ranges_are_refused(tmp_path, stored_range, message):
    stored = StoredTensor(dtype="float32", shape=(3,), pieces=(stored_range,))
    write_manifest(tmp_path, make_manifest(tensors={"param/w": stored}))
    with pytest.raises(CheckpointError, match=message):
        read_manifest(tmp_path)


NEWER = r"written by a newer version of shardwise \(format 4; this one reads up to 3\): update shardwise"


def test_a_newer_format_is_refused_and_not_called_damaged(tmp_path):
    write_manifest(tmp_path, make_manifest(version=4))
    with pytest.raises(CheckpointError, match=NEWER) as raised:
        read_manifest(tmp_path)
    assert not isinstance(raised.value, DamagedError)


def test_a_tensor_of_another_width_does_not_fit_its_file(tmp_path):
    stored = StoredTensor(dtype="float16", shape=(3,), pieces=(StoredRange(0, 0, 3, 36),))
    write_manifest(tmp_path, make_manifest(tensors={"param/w": stored}))
    with pytest.raises(DamagedError, match=r"not as shardwise writes it: .* leave bytes 42 to 48"):
        read_manifest(tmp_path)


# Folder


def commit(root, tag):
    draft = folder.CheckpointDraft.begin(root, tag)
    (draft.path / "rank-00000.safetensors").write_bytes(b"\0" * 48)
    draft.commit(make_manifest(tag=tag, serial=draft.serial))
    return draft.target


def test_the_newest_is_the_last_one_written(tmp_path):
    paths = [commit(tmp_path, tag) for tag in ("b", "a", "c")]
    assert folder.candidates(tmp_path, "latest", False) == [paths[2]]
    assert folder.candidates(tmp_path, "b", False) == [paths[0]]
    assert folder.candidates(tmp_path, "b", True) == [paths[0], paths[2], paths[1]]
    assert folder.candidates(paths[1], "latest", False) == [paths[1]]


def test_the_same_tag_again_replaces_the_old_one_after_the_new_one_is_there(tmp_path):
    commit(tmp_path, "a")
    again = commit(tmp_path, "a")
    assert [entry.path for entry in folder.list_checkpoints(tmp_path)] == [again]
    assert folder.candidates(tmp_path, "a", False) == [again]


def test_an_old_checkpoint_stays_if_the_new_one_is_not_whole(tmp_path, monkeypatch):
    old, plain = commit(tmp_path, "a"), storage.sync_folder

    def lose_a_file(path):
        (path / "rank-00000.safetensors").unlink(missing_ok=True)
        plain(path)

    monkeypatch.setattr(storage, "sync_folder", lose_a_file)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors was removed"):
        commit(tmp_path, "a")
    monkeypatch.undo()
    assert folder.candidates(tmp_path, "a", False) == [old]
    assert folder.missing_files(old) == []


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*; found: none"):
        folder.candidates(tmp_path / "nowhere", "latest", True)
    commit(tmp_path, "a")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint 'b' in .*; found: 'a'"):
        folder.candidates(tmp_path, "b", False)


def test_a_damaged_manifest_is_told_or_passed_over(tmp_path):
    good, bad = commit(tmp_path, "a"), commit(tmp_path, "b")
    (bad / "manifest.json").write_bytes(b"{}")
    with pytest.raises(DamagedError, match=r"b/manifest\.json is damaged.*fallback=True"):
        folder.candidates(tmp_path, "latest", False)
    assert folder.candidates(tmp_path, "latest", True) == [good]
    assert folder.candidates(tmp_path, "a", False) == [good]


def rewrite(path, **changes):
    """Change a manifest, and give it the digest that belongs to it."""
    body = json.loads((path / "manifest.json").read_text())["manifest"]
    text = json.dumps({**body, **changes}, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(f'{{"sha256": "{digest}", "manifest": {text}}}\n')


def test_a_newer_checkpoint_is_told_even_with_fallback(tmp_path):
    old, new = commit(tmp_path, "a"), commit(tmp_path, "b")
    rewrite(new, version=4, more=1)
    for fallback in (False, True):
        with pytest.raises(CheckpointError, match=NEWER):
            folder.candidates(tmp_path, "latest", fallback)
    assert folder.candidates(tmp_path, "a", False) == [old]
    newest = commit(tmp_path, "c")
    assert folder.candidates(tmp_path, "latest", False) == [newest], "its number is known, and is not the highest"


DAMAGES = {
    "newer": lambda path: rewrite(path, version=4),
    "damaged": lambda path: (path / "manifest.json").write_bytes(b"{}"),
    "forged": lambda path: rewrite(path, steps=-1),
    "without a manifest": lambda path: (path / "manifest.json").unlink(),
    "cut short": lambda path: (path / "rank-00000.safetensors").write_bytes(b"short"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_save_of_the_same_tag_leaves_what_it_cannot_read(tmp_path, damage):
    old = commit(tmp_path, "a")
    DAMAGES[damage](old)
    content = {file.name: file.read_bytes() for file in old.iterdir()}
    new = commit(tmp_path, "a")
    folder.keep_newest(tmp_path, 1)
    assert {file.name: file.read_bytes() for file in old.iterdir()} == content
    assert folder.candidates(tmp_path, "a", False) == [new]


def test_a_tag_that_is_not_there_is_told_with_fallback_too(tmp_path):
    path = commit(tmp_path, "a")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint 'b' in .*; found: 'a'"):
        folder.candidates(tmp_path, "b", True)
    with pytest.raises(CheckpointError, match="is a checkpoint, and not 'b'"):
        folder.candidates(path, "b", True)
    (path / "manifest.json").write_bytes(b"{}")
    with pytest.raises(DamagedError, match="has no other"):
        folder.candidates(tmp_path, "a", True)


def test_folders_of_others_stay(tmp_path):
    theirs = tmp_path / ".tmp-mine"
    theirs.mkdir()
    os.utime(theirs, (0, 0))
    commit(tmp_path, "a")
    assert theirs.exists()


def test_retention_counts_what_is_whole(tmp_path):
    paths = [commit(tmp_path, tag) for tag in "abcd"]
    (paths[3] / "rank-00000.safetensors").write_bytes(b"short")
    folder.keep_newest(tmp_path, 2)
    assert [path.exists() for path in paths] == [False, True, True, True]
    folder.keep_newest(tmp_path, 1)
    assert [path.exists() for path in paths] == [False, False, True, True]


def test_leftovers_are_removed_and_never_taken_for_checkpoints(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mine = folder.CheckpointDraft.begin(tmp_path, "a").path
    left = mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{dead.pid}-"))
    elsewhere, old = (mine.with_name(f".tmp-{digit * 12}-{os.getpid()}-a-1-0") for digit in "12")
    removed = tmp_path / ".tmp-removed-b-0"
    for path in (left, elsewhere, old, removed):
        path.mkdir()
        write_manifest(path, make_manifest())
    for path in (old / "manifest.json", old):
        os.utime(path, (0, time.time() - 90_000))
    assert folder.list_checkpoints(tmp_path) == []
    committed = commit(tmp_path, "a")
    assert set(tmp_path.iterdir()) == {mine, elsewhere, committed}


@pytest.mark.parametrize("tag", ["latest", "", "../x", "a/b", ".a", "a b"])
def test_tags_are_names_of_folders(tmp_path, tag):
    with pytest.raises(CheckpointError, match="cannot be a checkpoint's tag"):
        folder.CheckpointDraft.begin(tmp_path, tag)
