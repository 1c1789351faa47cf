"""The reward of the flagship example cannot be had without writing the query."""

from pathlib import Path

from leyden.base.config import load
from leyden.base.tasks import load_tasks
from leyden.cli.probing import run_probes
from leyden.cli.verbs.quickstart import copy_example, generate
from leyden.rewards.probes import probes_of


class Quiet:
    """No progress is shown."""

    def begin(self, phase: str, total: int) -> None:
        """A phase starts."""

    def advance(self, done: int, note: str = "") -> None:
        """So much of it is over."""

    def end(self) -> None:
        """It is over."""


def test_the_example_of_the_quickstart_passes_the_probes_that_run_before_training(tmp_path: Path) -> None:
    copy_example("text_to_sql", tmp_path)
    generate(tmp_path)
    config = load(tmp_path / "quickstart.toml", ["policies.main.model=any", "probes.tasks=1"])
    results = run_probes(config, load_tasks(config.resolve(config.tasks.train)), probes_of(config, quick=True), Quiet())
    assert [(result.name, result.why) for result in results if result.won] == []
    assert [(result.name, result.why) for result in results if result.score is None] == []
    trivial = next(result for result in results if result.name == "trivial_result")
    assert trivial.score is not None and 0 < trivial.score < 0.1, "SELECT 1 runs, which is worth a little"
