"""The memory analyzer: points, phases, kinds at the peak, tables and plots."""

import pytest
import torch

import shardwise
from shardwise import MemoryAnalyzer
from shardwise.models.built_in import MLP
from shardwise.observe.analyzer import draw_timelines
from shardwise.observe.labels import KINDS

WEIGHTS = 4 * (64 * 64 + 64) * 4  # bytes of MLP(64, 4)


def train(name, preset=None, steps=2):
    torch.manual_seed(0)
    model = MLP(64, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine = shardwise.initialize(model, optimizer, preset) if preset else None
    with MemoryAnalyzer(engine or model, optimizer, name=name) as analyzer:
        for _ in range(steps):
            with analyzer.phase("forward"):
                loss = (engine or model)(torch.ones(8, 64))
            with analyzer.phase("backward"):
                engine.backward(loss) if engine else loss.backward()
            with analyzer.phase("update"):
                (engine or optimizer).step()
        analyzer.record("after step")
    if engine:
        engine.destroy()
    return analyzer


def test_watching_moves_no_offloaded_gradients():
    def moved_bytes(watched):
        torch.manual_seed(0)
        model = MLP(64, 4)
        config = {"preset": "zero2", "placement": {"optim": {"tier": "host"}, "grads": {"tier": "host"}}}
        engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters()), config)
        with MemoryAnalyzer(engine if watched else None):
            for _ in range(2):
                engine.backward(engine(torch.ones(8, 64)))
                engine.step()
        moved = engine.report().moved_bytes
        engine.destroy()
        return moved

    assert moved_bytes(watched=True) == moved_bytes(watched=False)


def test_points_hold_bytes_changes_and_peaks():
    with MemoryAnalyzer(device="cpu") as analyzer:
        x = torch.ones(1000)
        first = analyzer.record("x")
        y = x + x
        del y
        second = analyzer.record("y came and went")
    assert first.delta_bytes == 4000
    assert (second.delta_bytes, second.peak_bytes - second.allocated_bytes) == (0, 4000)
    assert second.reserved_bytes > 10e6
    assert analyzer.peak_bytes == second.peak_bytes


def test_kinds_at_the_peak_of_plain_training():
    analyzer = train("plain")
    kinds = analyzer.at_peak()
    assert set(kinds) == set(KINDS)
    assert sum(kinds.values()) == analyzer.peak_bytes
    assert kinds["weights"] == WEIGHTS
    assert kinds["grads"] == WEIGHTS
    assert kinds["moments"] == pytest.approx(2 * WEIGHTS, rel=0.01)
    assert kinds["master"] == 0
    assert "layers.0.weight" in {each.name for each in analyzer.largest(100) if each.kind == "weights"}
    assert [each.size_bytes for each in analyzer.largest()] == sorted(
        (each.size_bytes for each in analyzer.largest()), reverse=True
    )


def test_kinds_of_an_engine_with_a_master_copy():
    analyzer = train("bf16", {"preset": "zero2", "precision": {"compute": "bf16"}})
    kinds = analyzer.at_peak()
    assert kinds["master"] == WEIGHTS
    assert kinds["weights"] == WEIGHTS // 2
    assert kinds["moments"] == pytest.approx(2 * WEIGHTS, rel=0.01)


def test_phases_have_peaks_of_their_own_and_are_not_recorded_twice():
    analyzer = train("plain", steps=1)
    assert [point.name for point in analyzer.points] == ["start", "forward", "backward", "update", "after step"]
    forward, backward, update = analyzer.points[1:4]
    assert forward.peak_bytes < backward.peak_bytes < update.peak_bytes
    assert [name for name, *_ in analyzer.phases] == ["forward", "backward", "update"]


def test_tables_show_points_kinds_and_savings():
    first, second = train("plain"), train("small", steps=1)
    text = str(first)
    assert text.startswith("plain: MB on cpu")
    assert "after step" in text
    assert "moments" in text
    compared = MemoryAnalyzer.compare(first, second).splitlines()
    saved = 1 - second.peak_bytes / first.peak_bytes
    assert compared[2].split()[:1] == ["small"]
    assert f"{saved:.0%}" in compared[2]


def test_two_runs_one_after_the_other_do_not_see_each_other():
    assert train("first").peak_bytes == train("second").peak_bytes


def test_timelines_are_drawn(tmp_path):
    analyzer = train("plain")
    analyzer.plot(tmp_path / "one.png")
    draw_timelines([analyzer, train("again")], tmp_path / "two.png")
    assert (tmp_path / "two.png").stat().st_size > (tmp_path / "one.png").stat().st_size > 10_000


def test_recording_needs_a_start():
    with pytest.raises(RuntimeError, match="call start"):
        MemoryAnalyzer(device="cpu").record("too early")
