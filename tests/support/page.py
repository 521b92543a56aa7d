"""The tables of docs/models.md, from the registries of the tests and the newest result, and those of
docs/parallelism.md, from plans (`make models-page`)."""

import json
import re
from pathlib import Path
from typing import Any

from support.awkward import CASES
from support.conduct import CONDUCTS

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
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


NODES, PER_NODE = 16, 8
WAYS = [("zero1", 1), ("zero2", 1), ("zero3", 1), ("zero3_hybrid", 1), ("zero1", 8), ("zero3", 8)]


def ways() -> list[str]:
    """Llama 3 70B by several ways, with as many samples in a step."""
    from shardwise.estimate.arithmetic import tp_bytes
    from shardwise.planning import Hardware, Workload, plan

    on = Hardware(NODES * PER_NODE, nodes=NODES)
    columns = ("", "peak of a GPU", "fits", "a GPU sends to its copy", "a GPU sends for ZeRO", "a node sends")
    rows = [f"| {' | '.join(columns)} |".replace("|  |", "| |"), "|---" * len(columns) + "|"]
    for preset, tp in WAYS:
        step = Workload(accumulation=tp, tp=tp)
        found = plan("llama3-70b", hardware=on, workload=step, presets=[preset])
        row, within = found.row(preset), tp_bytes(found.model.part(tp), step)
        name = f"`{preset}`" + f" x tp {tp}" * (tp > 1)
        sizes = [f"{size / 1e9:.0f} GB" for size in (within, row.wire_bytes, row.outside_bytes)]
        rows.append(f"| {name} | {row.peak_bytes / 1e9:.0f} GB | {'yes' if row.fits else 'no'} | {' | '.join(sizes)} |")
    return rows


def planned() -> list[str]:
    """Three rows of a plan, and its advice, as they are printed."""
    from shardwise.planning import Hardware, plan

    printed = str(plan("llama3-70b", hardware=Hardware(NODES * PER_NODE, nodes=NODES))).splitlines()
    shown = [line for line in printed if re.match(r"( +peak|[ →]+zero(2|3|3_hybrid) +\d)", line)]
    return ["```", *(line.rstrip() for line in shown), "```"]


TABLES = {"models": models, "conduct": conduct, "architectures": architectures, "ways": ways, "plan": planned}
PAGES = {DOCS / "models.md": ["models", "conduct", "architectures"], DOCS / "parallelism.md": ["ways", "plan"]}


def current(page: str) -> str:
    """The page with every table generated anew."""
    return BLOCK.sub(lambda match: match[1] + "\n".join(TABLES[match[2]]()) + "\n" + match[3], page)


def write() -> None:
    for path in PAGES:
        path.write_text(current(path.read_text()))
