"""An algorithm in a file of the user's own: the example of the docs works, and what cannot be is refused by name."""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.unit.learning.scored import group, outcomes, rollout
from tests.unit.traces.making import OUTCOMES, make_call, make_trace

from leyden.base.config import LearnConfig
from leyden.base.errors import ConfigError, ObjectiveError
from leyden.learning.algorithms import make, surrogate_of
from leyden.learning.credit import credit_groups
from leyden.traces.assemble import assemble

DOCS = Path(__file__).resolve().parents[3] / "docs" / "learning.md"

PLAIN = """\
from leyden.learning.algorithms import Algorithm


class Mine(Algorithm):
    settings = frozenset({"gamma"})

    def __init__(self, learn):
        self.gamma = learn.gamma

    def credit(self, rewards_G):
        return [self.gamma * reward for reward in rewards_G]
"""


def config(**values: Any) -> LearnConfig:
    return LearnConfig.model_validate({"algorithm": "my_file.py:Mine", **values})


def written(folder: Path, text: str = PLAIN) -> Path:
    (folder / "my_file.py").write_text(text, encoding="utf-8")
    return folder


def example() -> str:
    """The file of the page about learning."""
    found = re.search(r"`best_of\.py`:\n\n```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, "docs/learning.md has an example of an algorithm of one's own"
    return found[1]


def test_the_example_of_the_docs_is_short_and_does_what_it_says(tmp_path: Path) -> None:
    text = example()
    assert len(text.splitlines()) < 40
    (tmp_path / "best_of.py").write_text(text, encoding="utf-8")
    learn = LearnConfig.model_validate({"algorithm": "best_of.py:BestOf", "gamma": 0.5})
    algorithm = make(learn, tmp_path)
    assert algorithm.name == "BestOf" and surrogate_of(learn, algorithm) == "policy_gradient"
    members = group(rollout("a", 1.0, [0.0, 0.0]), rollout("b", 3.0, [0.0]), rollout("c", 2.0), name="g")
    awards = algorithm.award([members, outcomes([5.0, 5.0])])
    assert [a.rollout for a in awards] == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert [a.calls for a in awards[:3]] == [[0.0, 0.0], [1.0], []]
    with pytest.raises(ConfigError, match=r"learn\.dpo_beta = 0\.5 would do nothing: BestOf does not name it"):
        make(learn.model_copy(update={"dpo_beta": 0.5}), tmp_path)


def test_a_class_of_a_file_reads_the_settings_that_it_names(tmp_path: Path) -> None:
    algorithm = make(config(gamma=0.5), written(tmp_path))
    assert algorithm.credit([2.0, 4.0]) == [1.0, 2.0] and algorithm.name == "Mine"
    with pytest.raises(ConfigError, match=r"learn\.min_reward = 0\.9 would do nothing: Mine does not name it"):
        make(config(min_reward=0.9), written(tmp_path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Other: pass\n", r"has no function 'Mine'; it has: Other"),
        ("class Mine: pass\n", r"is no subclass of leyden\.learning\.algorithms\.Algorithm"),
        ("raise ValueError('no')\n", r"cannot be loaded: ValueError: no"),
        ("def f(:\n", r"cannot be loaded: SyntaxError"),
        (PLAIN.replace("learn.gamma", "learn.gama"), r"cannot be made from a LearnConfig: AttributeError.*gama"),
        (PLAIN.replace('"gamma"', '"gama"'), r"names settings that it cannot read: gama; possible: dpo_beta"),
        (PLAIN.replace("settings =", "needs = frozenset({'values'})\n    settings ="), r"asks for values; a critic"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(config(), written(tmp_path, text))


def test_a_file_that_is_not_there_and_a_surrogate_that_is_fixed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file .*my_file\.py; relative paths are read from"):
        make(config(), tmp_path)
    fixed = PLAIN.replace("settings =", 'surrogate = "nll"\n    settings =')
    with pytest.raises(ConfigError, match=r"learn\.surrogate = 'ppo_clip' would do nothing: .* uses nll"):
        make(config(surrogate="ppo_clip"), written(tmp_path, fixed))
    assert surrogate_of(config(), make(config(), written(tmp_path, fixed))) == "nll"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return [float('nan') for _ in rewards_G]", "gave the credit nan; credit is a finite number"),
        ("return [1.0]", "gave 1 awards to 2 rollouts"),
    ],
)
def test_credit_that_is_none_is_refused_by_the_name_of_the_class(tmp_path: Path, body: str, said: str) -> None:
    text = PLAIN.replace("return [self.gamma * reward for reward in rewards_G]", body)
    traces = [make_trace(f"r{k}", calls=[make_call(f"c{k}")], reward=float(k)) for k in range(2)]
    assembly = assemble(traces, policy="main", trainable_outcomes=OUTCOMES)
    with pytest.raises(ObjectiveError, match=f"Mine {said}"):
        credit_groups(assembly, make(config(), written(tmp_path, text)))
