"""A few faults of the soak test (`make soak`), and what it does when a check does not hold."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak", BENCHMARKS / "soak.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["soak"]


@pytest.mark.timeout(180)
def test_faults_are_named_and_no_bit_is_lost(soak, tmp_path):
    out = tmp_path / "result.json"
    code = soak.main(["--faults", "3", "--minutes", "1", "--seed", "36", "--jobs", "1", "--out", str(out)])
    result = json.loads(out.read_text())
    assert code == 0, result
    assert result["faults"] >= 3
    assert result["comparisons"] >= 1
    assert [result[name] for name in ("hangs", "bits_lost", "steps_lost", "unnamed", "wrong_exits")] == [0] * 5
    assert {"date", "commit", "hardware", "seed", "seconds", "by_kind"} <= set(result)


def launch(soak, codes, texts):
    told = [{"is_ours": text is not None, "text": text, "error": "DisagreementError", "ended": 2.0} for text in texts]
    return soak.Launch(codes, told, {1: 1.0}, 0, ["" for _ in codes], None)


@pytest.mark.parametrize(
    ("codes", "texts", "counter"),
    [
        pytest.param([1, -9], ["rank 1 died", None], None, id="named"),
        pytest.param([1, -9], ["connections broke", None], "unnamed", id="another text"),
        pytest.param([-6, -9], ["rank 1 died", None], "wrong_exits", id="an abort"),
        pytest.param([None, -9], [None, None], "hangs", id="a hang"),
    ],
)
def test_what_counts_as_named(soak, tmp_path, codes, texts, counter):
    options = soak.argparse.Namespace(jobs=1, minutes=1, faults=None, seed=0, backend="gloo", kinds=None)
    running = soak.Soak(options, tmp_path, print)
    chain = soak.Chain(running, soak.random.Random(0), tmp_path / "chain")
    fault = {"kind": "kill", "ranks": [1], "signal": 9, "step": 0, "at": "data"}
    chain._paths.append(((2, 0),))
    if counter is None:
        assert "DisagreementError on 1" in chain._check(launch(soak, codes, texts), fault, 0)
        assert running.tally.named == {"kill": 1}
    else:
        with pytest.raises(soak.Failed):
            chain._check(launch(soak, codes, texts), fault, 0)
        assert getattr(running.tally, counter) == 1


def test_other_bits_are_lost_bits(soak, tmp_path):
    running = soak.Soak(soak.argparse.Namespace(backend="gloo"), tmp_path, print)
    chain = soak.Chain(running, soak.random.Random(0), tmp_path / "chain")
    chain._paths.append(((2, 0),))
    running._references[chain._setting, ((2, 0),)] = tmp_path, {4: "a"}
    chain._compare("a", 0, 4, "x")
    with pytest.raises(soak.Failed, match="differs from the undisturbed run"):
        chain._compare("b", 0, 4, "x")
    assert running.tally.bits_lost == 1
