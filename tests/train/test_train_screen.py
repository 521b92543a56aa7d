"""What is shown and written: lines, the bar, metrics files, the picture, the failure that explains the others."""

import dataclasses
import io
import json
import signal
import sys
import types
from types import SimpleNamespace

import pytest
from rich.console import Console

from shardwise.errors import ConfigError
from shardwise.train import metrics
from shardwise.train.crew import Crew, LastWords
from shardwise.train.memory import Trace
from shardwise.train.metrics import Metrics, Row, read
from shardwise.train.options import Options
from shardwise.train.plot import draw
from shardwise.train.screen import Live, Plain, Silent, make_screen


def row(step, val_loss=None):
    return Row(step, 64 * step, 5 / step, val_loss, 1e-3, 0.5, 1234.5, 400_000_000, 410_000_000, 0.25 * step)


def test_plain_lines(capsys):
    screen = Plain()
    screen.start(0, 100)
    screen.show(row(5), 61.0)
    screen.show(row(10, 2.5), 5.0)
    screen.text("sample", "def f():\n    pass\n\n")
    assert capsys.readouterr().out == (
        "step   5/100  loss 1.000    1234 tokens/s  memory 400 MB (peak 410)  left 1:01\n"
        "step  10/100  loss 0.500  val 2.500    1234 tokens/s  memory 400 MB (peak 410)  left 0:05\n"
        "\n--- sample\ndef f():\n    pass\n---\n\n"
    )


def test_a_terminal_gets_a_bar_that_keeps_the_last_validation():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    screen = Live(console)
    screen.start(0, 10)
    screen.show(row(5, 2.5), 1.0)
    screen.show(row(10), 0.0)
    screen.advance(10)
    screen.stop()
    screen.text("sample", "[bold]brackets[/bold] are text")
    shown = console.file.getvalue()
    assert "loss 0.500  val 2.500    1234 tokens/s  memory 400 MB (peak 410)" in shown
    assert "10/10" in Console(file=io.StringIO()).render_str(shown).plain.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert "[bold]brackets[/bold] are text" in shown


def test_only_rank_0_talks(monkeypatch):
    assert isinstance(make_screen(1), Silent)
    assert make_screen(1).say("model", "large") is None
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: False))
    assert isinstance(make_screen(0), Plain)


def test_metrics_go_on_after_a_step_and_forget_what_came_later(tmp_path):
    first = Metrics(tmp_path, 0)
    first.add([row(1), row(2, 3.0)])
    first.add([row(3)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "tok')  # cut off by a crash
    again = Metrics(tmp_path, 2)
    assert again.rows == [row(1), row(2, 3.0)]
    again.add([row(3, 9.0)])
    assert read(tmp_path / "metrics.jsonl") == [row(1), row(2, 3.0), row(3, 9.0)]
    table = (tmp_path / "metrics.csv").read_text().splitlines()
    assert table[0] == ",".join(field.name for field in dataclasses.fields(Row))
    assert [line.split(",")[3] for line in table[1:]] == ["", "3.0", "9.0"]


def test_tensorboard_if_it_is_there(tmp_path, monkeypatch):
    written = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            written.append(purge_step)

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def flush(self):
            pass

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    Metrics(tmp_path, 4, tensorboard=True).add([row(5)])
    assert written[0] == 5
    assert ("loss", 1.0, 5) in written
    assert "val_loss" not in [entry[0] for entry in written[1:]]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        metrics.check_tensorboard()


@pytest.mark.parametrize("is_watched", [True, False])
def test_the_picture(tmp_path, is_watched):
    moments = [{"weights": 10, "activations": 5}, {"weights": 10, "activations": 50}, {"weights": 12}]
    trace = Trace([0.1, 0.2, 0.3], moments, [("forward", 0.0, 0.2), ("update", 0.2, 0.3)])
    assert (trace.peak_bytes, trace.at_peak) == (60, moments[1])
    draw([row(1), row(2, 3.0), row(3)], trace if is_watched else None, "title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'shardwise\[plot\]'"):
        draw([row(1)], None, "title", tmp_path / "plot.png")


def told(tmp_path, capsys, codes, words=(), signals=0):
    crew = Crew(Options(), len(codes), on_cpu=True)
    crew._signals = signals
    crew._processes = [SimpleNamespace(returncode=code) for code in codes]
    for rank in range(len(codes)):
        (tmp_path / f"rank{rank}.log").write_text("a warning\nsomething broke\n")
    for rank, message, is_consequence in words:
        LastWords.write(tmp_path, rank, message, is_consequence)
    return crew._tell(tmp_path), capsys.readouterr().err


def test_the_failure_that_explains_the_others_is_told_and_no_other(tmp_path, capsys):
    assert told(tmp_path, capsys, [0, 0]) == (0, "")
    lost = (0, "rank 0: RuntimeError: connection closed by peer", True)
    genuine = (2, "rank 2: KeyError: 'x'", False)
    assert told(tmp_path, capsys, [1, 0, 1], [lost, genuine]) == (1, "error: rank 2: KeyError: 'x'\n")
    code, message = told(tmp_path, capsys, [1, -signal.SIGSEGV], [lost])
    assert (code, message) == (1, "error: rank 1 ended with signal SIGSEGV: something broke\n")


def test_a_signal_that_comes_too_early_or_twice(tmp_path, capsys):
    assert told(tmp_path, capsys, [-signal.SIGTERM, -signal.SIGKILL], signals=1) == (0, "")
    code, message = told(tmp_path, capsys, [-signal.SIGKILL] * 2, signals=2)
    assert (code, message) == (130, "ended at once: what was trained since the last checkpoint is lost\n")


def test_last_words_that_cannot_be_read_are_a_death(tmp_path, capsys):
    (tmp_path / "rank0.json").write_text(json.dumps("x")[:-1])
    assert told(tmp_path, capsys, [3]) == (1, "error: rank 0 ended with exit code 3: something broke\n")
