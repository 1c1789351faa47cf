"""Who is trained, who is served as it is, and what `[learn]` is for each policy."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.base import recipes, several
from leyden.base.config import Config, dump, from_tree, load
from leyden.base.errors import ConfigError

TWO: dict[str, Any] = {"planner": {"model": "m", "lora": {}}, "writer": {"model": "m", "lora": {}}}


def made(policies: Any = None, **sections: Any) -> Config:
    return from_tree({"policies": TWO if policies is None else policies, **sections}, base_dir=Path("."))


def with_own(**learn: Any) -> dict[str, Any]:
    return {**TWO, "writer": {**TWO["writer"], "learn": learn}}


def test_every_trainable_policy_with_a_model_of_its_own_is_trained_and_the_first_leads() -> None:
    policies = {
        "critic": {"model": "m", "trainable": False},
        **TWO,
        "far": {"model": "m", "engine": "http://e"},
        "paid": {"model": "m", "provider": "p"},
        "bare": {},
    }
    config = made(policies, providers={"p": {}})
    assert config.learn.policy == "planner" and config.trained == ("planner", "writer")
    assert config.frozen == ("critic",)
    assert made(policies, providers={"p": {}}, learn={"policy": "writer"}).trained == ("writer", "planner")


def test_one_policy_is_what_it_always_was() -> None:
    alone = made({"main": {"model": "m"}, "judge": {"engine": "http://e"}})
    assert alone.trained == ("main",) and alone.frozen == () and alone.of("main") is alone
    assert made({}).trained == ("main",), "what is not there is refused when a run begins"


def test_prompts_are_improved_for_the_leading_policy_alone_and_the_rest_is_frozen() -> None:
    config = made(learn={"algorithm": "apo"})
    assert config.trained == ("planner",) and config.frozen == ("writer",)


def test_a_teacher_is_not_served() -> None:
    policies = {**with_own(algorithm="distill", teacher="big"), "big": {"model": "b", "trainable": False}}
    assert made(policies).frozen == ()
    assert made(policies).of("writer").learn.teacher == "big" and made(policies).of("planner").learn.teacher == ""


def test_what_a_policy_says_wins_and_the_rest_is_inherited() -> None:
    config = made(with_own(learning_rate=0.5, kl=0.1), learn={"learning_rate": 0.25, "entropy": 0.3, "steps": 7})
    mine, other = config.of("writer").learn, config.of("planner").learn
    assert (mine.learning_rate, mine.kl, mine.entropy, mine.steps, mine.policy) == (0.5, 0.1, 0.3, 7, "writer")
    assert (other.learning_rate, other.kl, other.entropy, other.policy) == (0.25, 0.0, 0.3, "planner")


def test_each_policy_imitates_as_its_own_section_says(tmp_path: Path) -> None:
    policies = {**TWO, "writer": {**TWO["writer"], "sft": {"epochs": 5}}}
    config = made(policies, sft={"epochs": 3, "batch_size": 2})
    mine, other = config.of("writer").sft, config.of("planner").sft
    assert mine is not None and (mine.epochs, mine.batch_size) == (5, 2)
    assert other == config.sft and other is not None and other.epochs == 3
    assert config.of("writer").of("writer") == config.of("writer")
    (tmp_path / "config.json").write_text(dump(config), encoding="utf-8")
    assert load(tmp_path / "config.json").of("writer") == config.of("writer")


def test_another_algorithm_brings_its_own_defaults_and_drops_what_it_does_not_read() -> None:
    config = made(with_own(algorithm="rejection_sft"), learn={"algorithm": "dapo", "clip_high": 0.5, "kl": 0.2})
    mine = config.of("writer").learn
    assert (mine.normalisation, mine.refills, mine.clip_high, mine.kl) == ("rollout_mean", 0, 0.2, 0.2)
    back = made(with_own(algorithm="dapo"), learn={"algorithm": "grpo"}).of("writer").learn
    assert (back.normalisation, back.surrogate, back.clip_high) == ("token_mean", "ppo_clip", 0.28)
    assert back.refills == 0, "groups are asked for by the run, not by one policy"


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"lerning_rate": 1.0}, r"unknown key policies\.writer\.learn\.lerning_rate; did you mean 'learning_rate'\?"),
        ({"steps": 3}, r"policies\.writer\.learn\.steps is about the rollouts and steps .* set learn\.steps"),
        ({"zzz": 3}, r"unknown key policies\.writer\.learn\.zzz; known here: algorithm, "),
        ({"learning_rate": -1.0}, r"policies\.writer\.learn: learning_rate = -1\.0: .*greater than 0"),
        ({"clip_low": 0.5}, r"policies\.writer\.learn: learn\.clip_low = 0\.5 would do nothing"),
        ({"algorithm": "gropo"}, r"did you mean 'grpo'"),
        ({"algorithm": "gepa"}, r"improves prompts, which is the work of a whole run"),
        ({"overlong": "window", "importance_cap": 0.0}, r"needs importance weights"),
    ],
)
def test_what_a_policy_cannot_have_is_refused_with_the_key(own: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        made(with_own(**own))


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"policies": {**TWO, "c": {"model": "m", "trainable": False, "learn": {"kl": 0.1}}}}, "would do nothing"),
        (
            {"policies": {**TWO, "c": {"model": "m", "trainable": False, "sft": {"epochs": 1}}}},
            r"c\.sft would do nothing",
        ),
        ({"policies": {**TWO, "c": {"model": "m", "sft": {"epochs": 1}}}}, r"there is no section \[sft\]"),
        (
            {"policies": {**TWO, "c": {"model": "m", "sft": {"epoch": 1}}}, "sft": {}},
            r"c\.sft\.epoch; did you mean 'epo",
        ),
        ({"policies": {**TWO, "c": {"model": "m", "sft": {"epochs": 0}}}, "sft": {}}, r"policies\.c\.sft: epochs = 0"),
        ({"policies": {**TWO, "c": {"match": {"system": "x"}}}}, r"list such names, for example match\.models"),
        ({"policies": TWO, "match": {"models": ["agent"]}}, "no policy has a match"),
        ({"policies": {"c": {"match": {"system": "("}}}, "match": {"models": ["a"]}}, "no regular expression"),
        (
            {"policies": {"c": {"match": {"tools": ["x"]}}}, "match": {"models": ["a"], "default": "d"}},
            r"match\.default = 'd' needs a policy of that name \(known: c\)",
        ),
        ({"policies": TWO, "rewards": {"judge": {"policy": "writer"}}}, "must not judge itself"),
    ],
)
def test_sections_that_could_not_be_honoured_are_refused(tree: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        from_tree(tree, base_dir=Path("."))


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"policies": {**TWO, "c": {"model": "m", "trainable": False, "lora": {}}}}, r"policies\.c\.lora would do"),
    ],
)
def test_what_a_run_cannot_do_is_refused_before_anything_is_loaded(tree: dict[str, Any], told: str) -> None:
    config = from_tree(tree, base_dir=Path("."))
    with pytest.raises(ConfigError, match=told):
        several.refuse(config)


_OWN = st.fixed_dictionaries(
    {},
    optional={
        "algorithm": st.sampled_from(["grpo", "dapo", "ppo", "rejection_sft", "dpo", "gspo"]),
        "learning_rate": st.floats(1e-6, 1.0),
        "epochs": st.integers(1, 3),
    },
)
_WHOLE = st.fixed_dictionaries(
    {},
    optional={
        "algorithm": st.sampled_from(["grpo", "dapo", "ppo", "rejection_sft", "process"]),
        "weight_decay": st.floats(0.0, 1.0),
        "mini_batches": st.integers(1, 3),
        "steps": st.integers(0, 9),
    },
)


@given(own=_OWN, whole=_WHOLE)
def test_the_settings_of_a_policy_are_valid_survive_a_dump_and_never_change_what_is_the_runs(
    tmp_path_factory: pytest.TempPathFactory, own: dict[str, Any], whole: dict[str, Any]
) -> None:
    config = made(with_own(**own), learn=whole)
    mine = config.of("writer").learn
    defaults = {name: part.get_default() for name, part in type(mine).model_fields.items()}
    assert recipes.check(mine.model_dump(), defaults) == []
    assert all(getattr(mine, key) == value for key, value in own.items())
    shared = several.RUN_KEYS - {"policy", "refills"}
    assert all(getattr(mine, key) == getattr(config.learn, key) for key in shared)
    path = tmp_path_factory.getbasetemp() / "several.json"
    path.write_text(dump(config), encoding="utf-8")
    again = load(path)
    assert again == config and again.of("writer") == config.of("writer")
    assert config.of("writer").of("writer") == config.of("writer"), "merging twice changes nothing"
    assert json.loads(path.read_text())["policies"]["writer"]["learn"] == own
