"""Workspaces and their snapshots."""

import os
from pathlib import Path

import pytest

from leyden.base.errors import HarnessError
from leyden.runner import workspace
from leyden.runner.workspace import Workspaces, snapshot


def test_a_snapshot_lists_files_with_size_and_hash(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "link").symlink_to("../a")
    os.mkfifo(tmp_path / "pipe")
    state = snapshot(tmp_path)
    assert state["num_files"] == 3 and list(state["files"]) == ["a", "d/link", "pipe"]
    assert state["files"]["a"]["bytes"] == 3 and len(state["files"]["a"]["sha256"]) == 64
    assert state["files"]["d/link"]["link"] == "../a" and "sha256" not in state["files"]["pipe"]


def test_a_snapshot_is_bounded_and_counts_what_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "MAX_FILES", 3)
    monkeypatch.setattr(workspace, "MAX_HASHED_BYTES", 5)
    for i in range(5):
        (tmp_path / f"f{i}").write_bytes(b"x" * 4)
    state = snapshot(tmp_path)
    assert (state["num_files"], state["num_bytes"], state["num_unlisted"]) == (5, 20, 2)
    assert [("sha256" in entry) for entry in state["files"].values()] == [True, False, False]


def test_a_name_that_is_no_utf_8_does_not_break_a_snapshot(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).touch()
    assert list(snapshot(tmp_path)["files"]) == ["\N{REPLACEMENT CHARACTER}"]


def test_folders_without_write_permission_are_removed_too(tmp_path: Path) -> None:
    with Workspaces(None) as workspaces:
        folder = workspaces.create("a1")
        (folder / "sub").mkdir()
        (folder / "sub" / "f").touch()
        (folder / "sub").chmod(0o500)
        workspaces.remove(folder)
        assert not folder.exists()
    assert not workspaces.root.exists()


def test_kept_folders_stay(tmp_path: Path) -> None:
    with Workspaces(None, tmp_path / "kept") as workspaces:
        folder = workspaces.create("a1")
        workspaces.remove(folder)
    assert folder.is_dir()


def test_what_a_dead_runner_left_is_removed_and_what_a_live_one_uses_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "leyden-work-dead").mkdir()
    (tmp_path / "leyden-work-dead" / ".lock").touch()
    with Workspaces(None) as first:
        assert not (tmp_path / "leyden-work-dead").exists()
        with Workspaces(None) as second:
            assert first.root.exists() and second.root.exists()


def test_a_folder_that_exists_already_is_refused(tmp_path: Path) -> None:
    with Workspaces(None) as workspaces:
        workspaces.create("a1")
        with pytest.raises(HarnessError, match="cannot be made"):
            workspaces.create("a1")
