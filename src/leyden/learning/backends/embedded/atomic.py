"""A folder that appears whole or not at all."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from leyden.base.errors import CheckpointError


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that becomes `target` when the block ends well, and is removed when it does not.

    Everything in it is on disk before the name appears. A `target` that exists is replaced, and what a writer of
    it left that was killed is removed: one process writes a target at a time. Raises CheckpointError where the disk
    refuses.
    """
    for stale in target.parent.glob(f".{target.name}.*"):
        if stale.suffix in (".partial", ".replaced"):
            shutil.rmtree(stale, ignore_errors=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            _flush(path)
        replaced = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.replaced")
        if target.exists():
            os.rename(target, replaced)
        os.rename(temporary, target)
        _flush(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{target} cannot be written: {error}; free some space or choose another folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
