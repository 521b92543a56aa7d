"""The output of a run: lines, the progress bar, metrics files, the plot."""

import dataclasses
import io
import sys
import types
from types import SimpleNamespace

import pytest
from rich.console import Console

from shardwise.engine.report import Report
from shardwise.errors import ConfigError
from shardwise.observe.analyzer import MemoryPoint
from shardwise.train import folder
from shardwise.train.finish import _report, draw
from shardwise.train.folder import MetricsFiles, StepMetrics, read
from shardwise.train.loop import MemoryTrace, complete_kinds
from shardwise.train.screen import LiveScreen, PlainScreen, Screen, make_screen


def row(step, val_loss=None):
    return StepMetrics(step, 64 * step, 5 / step, val_loss, 1e-3, 0.5, 1234.5, 400_000_000, 410_000_000, 0.25 * step)


def test_plain_lines(capsys):
    screen = PlainScreen()
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
    screen = LiveScreen(console)
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


def test_only_rank_0_prints(monkeypatch):
    assert type(make_screen(1)) is Screen
    assert make_screen(1).say("model", "large") is None
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: False))
    assert isinstance(make_screen(0), PlainScreen)


def test_metrics_continue_after_a_step_and_drop_later_rows(tmp_path):
    first = MetricsFiles(tmp_path, 0)
    first.add([row(1), row(2, 3.0)])
    first.add([row(3)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "tok')  # cut off by a crash
    again = MetricsFiles(tmp_path, 2)
    assert again.rows == [row(1), row(2, 3.0)]
    again.add([row(3, 9.0)])
    assert read(tmp_path / "metrics.jsonl") == [row(1), row(2, 3.0), row(3, 9.0)]
    table = (tmp_path / "metrics.csv").read_text().splitlines()
    assert table[0] == ",".join(field.name for field in dataclasses.fields(StepMetrics))
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
    MetricsFiles(tmp_path, 4, tensorboard=True).add([row(5)])
    assert written[0] == 5
    assert ("loss", 1.0, 5) in written
    assert "val_loss" not in [entry[0] for entry in written[1:]]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        folder.check_tensorboard()


@pytest.mark.parametrize("is_watched", [True, False])
def test_the_plot(tmp_path, is_watched):
    moments = [{"weights": 10, "activations": 5}, {"weights": 10, "activations": 50}, {"weights": 12}]
    trace = MemoryTrace([0.1, 0.2, 0.3], moments, [("forward", 0.0, 0.2), ("update", 0.2, 0.3)])
    assert (trace.peak_bytes, trace.at_peak) == (60, moments[1])
    draw([row(1), row(2, 3.0), row(3)], trace if is_watched else None, "title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'shardwise\[plot\]'"):
        draw([row(1)], None, "title", tmp_path / "plot.png")


def test_what_no_tensor_holds_is_part_of_the_measured_peak():
    """As in a dry run's figure: on a GPU, 64 MiB of cuBLAS workspaces were in one of the two only."""
    point = MemoryPoint("", 0.0, 0, 0, 0, peak_bytes=100, peak_kinds={"weights": 50, "other": 3})
    assert complete_kinds(point) == {"weights": 50, "other": 50}
    trace = MemoryTrace([0.1], [complete_kinds(point)], [])
    measured = Report(1, {}, {}, {}, 0, {}, {}, {}, {}, measured_peak_bytes=7, predicted_peak_bytes=100)
    assert _report(measured, trace).measured_peak_bytes == 100
    assert _report(measured, None).measured_peak_bytes == 7
