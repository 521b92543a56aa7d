"""Checkpoints in an object store: the same all-or-nothing commit without a rename.

Here the store is a folder that processes share (`support/object_folder.py`). `make test-object-store` runs the same
tests against an S3 server.
"""

import os
import re
import signal
import sys
from unittest import mock

import pytest

from shardwise import cli
from shardwise.checkpoint import files, folder
from shardwise.checkpoint.inspect import describe
from shardwise.checkpoint.object_store import ObjectStore, locate, storage_of
from shardwise.checkpoint.storage import RemotePath
from shardwise.errors import CheckpointError
from support import run_ranks
from support.object_folder import ObjectFolder
from support.training import digest, start, train_step

STORE = ObjectFolder.protocol


@pytest.fixture
def root(tmp_path):
    store = os.environ.get("SHARDWISE_OBJECT_STORE")
    return locate(f"{store}/{tmp_path.parent.name}/{tmp_path.name}" if store else f"{STORE}://{tmp_path}/store")


def trained(rank, steps=1, preset="zero3"):
    engine = start("gpt", {"preset": preset})
    for index in range(steps):
        train_step(engine, rank, index)
    return engine


def save_twice(rank, world_size, address):
    engine = trained(rank)
    engine.save(address, state={"step": 1})
    train_step(engine, rank, 1)
    path = engine.save(address, state={"step": 2}, blocking=False)
    engine.finish_save()
    bits = digest(engine)
    engine.destroy()
    return str(path), bits


def load(rank, world_size, address, **options):
    engine = start("gpt", {"preset": "zero1"})
    try:
        return engine.load(address, **options), digest(engine)
    except CheckpointError as error:
        return type(error).__name__, str(error)
    finally:
        engine.destroy()


def names(path):
    return sorted(storage_of(path).sizes(path))


def test_what_was_saved_loads_with_every_bit_and_the_commands_read_it(root, tmp_path, monkeypatch, capsys):
    [(path, bits), _] = run_ranks(save_twice, 2, str(root))
    assert path == f"{root}/step-2"
    assert names(locate(path)) == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    assert names(root) == []
    assert run_ranks(load, 3, str(root))[1] == ({"step": 2}, bits)
    assert describe(root, verified=True).count("verified") == 2
    for words in (["inspect", str(root)], ["export", f"{root}/step-1", str(tmp_path / "out")]):
        monkeypatch.setattr(sys, "argv", ["shardwise", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
    shown = capsys.readouterr().out
    assert "step-2: step 2, 2 ranks" in shown
    assert f"exported {root}/step-1 to" in shown
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_tag_again_and_the_old_ones_removed(root):
    engine = trained(0)
    for number in range(3):
        path = engine.save(str(root), "same", state={"number": number})
    assert [entry.path for entry in folder.list_checkpoints(root)] == [path]
    for number in range(3):
        engine.save(str(root), f"more-{number}", keep=2)
    assert [entry.tag for entry in folder.list_checkpoints(root)] == ["more-2", "more-1"]
    with pytest.raises(CheckpointError, match="is in an object store: export into a folder"):
        engine.export(f"{root}/out")
    engine.destroy()


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"])
@pytest.mark.parametrize("how", ["flipped", "torn", "missing"])
def test_damage_is_named_and_the_checkpoint_before_loads(root, file, how):
    run_ranks(save_twice, 2, str(root))
    damaged, store = root / "step-2" / file, storage_of(root)
    content = bytearray(store.read([damaged])[0])
    content[len(content) // 2] ^= 4
    store.delete([damaged])
    if how != "missing":
        store.put(damaged, bytes(content) if how == "flipped" else bytes(content[:-100]))
    kind, text = run_ranks(load, 1, str(root))[0]
    assert kind == "DamagedError"
    assert file in text
    assert run_ranks(load, 1, str(root), fallback=True)[0][0] == {"step": 1}


def die_in_a_save(rank, world_size, address, moment):
    """Rank 1 dies while it uploads, or rank 0 before, or right after, the manifest is there."""
    engine = trained(rank)
    engine.save(address, state={"step": 1})
    train_step(engine, rank, 1)
    work = {"upload": (files.BlockWriter, "write"), "commit": (ObjectStore, "publish"), "end": (ObjectStore, "delete")}
    owner, name = work[moment]
    plain, calls = getattr(owner, name), []

    def dies(*args):
        calls.append(args)
        if rank == (moment == "upload") and len(calls) == 2 - (moment == "commit"):
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*args)

    with mock.patch.object(owner, name, dies):
        engine.save(address, state={"step": 2})


@pytest.mark.parametrize("moment", ["upload", "commit", "end"])
def test_a_rank_that_dies_in_a_save_leaves_a_checkpoint_that_loads(root, moment):
    outcomes = run_ranks(die_in_a_save, 2, str(root), moment, fresh=True, check=False, timeout=60, grace=20)
    assert outcomes[moment == "upload"].exitcode == -signal.SIGKILL, outcomes
    # A rank 0 that lives removes the draft; one that died leaves its note.
    assert any(name.startswith(".tmp-") for name in names(root)) == (moment != "upload")
    last = {"step": 2 if moment == "end" else 1}
    assert run_ranks(load, 1, str(root))[0][0] == last
    assert len(folder.list_checkpoints(root)) == last["step"], "the draft is not one"
    engine = trained(0)
    engine.save(str(root), "next")
    assert names(root) == []
    left = {path.name for path in storage_of(root).folders(root) if names(path)}
    assert left == {"step-1", "next", *(["step-2"] if moment == "end" else [])}
    engine.destroy()


def test_a_removal_that_is_interrupted_is_completed_by_the_next_save(root):
    engine = trained(0)
    engine.save(str(root), "old", state={"is": "old"})
    engine.save(str(root), "new", state={"is": "new"})
    with (
        mock.patch.object(ObjectStore, "_clear", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        folder.remove(root / "new")
    storage_of(root).delete([root / "new" / "manifest.json"])  # the first that `_clear` deletes
    assert engine.load(str(root)) == {"is": "old"}
    engine.save(str(root), "next")
    assert {entry.tag for entry in folder.list_checkpoints(root)} == {"old", "next"}
    assert not names(root / "new")
    engine.destroy()


def test_an_address_that_cannot_be_read_is_one_message():
    engine = trained(0)
    with pytest.raises(CheckpointError, match=re.escape("nothing://x needs a package that reads nothing://")):
        engine.save("nothing://x")
    engine.destroy()


def test_whatever_a_client_library_raises_is_one_message(root):
    engine = trained(0)
    with (
        mock.patch.object(storage_of(root)._files, "pipe_file", side_effect=ValueError("no route")),
        pytest.raises(CheckpointError, match=r"cannot be written: ValueError: no route"),
    ):
        engine.save(str(root))
    engine.destroy()


def test_an_address_is_not_a_path(tmp_path):
    assert isinstance(locate("s3://bucket/folder"), RemotePath)
    assert locate(f"file://{tmp_path}") == locate(f"local://{tmp_path}") == tmp_path, "with renames, as any folder"
    assert locate(str(tmp_path)) == tmp_path
    assert locate(tmp_path) == tmp_path
