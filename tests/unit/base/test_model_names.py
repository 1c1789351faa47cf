"""A name under which there is nothing: a path, or an id on the hub."""

from pathlib import Path

import pytest

from leyden.base.model_names import is_path


@pytest.mark.parametrize(
    "name", ["/a", "./a", "../a", "~/a", "a/b/c", "models/a", ".hidden/a", "a.gguf", "owner/Model.GGUF"]
)
def test_these_are_paths(tmp_path: Path, name: str) -> None:
    (tmp_path / "models").mkdir()
    assert is_path(name, tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "owner/model", "owner/model-1.5B", "models"])
def test_these_may_be_ids_on_the_hub(tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    assert not is_path(name, tmp_path)
