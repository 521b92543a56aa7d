"""From 8 to 1024 GPUs, on paper: time and memory of each way to train 7 B, 70 B and 405 B.

    python benchmarks/scale.py

writes results/DATE-scale.json and .md: every point, and beside them what the model of time was checked against.
"""

import io
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from shardwise.estimate.hardware import Hardware
from shardwise.machine import env
from shardwise.models.catalog import find
from shardwise.models.workload import Workload, from_dimensions
from shardwise.planning.scaling import WIDTH, gpu_counts, render, scale

RESULTS = Path(__file__).parent / "results"
MODELS = ("llama2-7b", "llama3-70b", "llama3-405b")
SEQUENCE, GLOBAL_BATCH = 4096, 1024
COUNTS = "8..1024"


def checks() -> dict[str, dict[str, float]]:
    """The errors of the newest result of time_model.py, by part."""
    found = sorted(RESULTS.glob("*-time-model.json"))
    parts = json.loads(found[-1].read_text())["parts"] if found else {}
    return {name: {each["case"]: round(each["error"], 4) for each in part["rows"]} for name, part in parts.items()}


def main() -> None:
    made, tables, texts = env.made(), {}, []
    for name in MODELS:
        for batch in (None, GLOBAL_BATCH):
            model, step = from_dimensions(find(name), None), Workload(sequence=SEQUENCE)
            found = scale(model, step, gpu_counts(COUNTS), Hardware(), None, batch)
            how = f"{batch} samples a step" if batch else "1 sample a GPU"
            tables[f"{name}, {how}"] = [asdict(point) for point in found.points]
            console = Console(width=WIDTH, record=True, file=io.StringIO())
            console.print(render(found))
            texts.append("```\n" + "\n".join(line.rstrip() for line in console.export_text().splitlines()) + "\n```")
    path = RESULTS / f"{made['date']}-scale.json"
    path.write_text(json.dumps({**made, "checks": checks(), "tables": tables}, indent=1) + "\n")
    head = f"# 8 to 1024 GPUs on paper, {made['date']}, commit {made['commit']}\n\n"
    head += "By the model of time, on published figures of an H100 80 GB, not measured. Its errors on real steps:\n\n"
    errors = [f"- {part}: {case}: {error:+.1%}" for part, cases in checks().items() for case, error in cases.items()]
    path.with_suffix(".md").write_text(head + "\n".join(errors) + "\n\n" + "\n\n".join(texts) + "\n")


if __name__ == "__main__":
    main()
