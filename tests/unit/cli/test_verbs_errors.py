"""What a user can do wrong: one clear message, the right exit status, nothing half done."""

import os
import socket
from pathlib import Path

import pytest
from tests.unit.cli.calling import Caller

import leyden as package
from leyden.cli.main import VERBS


def change(project: Path, before: str, after: str) -> None:
    """Replace one line of the configuration."""
    path = project / "leyden.toml"
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, before
    path.write_text(text.replace(before, after), encoding="utf-8")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(leyden: Caller, verb: str) -> None:
    said = leyden(verb, "--help")
    assert said.code == 0 and verb in said.out and "--json" in said.out


def test_help_lists_the_verbs_and_hides_the_engine(leyden: Caller) -> None:
    said = leyden("--help")
    assert said.code == 0
    assert all(f" {verb} " in said.out for verb in VERBS) and " engine " not in said.out


def test_the_version_is_the_packages(leyden: Caller) -> None:
    said = leyden("--version")
    assert (said.code, said.out.strip()) == (0, package.__version__)


def test_an_unknown_verb_is_a_usage_error(leyden: Caller) -> None:
    assert leyden("trian").code == 2


@pytest.mark.parametrize("verb", ["run", "train", "eval", "inspect", "serve"])
def test_a_missing_configuration_names_the_file_and_how_to_get_one(leyden: Caller, tmp_path: Path, verb: str) -> None:
    said = leyden(verb, "-c", tmp_path / "absent.toml")
    assert said.code == 2 and "absent.toml" in said.err and "leyden init" in said.err


def test_an_unknown_key_is_refused_with_the_nearest_known_one(leyden: Caller, project: Path) -> None:
    change(project, "steps = 20", "stepz = 20")
    said = leyden("train", "-c", project / "leyden.toml")
    assert said.code == 2 and "'learn.stepz'" in said.err and "'learn.steps'" in said.err


def test_an_override_without_a_value_is_refused(leyden: Caller, project: Path) -> None:
    said = leyden("train", "-c", project / "leyden.toml", "-s", "learn.steps")
    assert said.code == 2 and "section.key=value" in said.err


def test_training_without_tasks_says_which_key_to_set(leyden: Caller, project: Path) -> None:
    said = leyden("train", "-c", project / "leyden.toml", "-s", 'tasks.train=""')
    assert said.code == 2 and "tasks.train" in said.err


def test_a_task_file_that_is_not_there_is_named(leyden: Caller, project: Path) -> None:
    said = leyden("train", "-c", project / "leyden.toml", "-s", "tasks.train=gone.jsonl")
    assert said.code == 2 and "gone.jsonl" in said.err


def test_a_broken_line_and_a_doubled_id_are_named_with_their_line(leyden: Caller, project: Path) -> None:
    (project / "broken.jsonl").write_text('{"id": "a", "input": {}}\n{"id": \n', encoding="utf-8")
    said = leyden("train", "-c", project / "leyden.toml", "-s", "tasks.train=broken.jsonl")
    assert said.code == 2 and "line 2" in said.err and "not JSON" in said.err
    (project / "twice.jsonl").write_text('{"id": "a", "input": {}}\n' * 2, encoding="utf-8")
    said = leyden("train", "-c", project / "leyden.toml", "-s", "tasks.train=twice.jsonl")
    assert said.code == 2 and "line 2" in said.err and "'a'" in said.err


def test_a_task_in_both_splits_is_refused(leyden: Caller, project: Path) -> None:
    line = (project / "tasks" / "train.jsonl").read_text(encoding="utf-8").splitlines()[0]
    (project / "tasks" / "holdout.jsonl").write_text(line.replace('"train"', '"holdout"') + "\n", encoding="utf-8")
    said = leyden("train", "-c", project / "leyden.toml")
    assert said.code == 2 and "holdout" in said.err


def test_without_a_holdout_training_says_that_nothing_can_be_proved(leyden: Caller, project: Path) -> None:
    (project / "empty").mkdir()  # no model, which is seen later
    said = leyden("train", "-c", project / "leyden.toml", "-s", 'tasks.holdout=""', "-s", "policies.main.model=./empty")
    assert "No holdout tasks" in said.out and "cannot prove a gain" in said.out
    said = leyden("eval", "-c", project / "leyden.toml", "-s", 'tasks.holdout=""', "-s", "policies.main.model=./absent")
    assert said.code == 2 and "tasks.holdout" in said.err


def test_a_model_that_is_not_there_is_named(leyden: Caller, project: Path) -> None:
    said = leyden("train", "-c", project / "leyden.toml", "-s", "policies.main.model=./absent-model")
    assert said.code == 1 and "absent-model" in said.err and "Traceback" not in said.err
    assert not list(project.glob("runs/*/config.json")), "a run that never began left a folder"


@pytest.mark.parametrize("named", ["models/absent", "/nowhere/absent", "~/nowhere-absent", "a/b/c", "absent.gguf"])
def test_what_can_only_be_a_path_is_refused_without_asking_a_hub(leyden: Caller, project: Path, named: str) -> None:
    (project / "models").mkdir()
    said = leyden("train", "-c", project / "leyden.toml", "-s", f"policies.main.model={named}")
    told = " ".join(said.err.split())
    assert said.code == 1 and f"policies.main.model is {named!r}, and there is nothing at" in told, said.err
    assert "relative to the configuration file" in told and not (project / "runs").exists()


def test_a_harness_that_is_not_there_is_named_before_anything_starts(leyden: Caller, project: Path) -> None:
    change(project, '"python agent.py"', '"no-such-program agent.py"')
    for verb in ("run", "train"):
        said = leyden(verb, "-c", project / "leyden.toml")
        assert said.code != 0 and "no-such-program" in said.err and "Traceback" not in said.err


def test_a_verifier_that_is_not_there_is_named_before_anything_starts(leyden: Caller, project: Path) -> None:
    for wrong in ("gone.py:verify", "verify.py:gone"):
        for verb in ("run", "train"):
            said = leyden(verb, "-c", project / "leyden.toml", "-s", f"rewards.verifier={wrong}")
            assert said.code != 0 and "gone" in said.err and "Traceback" not in said.err


def test_a_policy_without_a_section_is_named(leyden: Caller, project: Path) -> None:
    said = leyden("train", "-c", project / "leyden.toml", "-s", "learn.policy=other")
    assert said.code == 2 and "[policies.other]" in said.err and "main" in said.err


def test_greedy_rollouts_cannot_be_trained_on(leyden: Caller, project: Path) -> None:
    said = leyden("train", "-c", project / "leyden.toml", "-s", "policies.main.sampling.temperature=0")
    assert said.code == 2 and "temperature" in said.err


def test_a_store_that_cannot_be_written_is_named(leyden: Caller, project: Path) -> None:
    (project / "leyden.db").mkdir()
    said = leyden("run", "-c", project / "leyden.toml", "-s", "policies.main.engine=http://127.0.0.1:9")
    assert said.code == 1 and "leyden.db" in said.err and "Traceback" not in said.err


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_read_only_folder_is_named(leyden: Caller, project: Path) -> None:
    project.chmod(0o500)
    try:
        said = leyden("run", "-c", project / "leyden.toml", "-s", "policies.main.engine=http://127.0.0.1:9")
    finally:
        project.chmod(0o700)
    assert said.code == 1 and "leyden.db" in said.err


def test_a_file_that_is_no_store_is_not_touched(leyden: Caller, project: Path) -> None:
    (project / "leyden.db").write_text("my notes, long enough to be no empty file", encoding="utf-8")
    said = leyden("inspect", "-c", project / "leyden.toml")
    assert said.code == 1 and "not a store" in said.err
    assert (project / "leyden.db").read_text(encoding="utf-8").startswith("my notes")


def test_looking_into_a_store_that_is_not_there_does_not_make_one(leyden: Caller, project: Path) -> None:
    said = leyden("inspect", "-c", project / "leyden.toml")
    assert said.code == 1 and "leyden.db" in said.err
    assert not (project / "leyden.db").exists()


def test_a_port_that_is_taken_is_named(leyden: Caller, project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = leyden(
            "serve", "-c", project / "leyden.toml", "-s", f"gateway.port={port}",
            "-s", "policies.main.engine=http://127.0.0.1:9",
        )  # fmt: skip
    assert said.code != 0 and str(port) in said.err and "Traceback" not in said.err


def test_resuming_what_is_no_run_is_refused(leyden: Caller, tmp_path: Path) -> None:
    said = leyden("train", "--resume", tmp_path)
    assert said.code == 2 and "not the folder of a run" in said.err


def test_resuming_with_other_settings_is_refused(leyden: Caller, project: Path) -> None:
    (project / "run").mkdir()
    (project / "run" / "config.json").write_text("{}", encoding="utf-8")
    said = leyden("train", "--resume", project / "run", "-s", "learn.steps=9")
    assert said.code == 2 and "--set" in said.err


def test_a_worker_without_a_gateway_is_refused(leyden: Caller, project: Path) -> None:
    said = leyden("run", "--worker", "-c", project / "leyden.toml")
    assert said.code == 2 and "--gateway" in said.err


def test_a_split_that_does_not_exist_is_refused(leyden: Caller, project: Path) -> None:
    said = leyden("run", "--split", "test", "-c", project / "leyden.toml")
    assert said.code == 2 and "train, val, holdout" in said.err


def test_an_export_format_is_named_by_the_ending(leyden: Caller, project: Path) -> None:
    said = leyden("export", project / "out.csv", "-c", project / "leyden.toml")
    assert said.code == 2 and ".parquet" in said.err
