"""A key that nothing reads is an error, whatever the algorithm; an algorithm's own defaults survive a round trip."""

from pathlib import Path
from typing import Any

import pytest

from leyden.base import recipes
from leyden.base.config import Config, LearnConfig, dump, from_tree, load, origins
from leyden.base.errors import ConfigError

OTHER: dict[str, Any] = {
    "min_reward": 0.75, "gamma": 0.5, "step_reward_weight": 2.0, "state": "observation", "state_weight": 0.25,
    "gae_lambda": 0.5, "value_coef": 0.5, "value_clip": 0.5, "value_learning_rate": 0.5, "dpo_beta": 0.5,
    "teacher": "t", "refills": 1, "overlong_buffer": 0.5, "overlong_penalty": 0.5,
}  # fmt: skip


def learn(**values: Any) -> Config:
    if values.get("algorithm") == "distill":
        values = {"teacher": "t", **values}
    return from_tree({"learn": values}, base_dir=Path())


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_specific_key_is_taken_by_who_reads_it_and_refused_by_all_others(name: str) -> None:
    for key in recipes.SPECIFIC:
        if key in recipes.RECIPES[name].keys:
            extra = {"overlong_buffer": 0.25} if key == "overlong_penalty" else {}
            assert getattr(learn(algorithm=name, **{**extra, key: OTHER[key]}).learn, key) == OTHER[key]
            continue
        with pytest.raises(ConfigError, match=rf"learn\.{key} = .* would do nothing: .*{name} has none; it is read"):
            learn(algorithm=name, **{key: OTHER[key]})


def test_every_specific_key_is_read_by_somebody_and_every_default_is_a_key() -> None:
    for key in recipes.SPECIFIC:
        assert any(key in recipe.keys for recipe in recipes.RECIPES.values()), key
    for recipe in recipes.RECIPES.values():
        assert set(recipe.defaults) <= set(LearnConfig.model_fields)
        assert recipe.keys <= set(recipes.SPECIFIC)
        assert recipe.credit and recipe.source and recipe.when


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"clip_low": 0.1}, "learn.clip_low = 0.1 would do nothing: policy_gradient clips nothing"),
        ({"clip_dual": 3.0}, "learn.clip_dual = 3.0 would do nothing: only ppo_clip"),
        ({"surrogate": "gspo", "clip_dual": 3.0}, "learn.clip_dual"),
        ({"old_logprobs": "recorded"}, "learn.old_logprobs = 'recorded' would do nothing: policy_gradient has no"),
        ({"surrogate": "ppo_clip", "old_logprobs": "recorded", "importance_cap": 5.0}, "learn.importance_cap"),
        ({"importance_cap": 0.0, "importance_level": "sequence"}, "importance_cap and importance_mask are both 0"),
        ({"constant_tokens": 9}, "learn.constant_tokens = 9 would do nothing"),
        ({"algorithm": "dpo", "normalisation": "token_mean"}, "a preference pair is one loss"),
        ({"algorithm": "dpo", "kl": 0.1}, "learn.kl"),
        ({"algorithm": "dpo", "entropy": 0.1}, "learn.entropy"),
        ({"algorithm": "dpo", "surrogate": "ppo_clip"}, "dpo always uses dpo"),
        ({"algorithm": "rejection_sft", "surrogate": "ppo_clip"}, "rejection_sft always uses nll"),
        ({"algorithm": "rejection_sft", "importance_cap": 3.0}, "nll has no importance weight"),
        ({"overlong_penalty": 2.0}, "overlong_buffer is 0"),
        ({"clip_dual": 0.5, "surrogate": "ppo_clip"}, "must be above 1"),
        ({"importance_mask": 1.0}, "must be above 1"),
        ({"algorithm": "distill", "teacher": ""}, "learn.teacher is empty"),
        ({"algorithm": "gpro"}, "did you mean 'gspo' or 'grpo'?"),
        ({"algorithm": "reinforce"}, "did you mean 'reinforce_pp' or"),
        ({"algorithm": "mine.py"}, "file.py:Class"),
    ],
)
def test_what_would_do_nothing_or_cannot_be_is_refused_with_the_reason(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        learn(**values)
    assert said in str(refused.value)


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_own_defaults_fill_what_is_not_said_and_a_resolved_copy_reads_back_equal(name: str, tmp_path: Path) -> None:
    config = learn(algorithm=name)
    for key, value in recipes.RECIPES[name].defaults.items():
        assert getattr(config.learn, key) == value
    path = tmp_path / "config.json"
    path.write_text(dump(config))
    assert load(path).learn == config.learn
    assert learn(algorithm="dapo", clip_high=0.5).learn.clip_high == 0.5


def test_origins_name_the_file_and_the_overrides(tmp_path: Path) -> None:
    path = tmp_path / "leyden.toml"
    path.write_text("[learn]\nsteps = 3\n[rewards]\nweights = { a = 1.0 }\n")
    assert origins(path, ["learn.steps=4", "eval.samples=2"]) == {
        "learn.steps": "override",
        "rewards.weights.a": "file leyden.toml",
        "eval.samples": "override",
    }
