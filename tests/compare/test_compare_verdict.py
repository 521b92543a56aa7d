"""Verdicts, tables and plots from given figures, without processes."""

import pytest
from rich.console import Console

from shardwise.compare import Comparison, Run, Settings, report
from shardwise.compare.report import draw
from shardwise.compare.result import interval, mark_wrong, ratio, verdicts
from shardwise.compare.session import rotated, turns


def run(preset, peer=None, peak=100, sha="a", losses=(2.0, 1.0), rounds=(0.1, 0.12), sent=50, expected=50):
    made = Run(preset, peer, peak_bytes=[peak, peak - 1], peak_split_bytes={"weights": peak}, weights_sha256=sha)
    made.losses = list(losses)
    made.resting_bytes = {"weights": 10, "grads": 10, "optim": 20}
    made.wire_bytes_per_step = {"gather": sent - 20, "reduce": 20, "other": 8, "total": sent + 8}
    made.expected_wire_bytes_per_step = expected
    made.peak_rss_bytes = [1000, None]
    made.set_times(list(rounds))
    return made


def judged(*runs, **settings):
    return {each.name: each for each in verdicts(Comparison(Settings("mlp-100k", **settings), list(runs)))}


def test_equal_bits_and_falling_peaks_are_good():
    found = judged(run("zero0", peak=100), run("zero1", peak=100), run("zero3", peak=60))
    assert all(each.is_good for each in found.values())
    assert found["bits"].text.startswith("zero0 = zero1 = zero3")


def test_one_other_bit_is_bad():
    assert not judged(run("zero0"), run("zero3", sha="b"))["bits"].is_good


def test_with_several_micro_batches_the_two_orders_are_judged_apart():
    runs = [run("zero0"), run("zero1"), run("zero2", sha="b"), run("zero3", sha="b")]
    assert judged(*runs, accumulate=2)["bits"].is_good
    assert not judged(*runs)["bits"].is_good


def test_an_inversion_is_named_in_the_order_of_stages():
    found = judged(run("zero3", peak=80), run("zero2", peak=70))["memory"]
    assert not found.is_good
    assert found.text == "upside down: zero3 needs 10B more than zero2"


def test_bytes_beyond_the_formula_are_bad_and_fewer_are_not():
    assert not judged(run("zero0", sent=51))["wire"].is_good
    assert judged(run("zero3", sent=45))["wire"].is_good


@pytest.mark.parametrize("losses", [(2.0, 1.01), (2.0, float("nan")), (2.1, 1.0)])
def test_a_peer_with_other_losses_is_marked(losses):
    comparison = Comparison(Settings("mlp-100k"), [run("zero0"), run("zero0", "ddp", losses=losses)])
    mark_wrong(comparison)
    assert comparison.runs[1].wrong is not None
    assert not judged(*comparison.runs)["ddp"].is_good


def test_a_peer_that_rounds_otherwise_is_not_marked():
    comparison = Comparison(Settings("mlp-100k"), [run("zero0"), run("zero0", "ddp", losses=(2.0, 1.0 + 1e-5))])
    mark_wrong(comparison)
    assert comparison.runs[1].wrong is None


def test_times_are_compared_round_by_round():
    assert ratio([2.0, 40.0, 4.0], [1.0, 20.0, 2.0]) == (2.0, (2.0, 2.0))
    low, high = interval([1.0, 2.0, 3.0, 4.0, 100.0])
    assert low <= 3.0 <= high < 100.1


def test_rounds_begin_with_another_row_each_time():
    assert list(turns(9)) == [4, 4, 1]
    assert [rotated([1, 2, 3], number)[0] for number in range(4)] == [1, 2, 3, 1]


def test_tables_fit_100_columns_with_long_names_and_failed_rows(tmp_path):
    failed = Run("zero2", "deepspeed", error="RuntimeError: " + "x" * 300)
    wide = run("zero3", "deepspeed", peak=98_765_432_109, sent=10**11, expected=10**11, rounds=(12.3, 12.4))
    comparison = Comparison(Settings("gpt-26m"), [run("zero0"), wide, failed], alone_step_s_rounds=[0.1, 0.1])
    console = Console(width=100, record=True, file=(tmp_path / "out").open("w"))
    report.show(comparison, console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 100
    assert "98765" in text
    assert "RuntimeError:" in text
    draw(comparison, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
