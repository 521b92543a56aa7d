"""Real public configurations: which load, as what, and which are refused by name.

`corpus.json` holds the keys and values of 118 public files with the outcome expected of each: the placements and
the compute dtype, or the words that a refusal must contain. A folder with more of them may lie beside the checkout.
"""

import json
import warnings
from pathlib import Path

import pytest

from shardwise.config import Config
from shardwise.errors import ConfigError, ConfigWarning

CORPUS = json.loads((Path(__file__).parent / "corpus.json").read_text())
SHARED = Path(__file__).parents[3] / "shared" / "ds_configs"
LOADED = [pytest.param(case, id=case["name"]) for case in CORPUS if not case["refused"]]
REFUSED = [pytest.param(case, id=case["name"]) for case in CORPUS if case["refused"]]


@pytest.mark.filterwarnings("ignore::shardwise.errors.ConfigWarning")
@pytest.mark.parametrize("case", LOADED)
def test_a_file_within_zero_loads(case):
    config = Config.load(case["config"])
    expected = case["expected"]
    assert str(config.placement.weights) == expected["weights"]
    assert str(config.placement.optim) == expected["optim"]
    assert config.precision.compute == expected["compute"]


@pytest.mark.filterwarnings("ignore::shardwise.errors.ConfigWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_a_file_outside_zero_is_refused_by_name(case):
    with pytest.raises(ConfigError, match=case["refused"].replace("+", r"\+")):
        Config.load(case["config"])


def test_the_table_is_large_and_has_both_outcomes():
    assert len(LOADED) >= 40
    assert len(REFUSED) >= 20


def _keys(section: dict, prefix: str = "") -> set[str]:
    found = set()
    for key, value in section.items():
        found.add(prefix + key)
        if isinstance(value, dict) and prefix + key not in ("compile",):
            found |= _keys(value, f"{prefix}{key}.")
    return found


@pytest.mark.filterwarnings("ignore::shardwise.errors.ConfigWarning")
@pytest.mark.parametrize("case", LOADED)
def test_explain_accounts_for_every_key(case):
    """Nothing is silently ignored: each key of the file is noted, or its values show in the built sections."""
    config = Config.load(case["config"])
    notes = config._provenance.notes
    noted = {note.key for note in notes} | {origin.detail for origin in config._provenance.origins.values()}
    blocks = {note.key for note in notes}
    for key in _keys(case["config"]):
        parents = {key.rsplit(".", i)[0] for i in range(1, key.count(".") + 1)}
        is_block = any(other.startswith(f"{key}.") for other in noted)
        in_params = key.startswith(("optimizer.params.", "scheduler.params."))
        in_block = bool(parents & blocks)
        empty_or_type = key in ("optimizer", "scheduler", "distributed_type", "mixed_precision", "deepspeed_config")
        assert key in noted or is_block or in_params or in_block or empty_or_type, key


@pytest.mark.skipif(not SHARED.is_dir(), reason="no folder of public configurations beside the checkout")
def test_the_whole_folder_loads_or_is_refused():
    refusals, loaded = {}, []
    for path in sorted(SHARED.rglob("*.json")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConfigWarning)
            try:
                loaded.append(Config.load(path))
            except ConfigError as error:
                refusals[path.name] = str(error)
    assert len(loaded) >= 90
    for name, message in refusals.items():
        assert name in message
        assert "does not do" in message or "no such file" in message
