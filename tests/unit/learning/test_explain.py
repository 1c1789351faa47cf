"""What `leyden train --explain` says follows from the configuration, number by number."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.project import ENV

from leyden.base import recipes
from leyden.base.config import LearnConfig, from_tree
from leyden.learning.explain import TERMS, WEIGHTS, explain, text


def explained(origins: dict[str, str] | None = None, **learn: Any) -> dict[str, Any]:
    if learn.get("algorithm") == "distill":
        learn["teacher"] = "t"
    tree = {"learn": learn, "policies": {"main": {"model": "m", "sampling": {"max_tokens": 100}}}}
    return explain(from_tree(tree, base_dir=Path()), origins or {})


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_key_is_either_a_number_in_force_or_off_with_a_reason(name: str) -> None:
    found = explained(algorithm=name)
    keys = {f"learn.{key}" for key in LearnConfig.model_fields}
    assert set(found["numbers"]) | set(found["off"]) == keys
    assert all(found["off"].values())
    for key, value in recipes.RECIPES[name].defaults.items():
        assert found["numbers"][f"learn.{key}"] == {"value": value, "from": f"default of {name}"}
    assert json.loads(json.dumps(found)) is not None
    said = text(found)
    assert recipes.RECIPES[name].credit in said and recipes.RECIPES[name].source in said


@pytest.mark.parametrize("surrogate", TERMS)
@pytest.mark.parametrize("normalisation", WEIGHTS)
def test_the_formula_has_its_numbers(surrogate: str, normalisation: str) -> None:
    if surrogate == "nll":
        found = explained(algorithm="rejection_sft", normalisation=normalisation, kl=0.25)
    else:
        found = explained(surrogate=surrogate, normalisation=normalisation, kl=0.25, entropy=0.5, importance_cap=7.0)
        assert any("min(p_trainer / p_sampler of the token, 7)" in line for line in found["objective"])
        assert "(-0.5 * H)" in found["objective"][0]
    assert "0.25 * k3" in found["objective"][0]
    clips = any("0.8, 1.2" in line for line in found["objective"])
    assert clips == (surrogate in recipes.RATIO_SURROGATES)
    assert WEIGHTS[normalisation].format(constant_tokens=256) in found["objective"][1]


def test_the_arithmetic_and_what_changes_with_it() -> None:
    found = explained(algorithm="dapo", tasks_per_step=4, group_size=6, epochs=2, mini_batches=3, steps=10)
    assert found["batch"] == {
        "rollouts of a step": "4 tasks * 6 = 24",
        "optimizer steps of a step": "2 epochs * 3 mini-batches = 6 at most",
        "rollouts of an optimizer step": "24 / 3 = 8",
        "rollouts of the run": "10 steps * 24 = 240",
        "learning rate": "5e-06 at the first step, 5e-06 at the peak, 5e-06 at the last",
        "rollouts of a step with refills": "24 * (1 + 2) = 72 at most",
        "long answers": "lose reward from 80 tokens on, 1 at 100",
    }
    assert found["notes"] == []
    assert "every ratio is 1" in explained(surrogate="ppo_clip")["notes"][0]
    assert "Groups of one" in explained(group_size=1)["notes"][0]


@pytest.mark.parametrize(("algorithm", "num_notes"), [("grpo", 1), ("dpo", 1), ("dr_grpo", 0), ("ppo", 0)])
def test_smaller_parts_of_a_reward_are_warned_of_where_their_size_does_not_count(
    algorithm: str, num_notes: int
) -> None:
    tree = {
        "learn": {"algorithm": algorithm, "epochs": 2},
        "policies": {"main": {"model": "m"}},
        "rewards": {"weights": {"correct": 1.0, "tokens": -0.0005}},
    }
    notes = explain(from_tree(tree, base_dir=Path()), {})["notes"]
    assert len(notes) == num_notes
    assert all(f"With {algorithm} every difference" in note and "dr_grpo, rloo" in note for note in notes)


def test_corrections_a_critic_and_pairs_are_named() -> None:
    lines = explained(surrogate="ppo_clip", importance_level="sequence", importance_mask=4.0)["objective"]
    assert "dropped as off_policy: p_trainer / p_sampler of all tokens of the call outside [0.25, 4]" in lines
    lines = explained(surrogate="cispo", old_logprobs="recorded")["objective"]
    assert lines[0].endswith("weight * (surrogate)") and "logp_old of the sampler" in " ".join(lines)
    assert "+ 0.1 * mean over calls of (V - target)^2 / 2" in " ".join(explained(algorithm="ppo")["objective"])
    assert explained(algorithm="dpo", dpo_beta=0.5)["objective"][0] == "mean over pairs of -log sigmoid(0.5 * margin)"


def test_the_verb_explains_without_torch_and_trains_nothing(tmp_path: Path) -> None:
    (tmp_path / "leyden.toml").write_text('[policies.main]\nmodel = "none"\n[learn]\nsteps = 7\n', encoding="utf-8")
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'transformers'): raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from leyden.cli.main import main\n"
        "main()\n"
    )
    words = ["train", "--explain", "--json", "-s", "learn.kl=0.5"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["numbers"]["learn.steps"] == {"value": 7, "from": "file leyden.toml"}
    assert found["numbers"]["learn.kl"] == {"value": 0.5, "from": "override"}
    assert found["numbers"]["learn.epochs"] == {"value": 1, "from": "default"}
    assert [path.name for path in tmp_path.iterdir()] == ["leyden.toml"]
