"""The working directory of an attempt: copied from a template, looked at before and after.

A snapshot is bounded: so many files, so many bytes hashed; what was left out is counted in it. Folders of a
runner that died are removed by the next one: a lock that dies with its holder tells them apart.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any, Self

from leyden.base.errors import HarnessError

MAX_FILES = 500
"""Files listed in a snapshot; a span must stay small beside the calls of its attempt."""
MAX_HASHED_BYTES = 16 << 20
"""Bytes hashed per snapshot, about 10 ms of work; larger files are listed with their size only."""
_PREFIX = "leyden-work-"


class Workspaces:
    """The folder in which attempts get theirs."""

    def __init__(self, template: Path | None, root: Path | None = None) -> None:
        """`root` keeps the folders of attempts; without one a temporary folder is used and removed.

        Raises HarnessError when the template is no folder.
        """
        if template is not None:
            check_template(template)
        self._template = template
        self._keep = root is not None
        if root is None:
            _remove_abandoned(Path(tempfile.gettempdir()))
        else:
            root.mkdir(parents=True, exist_ok=True)
        self.root = root if root is not None else Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = None if self._keep else _lock(self.root)

    def create(self, attempt_id: str) -> Path:
        """A new folder for one attempt. Raises HarnessError when it cannot be made."""
        folder = self.root / attempt_id
        try:
            if self._template is None:
                folder.mkdir()
            else:
                shutil.copytree(self._template, folder, symlinks=True)
        except (OSError, shutil.Error) as error:
            raise HarnessError(f"the workspace {folder} cannot be made: {error}") from error
        return folder

    def remove(self, folder: Path) -> None:
        """Delete the folder of an attempt, unless folders are kept."""
        if not self._keep:
            shutil.rmtree(folder, onerror=_make_writable)

    def close(self) -> None:
        """Remove the temporary folder. Idempotent."""
        if not self._keep:
            shutil.rmtree(self.root, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_template(template: Path) -> None:
    """Raise HarnessError when `template` is no folder."""
    if not template.is_dir():
        raise HarnessError(f"harness.workspace: no folder {template}; create it or leave the key out")


def snapshot(folder: Path) -> dict[str, Any]:
    """`{"files": {path: {"bytes", "sha256"?}}, "num_files", "num_bytes", "num_unlisted"?}`, by path."""
    files: dict[str, Any] = {}
    num_files = num_bytes = hashed_bytes = 0
    for path in sorted(_walk(folder)):
        try:
            info = path.lstat()
        except FileNotFoundError:  # a file that vanished while we looked is not part of the state
            continue
        num_files += 1
        num_bytes += info.st_size
        if len(files) >= MAX_FILES:
            continue
        entry: dict[str, Any] = {"bytes": info.st_size}
        if stat.S_ISLNK(info.st_mode):
            entry["link"] = os.readlink(path)
        elif stat.S_ISREG(info.st_mode) and hashed_bytes + info.st_size <= MAX_HASHED_BYTES:
            hashed_bytes += info.st_size
            with contextlib.suppress(OSError):  # unreadable: listed without a hash
                entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        # Names that are no UTF-8 hold surrogates, which no JSON text may carry.
        name = os.fsencode(path.relative_to(folder)).decode(errors="replace")
        files[name] = entry
    state: dict[str, Any] = {"files": files, "num_files": num_files, "num_bytes": num_bytes}
    if num_files > len(files):
        state["num_unlisted"] = num_files - len(files)
    return state


def _walk(folder: Path) -> list[Path]:
    paths: list[Path] = []
    for parent, folders, names in os.walk(folder):
        paths += [Path(parent, name) for name in names]
        paths += [Path(parent, name) for name in folders if Path(parent, name).is_symlink()]
    return paths


def _lock(root: Path) -> int:
    fd = os.open(root / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def _remove_abandoned(parent: Path) -> None:
    for root in parent.glob(_PREFIX + "*"):
        try:
            fd = os.open(root / ".lock", os.O_RDWR)
        except OSError:  # being made just now, or somebody else's
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(root, ignore_errors=True)
        except BlockingIOError:  # its runner lives
            pass
        finally:
            os.close(fd)


def _make_writable(function: Any, path: str, _: Any) -> None:
    """A harness may leave folders without write permission: give it back and try once more."""
    with contextlib.suppress(OSError):
        os.chmod(os.path.dirname(path), 0o700)
        os.chmod(path, 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
