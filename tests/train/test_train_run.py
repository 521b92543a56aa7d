"""Runs on ranks: stopping and continuing changes no bit, at any placement and world size; files are complete."""

import contextlib
import gc
import io
import json
import os
import re
import sys
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch

import shardwise.train
from shardwise.comm import ProcessGroupComm
from shardwise.errors import ConfigError
from shardwise.train.folder import RunFolder, read
from shardwise.train.job import prepare
from shardwise.train.options import options_of
from shardwise.train.run import run
from support import ranks, run_ranks

TEXT = "def f(x):\n    return x + 1\n\n\nclass A:\n    pass\n" * 40


@dataclass
class Process:
    """A process that is asked to stop after so many looks: the loop looks before each step."""

    stop_after: int | None = None
    looks: int = 0
    device = torch.device("cpu")

    @property
    def stop_requested(self):
        self.looks += 1
        return self.stop_after is not None and self.looks > self.stop_after


class Bomb(Process):
    """A process that fails before the sixth step."""

    @property
    def stop_requested(self):
        self.looks += 1
        return 1 / 0 if self.looks > 5 else False


def write_text(folder, rank):
    path = folder / "text.py"
    if rank == 0:
        path.write_text(TEXT)
    return str(path)


def train(
    text,
    out,
    *,
    process=None,
    steps=6,
    config="zero3",
    accumulate=1,
    layers=1,
    intervals=None,
    foresee=False,
    tp=1,
    pp=1,
    **outputs,
):
    """One run on this rank, to its end or to a signal."""
    comm = ProcessGroupComm(None, torch.device("cpu"))
    comm.share_object(None)  # rank 0 has written the text
    options = options_of(
        data={"paths": (text,)},
        model={"size": "nano", "context": 16, "layers": layers},
        updates={"steps": steps, "batch": 12, "accumulate": accumulate},
        placing={"config": config, "foresee": foresee, "tp": tp, "pp": pp},
        intervals={"eval_every": 3, "save_every": 0} | (intervals or {}),
        outputs={"out": out, "sample": 5, "plot": False} | outputs,
    )
    try:
        run(prepare(options, comm.world_size), process or Process(), comm)
    finally:
        comm.close()


def results(out):
    """All that training decides: losses, norms, rates and validation of every step."""
    rows = read(out / "metrics.jsonl")
    assert [row.step for row in rows] == list(range(1, len(rows) + 1))
    return [(row.loss, row.val_loss, row.lr, row.grad_norm, row.tokens) for row in rows]


def weights(out):
    from safetensors.torch import load_file

    return {name: value for file in (out / "export").glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize(
    ("world_size", "config", "accumulate", "at"), [(1, "zero3", 2, 1), (2, "zero3", 1, 4), (3, "zero1", 2, 3)]
)
@ranks()
def test_stopping_and_continuing_changes_no_bit(rank, world_size, tmp_path, config, accumulate, at):
    text = write_text(tmp_path, rank)
    train(text, tmp_path / "whole", config=config, accumulate=accumulate)
    train(text, tmp_path / "parts", config=config, accumulate=accumulate, process=Process(at))
    assert not (tmp_path / "parts/export").exists()
    train(text, tmp_path / "parts", config=config, accumulate=accumulate)
    assert results(tmp_path / "parts") == results(tmp_path / "whole")
    parts, whole = weights(tmp_path / "parts"), weights(tmp_path / "whole")
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


@ranks(2)
def test_a_crash_loses_only_what_came_after_the_last_checkpoint(rank, world_size, tmp_path):
    text = write_text(tmp_path, rank)
    train(text, tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        train(text, tmp_path / "parts", process=Bomb(), intervals={"save_every": 2, "log_every": 1})
    if rank == 0:
        assert len(read(tmp_path / "parts/metrics.jsonl")) == 5
    train(text, tmp_path / "parts", intervals={"save_every": 2, "log_every": 1})
    assert results(tmp_path / "parts") == results(tmp_path / "whole")


@ranks(2)
def test_a_signal_at_a_step_that_is_being_saved_loses_nothing(rank, world_size, tmp_path):
    out = tmp_path / "run"
    train(write_text(tmp_path, rank), out, process=Process(2), intervals={"save_every": 2})
    assert [path.name for path in out.glob("checkpoints/[!.]*")] == ["step-2"]


@ranks(4)
def test_ranks_that_hold_one_copy_together_train_the_same_and_continue_without(rank, world_size, tmp_path):
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # it has meshes of earlier tests, whose groups are gone
    text, out = write_text(tmp_path, rank), tmp_path / "run"
    train(text, tmp_path / "whole", steps=3)
    train(text, out, steps=3, tp=2)
    assert_about_equal(out, tmp_path / "whole")
    train(text, out, steps=4, config="zero1")  # at tp 1
    assert len(results(out)) == 4
    with pytest.raises(ConfigError, match=r"--tp 3 does not divide 4 rank\(s\): take --nproc 3"):
        train(text, out, tp=3)
    with pytest.raises(ConfigError, match=r"--tp 4 does not divide heads \(2\)"):
        train(text, out, tp=4)


def assert_about_equal(out, expected):
    """Losses, validation, rates and norms of all steps, and the names of what was exported."""
    for got, wanted in zip(results(out), results(expected), strict=True):
        assert [each for each in got if each] == pytest.approx([each for each in wanted if each], rel=1e-3)
    assert weights(out).keys() == weights(expected).keys()


@ranks(4)
def test_stages_train_the_same_and_continue_without(rank, world_size, tmp_path):
    text, out = write_text(tmp_path, rank), tmp_path / "run"
    shape = {"layers": 2, "accumulate": 3}
    train(text, tmp_path / "whole", steps=3, **shape)
    train(text, out, steps=3, process=Process(1), pp=2, **shape)
    train(text, out, steps=3, pp=2, **shape)
    assert_about_equal(out, tmp_path / "whole")
    train(text, out, steps=4, config="zero1", **shape)  # at pp 1
    assert len(results(out)) == 4
    with pytest.raises(ConfigError, match=r"--pp 3 does not divide 4 rank\(s\)"):
        train(text, out, pp=3)
    with pytest.raises(ConfigError, match="--pp 2 leaves a stage empty: the model has 1 layers"):
        train(text, out, pp=2)
    with pytest.raises(ConfigError, match="--accumulate 1: a pipeline of 2 stages needs at least 2 micro-batches"):
        train(text, out, pp=2, layers=2)


@ranks(3)
def test_more_steps_and_another_placement_continue(rank, world_size, tmp_path):
    text, out = write_text(tmp_path, rank), tmp_path / "run"
    train(text, out)
    before = results(out)
    train(text, out, steps=9, config="zero1")
    assert results(out)[:6] == before
    assert len(results(out)) == 9
    assert RunFolder(out).finished_steps() == 9
    train(text, tmp_path / "branch", steps=10, config="zero1", resume=out / "checkpoints")
    train(text, out, steps=10, config="zero1")
    assert [row.loss for row in read(tmp_path / "branch/metrics.jsonl")] == [results(out)[9][0]]


def train_rank(rank, world_size, folder, out, stop_after):
    train(write_text(folder, rank), folder / out, process=Process(stop_after))


def test_another_number_of_ranks_continues_with_the_next_sample(tmp_path):
    run_ranks(train_rank, 2, tmp_path, "parts", 3)
    run_ranks(train_rank, 3, tmp_path, "parts", None)
    run_ranks(train_rank, 3, tmp_path, "whole", None)
    parts, whole = results(tmp_path / "parts"), results(tmp_path / "whole")
    assert [row[0] for row in parts] == pytest.approx([row[0] for row in whole], rel=1e-4)
    assert [row[2:3] + row[4:] for row in parts] == [row[2:3] + row[4:] for row in whole]


@ranks(2)
def test_a_finished_run_has_all_its_files(rank, world_size, tmp_path):
    out = tmp_path / "run"
    train(write_text(tmp_path, rank), out, plot=True, foresee=True)
    names = {path.name for path in out.iterdir()}
    expected = {"checkpoints", "export", "metrics.csv", "metrics.jsonl", "plot.png", "report.txt", "run.json"}
    assert names == expected | {"sample.txt"}
    assert json.loads((out / "export/config.json").read_text())["model_type"] == "llama"
    assert weights(out)["model.layers.0.self_attn.q_proj.weight"].shape == (32, 32)
    assert (out / "sample.txt").read_text().startswith("import os\n")
    report = (out / "report.txt").read_text()
    seen, foreseen = re.search(r"a peak of ([\d.]+) MiB in the last step \(([\d.]+) foreseen\)", report).groups()
    assert float(seen) == pytest.approx(float(foreseen), rel=0.03)
    assert re.search(rf"everything, predicted +{re.escape(foreseen)} MiB", report)
    assert (out / "metrics.csv").read_text().startswith("step,tokens,loss,val_loss,lr,grad_norm,tokens_per_s,")
    assert len((out / "metrics.csv").read_text().splitlines()) == 7
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")


@ranks(2)
def test_another_model_is_refused_until_told_to_start_over(rank, world_size, tmp_path):
    text, out = write_text(tmp_path, rank), tmp_path / "run"
    train(text, out, process=Process(2))
    with pytest.raises(ConfigError, match="layers is 1 there, 2 now"):
        train(text, out, layers=2)
    train(text, out, layers=2, fresh=True, process=Process(2))
    assert len(read(out / "metrics.jsonl")) == 2


@ranks(2)
def test_starting_over_is_not_repeated_when_torchrun_restarts(rank, world_size, tmp_path):
    text, out = write_text(tmp_path, rank), tmp_path / "run"
    train(text, out, fresh=True, process=Process(2))
    with mock.patch.dict(os.environ, TORCHELASTIC_RESTART_COUNT="1"):
        train(text, out, fresh=True, process=Process(1))
    assert [row.step for row in read(out / "metrics.jsonl")] == [1, 2, 3]
    with mock.patch.dict(os.environ, TORCHELASTIC_RESTART_COUNT="0"):
        train(text, out, fresh=True, process=Process(1))
    assert [row.step for row in read(out / "metrics.jsonl")] == [1]


@ranks(2)
def test_another_start_is_refused_in_the_folder_of_a_run_and_the_same_command_continues(rank, world_size, tmp_path):
    text, first, second = write_text(tmp_path, rank), tmp_path / "first", tmp_path / "second"
    train(text, first, process=Process(2))
    train(text, second, process=Process(1))
    with pytest.raises(ConfigError, match=r"has checkpoints of its own.*--fresh, or give another --out"):
        train(text, second, resume=first / "checkpoints")
    train(text, second, resume=first / "checkpoints", fresh=True, process=Process(1))
    assert [row.step for row in read(second / "metrics.jsonl")] == [3]
    train(text, second, resume=first / "checkpoints", process=Process(1))
    assert [row.step for row in read(second / "metrics.jsonl")] == [3, 4]
    train(text, second)


@pytest.mark.parametrize("damaged", ["manifest.json", "rank-0*"])
@ranks(2)
def test_a_damaged_checkpoint_that_is_passed_over_is_shown(rank, world_size, tmp_path, damaged):
    text, out = write_text(tmp_path, rank), tmp_path / "run"
    train(text, out, process=Process(2))
    train(text, out, process=Process(1))
    if rank == 0:
        newest = max(RunFolder(out).checkpoints.glob("[!.]*/manifest.json"), key=lambda path: path.stat().st_mtime_ns)
        next(newest.parent.glob(damaged)).write_bytes(b"{")
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        train(text, out, process=Process(1))
    shown = stream.getvalue()
    assert ("older checkpoint" in shown) == (rank == 0)
    assert ("resume   at step 2" in shown) == (rank == 0)


@ranks(2)
def test_a_signal_before_the_first_step_saves_nothing(rank, world_size, tmp_path):
    train(write_text(tmp_path, rank), tmp_path / "run", process=Process(0))
    assert not RunFolder(tmp_path / "run").has_checkpoint


class Weighed(Process):
    """A process that counts the blocks of memory that the code of `train` holds, before certain steps."""

    def __init__(self, *at):
        super().__init__()
        self.at = at
        self.blocks = []

    @property
    def stop_requested(self):
        self.looks += 1
        if self.looks == self.at[0] - 10:
            tracemalloc.start()
        if self.looks - 1 in self.at:
            gc.collect()
            sys._clear_type_cache()  # it keeps up to 4096 names that C++ code looked up
            own = tracemalloc.Filter(True, str(Path(shardwise.train.__file__).parent / "*"))
            self.blocks.append(len(tracemalloc.take_snapshot().filter_traces([own]).traces))
        return False


@ranks(1)
def test_a_longer_run_holds_no_more_memory(rank, world_size, tmp_path):
    """Steps are logged to files, not kept: memory would grow by their rows for as long as a run lasts."""
    process = Weighed(30, 90)
    intervals = {"log_every": 10, "eval_every": 0}
    try:
        train(write_text(tmp_path, rank), tmp_path / "run", process=process, steps=100, intervals=intervals)
    finally:
        tracemalloc.stop()
    before, after = process.blocks
    assert after - before < 60  # less than one block a step
    assert len(read(tmp_path / "run/metrics.jsonl")) == 100
