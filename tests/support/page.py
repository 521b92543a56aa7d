"""The tables of docs/models.md, from the registries of the tests and the newest result (`make models-page`)."""

import json
import re
from pathlib import Path
from typing import Any

from support.awkward import CASES
from support.conduct import CONDUCTS

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "models.md"
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def models() -> list[str]:
    rows = dict.fromkeys((case.what, case.how) for case in CASES.values())
    return ["| a model with | |", "|---|---|", *(f"| {what} | {how} |" for what, how in rows)]


def conduct() -> list[str]:
    import test_conduct  # noqa: F401  (its tests register themselves)
    import test_gradients  # noqa: F401  (so do its)

    ordered = sorted(CONDUCTS, key=lambda one: one.test.rpartition(".")[0])  # whichever module was imported first
    return ["| what | | |", "|---|---|---|", *(f"| {one.what} | {one.outcome} | {one.how} |" for one in ordered)]


def architectures() -> list[str]:
    path = max(RESULTS.glob("*-architectures.json"))
    result: dict[str, Any] = json.loads(path.read_text())
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return [
        f"{result['date']}, commit {result['commit']}, {versions}, {result['ranks']} ranks on CPU, fp32, "
        f"{result['steps']} steps of SGD ([{path.name}](../benchmarks/results/{path.name})):",
        "",
        "| architecture | parameters | units | zero1 = zero2 = zero3 | last loss | DDP's | largest difference |",
        "|---|---|---|---|---|---|---|",
        *map(architecture_row, result["rows"]),
    ]


def architecture_row(row: dict[str, Any]) -> str:
    bits = "every bit" if row["equal_bits"] else "**no**"
    losses = f"{row['loss'][-1]:.6f} | {row['loss_ddp'][-1]:.6f} | {row['difference']:.1e}"
    return f"| {row['architecture']} | {row['parameters']} | {row['units']} | {bits} | {losses} |"


TABLES = {"models": models, "conduct": conduct, "architectures": architectures}


def current(page: str) -> str:
    """The page with every table generated anew."""
    return BLOCK.sub(lambda match: match[1] + "\n".join(TABLES[match[2]]()) + "\n" + match[3], page)


def write() -> None:
    PAGE.write_text(current(PAGE.read_text()))
