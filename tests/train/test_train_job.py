"""Options, the batch, overrides of a configuration file, the folder, the learning rate."""

import json

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.train.folder import RunFolder
from shardwise.train.job import prepare, rate_factor
from shardwise.train.options import TrainOptions, options_of
from shardwise.train.run import _scheduler


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("some words to learn, again and again. " * 60)
    return str(path)


def job_of(text, world_size=2, **sections):
    sections.setdefault("model", {"size": "nano", "context": 16})
    return prepare(options_of(data={"paths": (text,)}, **sections), world_size)


def test_options_travel_as_json(text):
    options = options_of(data={"paths": (text,)}, updates={"lr": 1e-3}, outputs={"out": "x"})
    assert TrainOptions.model_validate_json(options.model_dump_json()) == options


def test_without_a_word_everything_has_a_value(text):
    job = job_of(text)
    assert (job.batch, job.config.batch.accumulation, job.config.gradients.clip_norm) == (16, 1, 1.0)
    assert job.config.placement.weights.sharding == "sharded"
    assert [job_of(text, world_size=size).batch for size in (1, 3, 4, 5, 32)] == [16, 18, 16, 20, 32]


def test_a_file_is_used_and_the_command_line_wins(text, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "train_batch_size": 24,
                "train_micro_batch_size_per_gpu": 3,
                "gradient_clipping": 0.5,
                "zero_optimization": {"stage": 2},
                "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.3}},
            }
        )
    )
    placing = {"config": str(path)}
    job = job_of(text, placing=placing)
    assert (job.batch, job.config.batch.accumulation, job.config.gradients.clip_norm) == (24, 4, 0.5)
    assert job.config.optimizer.params["lr"] == 0.1
    won = job_of(text, placing=placing | {"precision": "bf16", "clip": 0.0}, updates={"batch": 8, "lr": 0.2})
    assert (won.batch, won.config.precision.compute, won.config.gradients.clip_norm) == (8, "bf16", None)
    assert won.config.optimizer.params == {"lr": 0.2, "weight_decay": 0.3}
    assert won.config.placement.grads.sharding == "sharded"
    assert won.config.placement.weights.sharding == "replicated"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"updates": {"batch": 7}}, "--batch 7 cannot be divided over 2 rank.s. x 1 micro-batch.es.: take 6 or 8"),
        ({"updates": {"batch": 2, "accumulate": 3}}, "take 6$"),
        ({"updates": {"steps": 0}}, "--steps 0: "),
        ({"updates": {"schedule": "cosin"}}, "--schedule cosin: "),
        ({"intervals": {"eval_every": -1}}, "--eval-every -1: "),
        ({"placing": {"precision": "fp8"}}, "--precision fp8: "),
        ({"placing": {"config": "zero4"}}, "neither a file nor a preset"),
        ({"model": {"size": "huge"}}, "--size huge"),
        ({"model": {"size": "nano", "context": 4000}}, "give more text, or a smaller --context"),
    ],
)
def test_bad_options_say_which(text, sections, message):
    with pytest.raises(ConfigError, match=message):
        job_of(text, **sections)


def test_what_is_due_when(text):
    job = job_of(text, updates={"steps": 100}, intervals={"log_every": 30, "eval_every": 0})
    assert [step for step in range(1, 101) if job.is_due("log", step)] == [30, 60, 90, 100]
    assert [step for step in range(1, 101) if job.is_due("eval", step)] == [100]
    assert [step for step in range(1, 101) if job.is_due("save", step)] == [25, 50, 75, 100]


def test_a_folder_knows_whose_run_it_holds(text, tmp_path):
    folder, job = RunFolder(tmp_path / "run"), job_of(text)
    folder.open()
    folder.check(job.identity)
    folder.write_record(job.identity, finished_steps=5)
    (folder.checkpoints / "step-5").mkdir(parents=True)
    (folder.checkpoints / "step-5" / "manifest.json").touch()
    folder.check(job.identity)
    assert folder.finished_steps() == 5
    with pytest.raises(ConfigError, match=r"run holds a run of another model \(layers is 2 there, 3 now\)"):
        folder.check(job_of(text, model={"size": "nano", "context": 16, "layers": 3}).identity)
    with pytest.raises(ConfigError, match=r"another seed \(0 there, 1 now\): give another --out"):
        folder.check(job_of(text, updates={"seed": 1}).identity)
    with open(text, "a") as file:
        file.write("more")
    with pytest.raises(ConfigError, match="holds a run on other data"):
        folder.check(job_of(text).identity)
    (folder.root / "notes.md").write_text("mine")
    folder.clear()
    assert [path.name for path in folder.root.iterdir()] == ["notes.md"]
    folder.check(job_of(text).identity)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out .*cannot be written to"):
        RunFolder(tmp_path / "file" / "run").open()


def test_a_damaged_record_is_named(text, tmp_path):
    folder = RunFolder(tmp_path)
    folder.record.write_text("{")
    with pytest.raises(ConfigError, match=r"run.json: cannot be read .*--fresh starts over"):
        folder.finished_steps()


def test_the_rate_rises_then_falls():
    for schedule in ("cosine", "linear", "constant"):
        rates = [rate_factor(step, steps=100, warmup=10, schedule=schedule) for step in range(100)]
        assert rates[:10] == [(step + 1) / 10 for step in range(10)]
        assert rates[10] == 1.0
        assert rates[10:] == sorted(rates[10:], reverse=True)
        assert rates[-1] == (1.0 if schedule == "constant" else pytest.approx(0.1, abs=0.02))
    assert rate_factor(500, steps=100, warmup=10, schedule="cosine") == pytest.approx(0.1)


@pytest.mark.filterwarnings("ignore::shardwise.errors.ConfigWarning")
def test_auto_of_a_file_is_what_the_run_says(text, tmp_path):
    params = {"warmup_max_lr": "auto", "warmup_num_steps": 1}
    file = tmp_path / "ds.json"
    scheduler = {"type": "WarmupLR", "params": params}
    keys = {"gradient_clipping": "auto", "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"}}
    file.write_text(json.dumps({"scheduler": scheduler, **keys}))
    job = job_of(text, 1, placing={"config": str(file)})
    assert {each.key for each in job.config._provenance.autos} == {"bf16.enabled", "scheduler.params.warmup_max_lr"}
    assert job.config.gradients.clip_norm == 1.0
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1e-5)
    schedule = _scheduler(job, optimizer)
    for _ in range(4):
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == [1e-5]
