"""States and weights on the disk: the file and its faults, what is read ahead, and the same bits as on the device."""

import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise.config.sections import Offload
from shardwise.errors import ConfigError, DiskError
from shardwise.memory.ledger import Ledger
from shardwise.offload import disk_file
from shardwise.offload.disk_file import ALIGN_BYTES, DiskFile
from shardwise.offload.pinned import HostMemory, RequestDone, StagingBuffers
from shardwise.offload.staging import AccessHistory, Staging, staging_bytes
from shardwise.offload.streams import PAST
from shardwise.partition.layout import Span
from shardwise.sizes import format_bytes
from support import matrix, ranks
from support.training import PRECISIONS, digest, make_batch, start, train_step, trained

BLOCK = 2 * ALIGN_BYTES


def settings(folder, **more):
    return Offload(nvme_path=str(folder), aio={"block_bytes": BLOCK, "threads": 4}, **more)


@pytest.fixture
def file(tmp_path):
    made = DiskFile(tmp_path, settings(tmp_path))
    yield made
    made.close()


def make_staging(folder, disk_bytes, ledger=None, **more):
    return Staging(ledger or Ledger(), settings(folder, **more), HostMemory(), BLOCK, disk_bytes)


def contents(file):
    """The file as others would open it, had it a name."""
    return Path(f"/proc/self/fd/{file.handle}")


def page_view(size_bytes, fill=0):
    tensor = HostMemory().pages(size_bytes).fill_(fill)
    return memoryview(tensor.numpy())


# The file


def test_what_is_asked_of_an_extent_happens_in_order(file):
    extents = [file.allocate(3 * BLOCK - 100) for _ in range(3)]
    assert {extent.size_bytes for extent in extents} == {3 * BLOCK}
    gate = threading.Event()
    copied = partial(gate.wait, 10)  # a failure must not leave a thread that waits forever
    reads = []
    for number, extent in enumerate(extents):
        # The first write waits for a copy; what comes after it waits for that write.
        file.write(extent, page_view(3 * BLOCK, number), copied if number == 0 else None)
        for later in (10, 20):
            target = page_view(3 * BLOCK, 99)
            reads.append((number + later - 10, target, file.read(extent, target)))
            file.write(extent, page_view(3 * BLOCK, number + later))
    assert not reads[0][2].done()
    gate.set()
    for expected, target, done in reads:
        done.result(10)
        assert set(target) == {expected}
    assert file.size_bytes == 9 * BLOCK == os.fstat(file.handle).st_size


def write_some(file, blocks=3):
    extent = file.allocate(blocks * BLOCK)
    file.write(extent, page_view(blocks * BLOCK, 7)).result()
    return extent, page_view(blocks * BLOCK)


@pytest.mark.parametrize("place", [0, BLOCK + 1, 3 * BLOCK - 1])
def test_a_changed_byte_is_an_error(file, place):
    extent, target = write_some(file)
    with contents(file).open("r+b") as other:
        other.seek(place)
        other.write(b"\x08")
    with pytest.raises(DiskError, match=r"torn or altered.*load the last checkpoint"):
        file.read(extent, target).result()


def test_a_file_cut_short_is_an_error(file):
    extent, target = write_some(file)
    os.truncate(file.handle, 2 * BLOCK)
    with pytest.raises(DiskError, match="only 0 could be read: the file was cut short"):
        file.read(extent, target).result()


def test_a_write_that_breaks_off_is_noticed(file, monkeypatch):
    extent, target = write_some(file)

    def fail(handle, buffers, offset):
        if offset:
            raise OSError(errno.EIO, "Input/output error")
        return real(handle, buffers, offset)

    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(DiskError, match=r"could not be written \(Input/output error\)"):
        file.write(extent, page_view(3 * BLOCK, 8)).result()
    with pytest.raises(DiskError, match="could not be written"):
        file.check()
    with pytest.raises(DiskError, match="torn or altered"):
        file.read(extent, target).result()


def test_requests_that_are_served_in_part_go_on(file, monkeypatch):
    reading, writing = os.preadv, os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda h, buffers, at: writing(h, [buffers[0][:ALIGN_BYTES]], at))
    monkeypatch.setattr(os, "preadv", lambda h, buffers, at: reading(h, [buffers[0][:ALIGN_BYTES]], at))
    extent, target = write_some(file)
    file.read(extent, target).result()
    assert set(target) == {7}


@pytest.mark.parametrize("finds_out", ["free space", "fallocate"])
def test_a_full_disk_says_what_is_needed_and_free(file, monkeypatch, finds_out):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_file, "_free_bytes", lambda _: 5 * 10**9 if finds_out == "free space" else 10**13)
    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(DiskError, match=r"needs 60GB, of which it has 0B, and (5GB|10TB) are free.*No space left"):
        file.reserve(60 * 10**9)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"offload\.nvme_path is '.*nowhere': there is no such folder"):
        DiskFile(tmp_path / "nowhere", settings(tmp_path))


def test_without_direct_io_the_page_cache_does(tmp_path, monkeypatch, caplog):
    real = fcntl.fcntl

    def refuse(handle, command, value=0):
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(handle, command, value)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    for _ in range(2):
        file = DiskFile(tmp_path, settings(tmp_path))
        assert not file.is_direct
        extent, target = write_some(file)
        file.read(extent, target).result()
        assert set(target) == {7}
        file.close()
    assert [record.message.partition(":")[0] for record in caplog.records] == [str(tmp_path)]


OWNER = """
import os, sys
from pathlib import Path
from shardwise.config.sections import Offload
from shardwise.offload.disk_file import DiskFile
file = DiskFile(Path(sys.argv[1]), Offload(nvme_path=sys.argv[1]))
file.reserve(1 << 20)
print(os.listdir(sys.argv[1]), flush=True)
sys.stdin.readline()
os._exit(0)  # as the workers of `train` do
"""


def start_owner(folder):
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_no_end_of_a_process_leaves_a_file(tmp_path):
    (tmp_path / "mine.shardwise").write_text("a user's own file")
    owners = [start_owner(tmp_path) for _ in range(3)]
    for owner in owners:
        assert owner.stdout.readline() == "['mine.shardwise']\n", "files have no name while they are in use either"
    owners[0].send_signal(signal.SIGKILL)
    owners[1].send_signal(signal.SIGTERM)
    for owner in owners:
        owner.communicate("end\n")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.shardwise"]


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EISDIR])
def test_where_nameless_files_cannot_be_made_the_name_is_removed_at_once(tmp_path, monkeypatch, code):
    real = os.open

    def refuse(path, flags, *mode, **more):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", refuse)
    file = DiskFile(tmp_path, settings(tmp_path))
    assert not list(tmp_path.iterdir())
    extent, target = write_some(file)
    file.read(extent, target).result()
    assert set(target) == {7}
    file.close()


def test_a_folder_where_nothing_can_be_created_is_named(tmp_path, monkeypatch):
    def refuse(path, flags, *mode, **more):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DiskError, match=rf"no file can be created in {tmp_path} \(Read-only.*set offload\.nvme_path"):
        DiskFile(tmp_path, settings(tmp_path))


def test_the_presets_folder_is_not_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("TMPDIR", raising=False)
    assert shardwise.Config.load("zero3_nvme").offload.nvme_path == "/var/tmp"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert shardwise.Config.load("zero3_nvme").offload.nvme_path == str(tmp_path)


# Reading ahead


def test_the_history_predicts_the_same_step_and_nothing_else():
    source = random.Random(0)
    for _ in range(50):
        history = AccessHistory[int]()
        steps = [[source.randrange(3) for _ in range(source.randrange(6))] for _ in range(2)]
        predicted: dict[int, int] = {}
        for step in [steps[source.randrange(2)] for _ in range(8)]:
            for item in step:
                predicted |= dict(iter(history.predict, None))
                number = history.entered
                was_predicted = history.enter(item)
                if was_predicted:
                    assert predicted[number] == item
                else:
                    predicted.clear()
            if not history.begin_step():
                predicted.clear()
    assert history.entered > 0


class Unit:
    """Chunks whose bytes count their updates."""

    def __init__(self, staging, chunks):
        self.chunks = staging.allocate([Span(0, chunks * BLOCK)], torch.uint8, is_weights=False)
        self.updates = 0
        for chunk in self.chunks:
            buffer = staging.outgoing.take()
            buffer.tensor.fill_(0)
            staging.send(chunk, buffer, PAST)


class Transfer:
    def __init__(self, unit, is_update):
        self.states, self.is_update = unit, is_update

    def __eq__(self, other):
        return (self.states, self.is_update) == (other.states, other.is_update)

    def chunks(self):
        return iter(self.states.chunks if self.is_update else self.states.chunks[::2])


def run_transfer(staging, transfer):
    staging.begin(transfer)
    fetched = []
    for chunk in transfer.chunks():
        buffer = staging.fetch(chunk)
        assert set(buffer.bytes(chunk)) == {transfer.states.updates % 256}, "read before it was written"
        staging.incoming.give(buffer, PAST)
        fetched.append(chunk)
    if transfer.is_update:
        transfer.states.updates += 1
        for chunk in fetched:
            buffer = staging.outgoing.take()
            buffer.tensor.fill_(transfer.states.updates % 256)
            staging.send(chunk, buffer, PAST)


@pytest.fixture
def started(monkeypatch):
    """The extents that were asked for so far, in order."""
    extents, reading = [], DiskFile.read

    def read(file, extent, target):
        extents.append(extent)
        return reading(file, extent, target)

    monkeypatch.setattr(DiskFile, "read", read)
    return extents


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_read_ahead_that_has_still_to_be_written(tmp_path, monkeypatch, started, seed):
    source, writing = random.Random(seed), os.pwritev

    def slowly(handle, buffers, offset):
        time.sleep(source.random() * 2e-3)
        return writing(handle, buffers, offset)

    monkeypatch.setattr(os, "pwritev", slowly)
    staging = make_staging(tmp_path, 20 * BLOCK)
    units = [Unit(staging, source.randrange(1, 6)) for _ in range(source.choice([1, 2, 5]))]
    transfers = [*(Transfer(unit, True) for unit in units), *(Transfer(unit, False) for unit in reversed(units))]
    between = 0
    for step in range(8):
        for transfer in transfers:
            run_transfer(staging, transfer)
            before = len(started)
            staging.end()
            between += len(started) - before
        if step == 5:  # the states are read, and the order is another one for once
            staging.drop()
            run_transfer(staging, Transfer(units[-1], False))
            staging.end()
        staging.begin_step()
    assert [unit.updates for unit in units] == [8] * len(units)
    if len(units) > 1:
        assert between, "nothing was read between transfers"
    staging.close()
    assert not list(tmp_path.iterdir())


def test_a_read_of_states_reads_just_those(tmp_path, started):
    staging = make_staging(tmp_path, 60 * BLOCK)
    units = [Unit(staging, 5) for _ in range(4)]
    for _ in range(3):
        for unit in units:
            run_transfer(staging, Transfer(unit, True))
            staging.end()
        staging.begin_step()
    staging.drop()
    started.clear()
    for unit in units:
        assert [chunk for chunk, _ in staging.read(unit.chunks[1:3])] == unit.chunks[1:3]
    assert started == [chunk.extent for unit in units for chunk in unit.chunks[1:3]]
    staging.begin(Transfer(units[0], True))
    assert len(started) > 8 + 5, "transfers read ahead again"
    staging.close()


def test_buffers_are_bounded_whatever_is_asked_for(tmp_path):
    ledger = Ledger()
    staging = make_staging(tmp_path, 300 * BLOCK, ledger)
    unit = Unit(staging, 300)
    for _ in range(3):
        run_transfer(staging, Transfer(unit, True))
        staging.end()
        staging.begin_step()
    assert ledger.by_tier(at_peak=True)["host"] <= 2 * 64 * BLOCK
    default = Staging(Ledger(), Offload(nvme_path=str(tmp_path)), HostMemory(), 1 << 40, 1 << 40)
    assert default.most_bytes == staging_bytes(1 << 40) == 1 << 30
    default.close()
    staging.close()
    assert ledger.total_bytes == 0


class Copying:
    """The event of a copy on the device that ends when we say so."""

    def __init__(self):
        self.ended = threading.Event()

    def query(self):
        return self.ended.is_set()

    def synchronize(self):
        assert self.ended.wait(10)


def test_a_buffer_waits_for_the_copy_that_reads_it(tmp_path):
    buffers, copying = StagingBuffers(Ledger(), ALIGN_BYTES, 2, HostMemory()), Copying()
    first, second = buffers.take(), buffers.take()
    buffers.give(first, copying)
    assert buffers.try_take() is None
    buffers.give(second, PAST)
    threading.Timer(0.05, copying.ended.set).start()
    assert buffers.take() is first
    assert copying.query()


def test_what_is_copied_from_the_device_is_written_when_it_has_come(tmp_path):
    staging = make_staging(tmp_path, 20 * BLOCK)
    (chunk,) = Unit(staging, 1).chunks
    buffer, copying = staging.outgoing.take(), Copying()
    buffer.tensor.fill_(1)
    staging.send(chunk, buffer, copying)
    time.sleep(0.02)
    buffer.tensor.fill_(2)
    copying.ended.set()
    assert set(staging.fetch(chunk).bytes(chunk)) == {2}
    staging.close()


def test_room_is_asked_for_all_at_once_in_each_file(tmp_path, monkeypatch):
    (tmp_path / "weights").mkdir()
    asked = []
    monkeypatch.setattr(DiskFile, "reserve", lambda file, size_bytes: asked.append((file.folder, size_bytes)))
    for given in ({}, {"weights_nvme_path": str(tmp_path / "weights")}):
        staging = make_staging(tmp_path, 3 * BLOCK, **given)
        staging.reserve(BLOCK, 2 * BLOCK)
        staging.close()
    assert asked == [(tmp_path, 3 * BLOCK), (tmp_path / "weights", BLOCK), (tmp_path, 2 * BLOCK)]


def test_a_buffer_whose_write_failed_is_used_again():
    buffers, writing = StagingBuffers(Ledger(), ALIGN_BYTES, 1, HostMemory()), Future()
    buffer = buffers.take()
    buffers.give(buffer, RequestDone(writing))
    threading.Timer(0.05, writing.set_exception, [OSError("gone")]).start()
    assert buffers.take() is buffer
    assert writing.done()
    buffers.give(buffer, RequestDone(writing))
    buffers.close()


# Training

PLACEMENTS = {
    "zero1, optim": ("zero1", {"optim": {"tier": "disk"}}),
    "zero2, optim, grads": ("zero2", {"optim": {"tier": "disk"}, "grads": {"tier": "host"}}),
    "zero3_nvme": ("zero3", {}),
    "zero3, optim": ("zero3", {"optim": {"tier": "disk"}}),
    "zero3, weights": ("zero3", {"weights": {"tier": "disk"}, "optim": {"tier": "host"}}),
}
SMALL = 16 * 1024 * 4
"""StagingBuffers so small that the models here travel in several buckets a unit."""


def config(placement, folder, precision="fp32", accumulation=1, offload=None, **more):
    stage, tiers = PLACEMENTS.get(placement, (placement, {}))
    away = {"nvme_path": str(folder), "buffer_bytes": SMALL, "aio": {"block_bytes": ALIGN_BYTES}, **(offload or {})}
    return {
        "preset": stage if tiers else placement,
        "placement": tiers,
        "precision": PRECISIONS[precision],
        "batch": {"accumulation": accumulation},
        "gradients": {"clip_norm": 0.05},
        "offload": away if placement in PLACEMENTS or offload else {},
        **more,
    }


def train_steps(engine, rank, steps):
    for step in steps:
        train_step(engine, rank, step)


@matrix(
    {
        "placement": list(PLACEMENTS),
        "precision": list(PRECISIONS),
        "accumulation": [1, 2],
        "world_size": [1, 2],
        "model": ["gpt", "odd"],
        "looks": [False, True],
    },
    # Small 16-bit models on two ranks are exchanged in a thousand pieces, which takes its time.
    constraint=lambda row: row["world_size"] != 2 or row["accumulation"] == 1 or row["precision"] == "fp32",
)
@ranks()
def test_the_same_bits_as_on_the_device(rank, world_size, placement, precision, accumulation, model, looks, tmp_path):
    stage = PLACEMENTS[placement][0]
    expected, _ = trained(model, config(stage, tmp_path, precision, accumulation), rank, looks)
    seen, report = trained(model, config(placement, tmp_path, precision, accumulation), rank, looks)
    assert seen == expected
    rests = placement != "zero3, weights" or precision == "fp32" or model == "odd"
    assert bool(report.tier_bytes.get("disk")) == rests


@ranks(2)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("placement", ["zero2, optim, grads", "zero3_nvme"])
def test_traffic_equals_the_formula(rank, world_size, placement, accumulation, tmp_path):
    """12 + 12 bytes of state for each parameter owned, and what gathers of sharded weights read of the master."""
    written, real = [0], os.pwritev

    def count(handle, buffers, offset):
        written[0] += len(buffers[0])
        return real(handle, buffers, offset)

    os.pwritev = count
    engine = start("gpt", config(placement, tmp_path, "bf16", accumulation))
    train_steps(engine, rank, range(3))
    before = dict(engine.report().moved_bytes)
    train_steps(engine, rank, range(3, 5))
    after = engine.report().moved_bytes
    moved = {way: after[way] - before[way] for way in after}
    owned = sum(unit.weights.owned.numel for unit in engine.units)
    assert moved["host to disk"] == 2 * 12 * owned
    # Gathered from the master: in every pass but the first forward, which gets what was just updated.
    gathers = 2 * 4 * (2 * accumulation - 1) * owned if placement == "zero3_nvme" else 0
    assert 2 * 12 * owned <= moved["disk to host"] <= 2 * 12 * owned + gathers
    assert bool(gathers) == (moved["disk to host"] > 2 * 12 * owned)
    grads = 2 if accumulation == 1 else 4
    assert moved["device to host"] == 2 * owned * (12 + grads * accumulation)
    for unit in engine.units:
        unit.synchronize()
    os.pwritev = real
    runs = sum(3 * len(unit.states.buckets) for unit in engine.units)
    at_least = 4 * owned + 5 * 12 * owned
    assert at_least <= written[0] <= at_least + 6 * runs * ALIGN_BYTES, "whole pages, and nothing twice"
    engine.destroy()


@ranks(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_disk_holds_what_the_table_says(rank, world_size, precision, tmp_path):
    engine = start("gpt", config("zero3_nvme", tmp_path, precision))
    train_step(engine, rank, 0)
    with torch.no_grad():
        engine(make_batch(engine.module, rank, 9))
    held = engine.report().tier_bytes["disk"]
    numel = sum(unit.layout.numel for unit in engine.units)
    buckets = sum(len(unit.states.buckets) for unit in engine.units)
    assert 12 * numel <= held <= 12 * numel + 3 * buckets * ALIGN_BYTES
    file = engine._offload.staging.file(is_weights=False)
    assert os.fstat(file.handle).st_size == held
    engine.destroy()
    assert not list(tmp_path.iterdir())
    assert "disk" not in engine.report().tier_bytes


@ranks(2)
@pytest.mark.parametrize("placement", ["zero2, optim, grads", "zero3_nvme"])
def test_looking_writing_saving_and_loading(rank, world_size, placement, tmp_path):
    """Reads find the new values at any moment, what is written counts, and checkpoints go to any tier and back."""

    def run(chosen):
        given = config(chosen, tmp_path, "bf16")
        engine, found = start("gpt", given), []
        average = shardwise.ema(engine, 0.5)
        for step in range(2):
            train_step(engine, rank, step)
            found.append(engine.full_state("norm.bias")["exp_avg"].sum().item())
            with shardwise.gathered(engine.module.norm.parameters(), write=True), torch.no_grad():
                engine.module.norm.weight.mul_(2.0)
            state = {name: value.clone() for name, value in engine.state_dict().items()}
            engine.load_state_dict({name: value + 0.25 * (name == "norm.bias") for name, value in state.items()})
            with average.applied():
                found.append(engine.full_param("blocks.1.up.weight").sum().item())
        engine.save(tmp_path / f"{chosen}-saved")
        train_step(engine, rank, 2)
        found.append(digest(engine))
        engine.destroy()
        return found

    stage = PLACEMENTS[placement][0]
    expected = run(stage)
    assert run(placement) == expected
    for chosen, saved in ((placement, stage), (stage, placement)):
        engine = start("gpt", config(chosen, tmp_path, "bf16"))
        shardwise.ema(engine, 0.5)
        engine.load(tmp_path / f"{saved}-saved")
        train_step(engine, rank, 2)
        assert digest(engine) == expected[-1]
        engine.destroy()


@ranks(1)
def test_what_fits_stays_on_the_host_and_the_device(rank, world_size, tmp_path):
    """Spilled tier by tier, with the same bits at every budget."""
    expected, _ = trained("gpt", config("zero3", tmp_path, "bf16"), rank, steps=6)
    seen, report = trained("gpt", config("zero3_nvme", tmp_path, "bf16"), rank, steps=6)
    assert seen == expected
    everything = report.tier_bytes["disk"]
    # Gradients take a sixth of that on the host, staging buffers twice as much as is on the disk.
    some = 2 * everything + everything // 6 + everything // 4
    left = {}
    for host in (1, some, 10**12):
        given = config("zero3_nvme", tmp_path, "bf16", offload={"host_memory": host})
        seen, report = trained("gpt", given, rank, steps=6)
        assert seen == expected
        left[host] = report.tier_bytes.get("disk", 0)
    assert left[1] == everything
    assert everything // 2 < left[some] < everything
    assert left[10**12] == 0
    budget = report.tier_peak_bytes["device"] + everything // 4
    given = config("zero3", tmp_path, "bf16", offload={"host_memory": some, "device_memory": budget})
    seen, report = trained("gpt", given, rank, steps=6)
    assert seen == expected
    assert report.tier_peak_bytes["device"] <= 1.1 * budget
    assert report.tier_bytes["host"] <= some
    # What moved to the device made room on the host, and others rose from the disk.
    assert report.tier_bytes.get("disk", 0) < left[some] - everything // 4


@ranks(1)
def test_matrix_optimizers_get_whole_tensors_from_the_disk(rank, world_size, tmp_path):
    def muon(model):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2])]

    expected, _ = trained("gpt", config("zero3", tmp_path), rank, optimizer=muon)
    assert trained("gpt", config("zero3_nvme", tmp_path), rank, optimizer=muon)[0] == expected


@ranks(1)
@pytest.mark.parametrize("placement", ["zero2, optim, grads", "zero3_nvme"])
def test_a_damaged_file_stops_training(rank, world_size, placement, tmp_path):
    engine = start("gpt", config(placement, tmp_path, "bf16"))
    train_steps(engine, rank, range(2))
    for unit in engine.units:
        unit.synchronize()
    path = contents(engine._offload.staging.file(is_weights=False))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with path.open("r+b") as other:
        other.write(data)
    with pytest.raises(DiskError, match="torn or altered"):
        train_steps(engine, rank, range(2, 4))
    engine.destroy()
    assert not list(tmp_path.iterdir())


@ranks(2)
def test_a_rank_without_room_stops_all_before_the_first_step(rank, world_size, tmp_path):
    if rank == 1:
        disk_file._free_bytes, real = lambda _: 100, disk_file._free_bytes
    with pytest.raises(DiskError, match=r"this rank needs .* and 100B are free"):
        start("gpt", config("zero3_nvme", tmp_path))
    if rank == 1:
        disk_file._free_bytes = real


@ranks(2)
def test_ranks_of_one_disk_count_its_room_together(rank, world_size, tmp_path):
    """One rank's files would fit, both do not: found before anything is reserved, with figures that add up."""
    engine = start("gpt", config("zero3_nvme", tmp_path))
    needed = engine._offload.staging.file(is_weights=False).size_bytes
    engine.destroy()
    disk_file._free_bytes, real = lambda _: needed * 3 // 2, disk_file._free_bytes
    try:
        with pytest.raises(DiskError) as found:
            start("gpt", config("zero3_nvme", tmp_path))
    finally:
        disk_file._free_bytes = real
    each, together, free = (format_bytes(size) for size in (needed, 2 * needed, needed * 3 // 2))
    words = f"this rank needs {each}, the 2 ranks that use this disk need {together} together, and {free} are free"
    assert words in str(found.value)
