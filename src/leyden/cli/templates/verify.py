"""Scores one finished attempt. Runs after the agent, in a process that the agent cannot reach."""

import re
from pathlib import Path
from typing import Any


def verify(task: dict[str, Any], trace: dict[str, Any], workspace: Path) -> dict[str, float]:
    """Named components; `[rewards]` in leyden.toml says what each is worth."""
    said = re.findall(r"-?\d+", trace["final_text"])
    correct = float(said == [str(task["answer"])])
    return {"correct": correct, "tokens": float(trace["num_completion_tokens"])}
