"""The configuration: what loads, what is refused with which help, and that nothing is lost on the way."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.base import config
from leyden.base.config import Config, dump, from_tree, known_keys, load
from leyden.base.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
TOMLS = [
    path for folder in ("examples", "src", "benchmarks", "tests") for path in sorted((ROOT / folder).rglob("*.toml"))
]


def write(folder: Path, text: str) -> Path:
    path = folder / "leyden.toml"
    path.write_text(text, encoding="utf-8")
    return path


def read(folder: Path, text: str, *overrides: str) -> Config:
    return load(write(folder, text), overrides)


@pytest.mark.parametrize("path", TOMLS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_toml_of_the_repository_loads_and_survives_dump_and_load(path: Path, tmp_path: Path) -> None:
    loaded = load(path)
    kept = tmp_path / "config.json"
    kept.write_text(dump(loaded), encoding="utf-8")
    assert load(kept) == loaded


def test_an_empty_configuration_is_all_defaults(tmp_path: Path) -> None:
    loaded = read(tmp_path, "")
    assert loaded.model_copy(update={"base_dir": Path(".")}) == Config()
    assert loaded.sft is None and loaded.policies == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[learn]\ngroup_sise = 4", "unknown key 'learn.group_sise'; did you mean 'learn.group_size'?"),
        ("[lern]\nsteps = 4", "unknown key 'lern'; did you mean 'learn'?"),
        (
            "[policies.main]\nmodle = 'x'",
            "unknown key 'policies.main.modle'; did you mean 'policies.main.model'?",
        ),
        ("[policies.a.sampling]\ntemprature = 1", "did you mean 'policies.a.sampling.temperature'?"),
        ("[policies.a.lora]\nzzz = 1", "unknown key 'policies.a.lora.zzz'; known here: rank, alpha, targets"),
        ("[sft]\nepoch = 1", "did you mean 'sft.epochs'?"),
        ("[learn]\nqqq = 4", "unknown key 'learn.qqq'; known here: policy, algorithm"),
        ("base_dir = '/'", "unknown key 'base_dir'"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_known_one_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("[learn]\nsteps = 'many'", "learn.steps", "'many'"),
        ("[learn]\nsteps = -1", "learn.steps", "-1"),
        ("[learn]\nsteps = 1.5", "learn.steps", "1.5"),
        ("[learn]\nalgorithm = 'poo'", "learn.algorithm", "'poo'"),
        ("[harness]\ntimeout_s = 0", "harness.timeout_s", "0"),
        ("[harness]\nenv = { A = 1 }", "harness.env.A", "1"),
        ("[rewards]\nclip = { a = [1] }", "rewards.clip.a", "[1]"),
        ("[rewards]\non_failure = { timeout = 'ignore' }", "rewards.on_failure.timeout", "'ignore'"),
        ("[policies.main.sampling]\ntop_p = 0", "policies.main.sampling.top_p", "0"),
        ("[eval]\nlevel = 1", "eval.level", "1"),
        ("learn = 3", "learn", "3"),
        ("policies = { main = 3 }", "policies.main", "3"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_and_itself(tmp_path: Path, text: str, key: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text)
    assert f"{key}" in str(refused.value) and value in str(refused.value)


def test_rules_that_hold_between_keys_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"harness\.command and harness\.callable are both set"):
        read(tmp_path, "[harness]\ncommand = 'a'\ncallable = 'b.py:c'")
    with pytest.raises(ConfigError, match=r"rewards\.gates\.a names itself"):
        read(tmp_path, "[rewards]\ngates = { a = 'a' }")


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path, "[learn\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("learn.steps=20", ("learn", "steps", 20)),
        ("learn.learning_rate=1e-4", ("learn", "learning_rate", 1e-4)),
        ("learn.betas=[0.8, 0.9]", ("learn", "betas", (0.8, 0.9))),
        ("harness.command=python agent.py --a=b", ("harness", "command", "python agent.py --a=b")),
        ('harness.command="python agent.py"', ("harness", "command", "python agent.py")),
        ("tasks.train=", ("tasks", "train", "")),
        ("harness.preload=['openai']", ("harness", "preload", ["openai"])),
    ],
)
def test_the_value_of_an_override_is_toml_or_else_text(
    tmp_path: Path, override: str, found: tuple[str, str, Any]
) -> None:
    section, key, value = found
    assert getattr(getattr(read(tmp_path, "[learn]\nsteps = 3", override), section), key) == value


def test_overrides_reach_tables_that_the_file_does_not_have_and_the_last_one_wins(tmp_path: Path) -> None:
    loaded = read(tmp_path, "", "policies.main.sampling.max_tokens=8", "sft.epochs=2", "sft.epochs=3")
    assert loaded.policies["main"].sampling.max_tokens == 8
    assert loaded.sft is not None and loaded.sft.epochs == 3


@pytest.mark.parametrize("override", ["learn.steps", "=3", "learn..steps=3", "learn.steps.x=3", "learn.setps=3"])
def test_an_override_that_cannot_be_meant_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError):
        read(tmp_path, "[learn]\nsteps = 3", override)


@pytest.mark.parametrize(("key", "value"), [("tokens", "0"), ("minutes", "0.0"), ("usd", "-1"), ("usd", "inf")])
def test_a_budget_with_which_a_run_could_do_nothing_is_refused(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"budget\.{key} is .*give a number above 0, or leave the key out"):
        read(tmp_path, f"[budget]\n{key} = {value}")


def test_paths_are_relative_to_the_file_also_after_dump_and_load(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    loaded = read(inner, "[tasks]\ntrain = 'a.jsonl'")
    assert loaded.resolve(loaded.tasks.train) == inner / "a.jsonl"
    assert loaded.resolve("/b.jsonl") == Path("/b.jsonl")
    kept = tmp_path / "config.json"
    kept.write_text(dump(loaded), encoding="utf-8")
    assert load(kept).resolve("a.jsonl") == inner / "a.jsonl"


def test_a_configuration_cannot_be_changed(tmp_path: Path) -> None:
    loaded = read(tmp_path, "")
    with pytest.raises(ValueError, match="frozen"):
        loaded.learn.steps = 3  # type: ignore[misc]


def test_every_known_key_is_documented_and_its_default_is_what_an_empty_file_gives() -> None:
    named: dict[str, Any] = {
        "policies": {"NAME": {"lora": {}, "usd_per_million": {}}},
        "providers": {"NAME": {"usd_per_million": {}}},
        "sft": {},
        "rewards": {"schedule": {"NAME": {}}},
        "harness": {"snapshots": {"sqlite": {"NAME": {}}, "postgres": {"NAME": {}}}},
    }
    everything = from_tree(named, base_dir=Path("."))
    tree = json.loads(dump(everything))
    for key, meaning in known_keys().items():
        assert meaning.strip(), key
        value: Any = tree
        for part in key.split("."):
            value = value[part]
        default = config.default_of(key)
        assert (json.loads(default) if default else None) == (None if value in ("", None) else value), key


def test_a_known_key_is_accepted_with_its_own_default() -> None:
    for key in known_keys():
        default = config.default_of(key)
        tree: dict[str, Any] = {}
        node = tree
        for part in key.split(".")[:-1]:
            node = node.setdefault(part, {})
        no_number = key.startswith("budget.") or key.endswith((".cached", ".cache_write", "_usd"))
        node[key.rpartition(".")[2]] = json.loads(default) if default else None if no_number else ""
        from_tree(tree, base_dir=Path("."))


_NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)
_TREES = st.fixed_dictionaries(
    {},
    optional={
        "run": st.fixed_dictionaries({"seed": st.integers(-(2**53), 2**53), "dir": st.text(max_size=8)}),
        "harness": st.fixed_dictionaries(
            {
                "env": st.dictionaries(_NAMES, st.text(max_size=8), max_size=3),
                "timeout_s": st.floats(min_value=1e-3, max_value=1e9),
                "preload": st.lists(st.text(max_size=8), max_size=3),
            }
        ),
        "policies": st.dictionaries(
            _NAMES.filter(str.isprintable),
            st.fixed_dictionaries(
                {"model": st.text(max_size=8)},
                optional={
                    "lora": st.one_of(st.none(), st.fixed_dictionaries({"rank": st.integers(1, 99)})),
                    "sampling": st.fixed_dictionaries({"temperature": st.floats(0, 9)}),
                },
            ),
            max_size=3,
        ),
        "rewards": st.fixed_dictionaries(
            {
                "weights": st.dictionaries(_NAMES, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
                "clip": st.dictionaries(_NAMES, st.tuples(st.floats(-9, 0), st.floats(0, 9)), max_size=3),
            }
        ),
        "sft": st.one_of(st.none(), st.fixed_dictionaries({"epochs": st.integers(1, 9)})),
        "learn": st.fixed_dictionaries({"betas": st.tuples(st.floats(0, 1), st.floats(0, 1))}),
    },
)


@given(tree=_TREES)
def test_what_dump_writes_loads_to_an_equal_configuration(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]
) -> None:
    made = from_tree(tree, base_dir=Path("/somewhere"))
    path = tmp_path_factory.getbasetemp() / "round.json"
    path.write_text(dump(made), encoding="utf-8")
    again = load(path)
    assert again == made and again.base_dir == made.base_dir
    assert dump(again) == dump(made)


@given(
    key=st.sampled_from(sorted(known_keys())),
    letters=st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=9),
)
def test_a_key_that_is_not_known_is_never_taken(key: str, letters: str) -> None:
    head = key.split(".")[:-1]
    tree: dict[str, Any] = {}
    node = tree
    for part in head:
        node = node.setdefault(part, {})
    node[letters] = 1
    prefix = ".".join(head)
    siblings = {k.removeprefix(prefix + ".").partition(".")[0] for k in known_keys() if k.startswith(prefix + ".")}
    if letters in siblings:
        return
    with pytest.raises(ConfigError, match="unknown key"):
        from_tree(tree, base_dir=Path("."))


def test_evaluation_stays_greedy_when_only_its_length_is_set(tmp_path: Path) -> None:
    loaded = read(tmp_path, "[policies.main]\neval = { max_tokens = 8 }\nsampling = { max_tokens = 8 }")
    assert loaded.policies["main"].eval.temperature == 0.0
    assert loaded.policies["main"].sampling.temperature == 1.0


@pytest.mark.parametrize(("key", "value"), [("tokens", "0"), ("minutes", "-1.0"), ("usd", "inf"), ("minutes", "0.0")])
def test_a_budget_of_nothing_is_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"budget\.{key} is .*leave the key out"):
        load(None, [f"budget.{key}={value}"])
    assert load(None, ["budget.tokens=5"]).budget.tokens == 5
