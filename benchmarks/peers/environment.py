"""Virtual environments of peers: made once beside the benchmarks, never the one that Leyden runs in."""

import subprocess
from collections.abc import Sequence
from pathlib import Path


def make(folder: Path, base: str, requirements: Sequence[str]) -> Path:
    """The interpreter of an environment with `requirements`, made by the interpreter `base` if need be."""
    python = folder / "bin" / "python"
    wanted = "\n".join(requirements)
    ready = folder / "ready"
    if not ready.exists() or ready.read_text(encoding="utf-8") != wanted:
        print(f"making an environment with {', '.join(requirements)} (once, a minute or two) ...", flush=True)
        subprocess.run([base, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *requirements], check=True)
        ready.write_text(wanted, encoding="utf-8")
    return python
