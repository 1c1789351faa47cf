"""`leyden compare`, `diagnose`, `costs`, `tasks` and `eval --plan` on a store with recorded evaluations."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.calling import Caller
from tests.unit.cli.test_report import read
from tests.unit.release.making import evaluation

from leyden.base.config import load
from leyden.base.records import PolicyVersion, Rollout
from leyden.base.tasks import fingerprint, load_tasks
from leyden.cli import wiring
from leyden.cli.lineup import training_of
from leyden.cli.report.compare import render_comparison
from leyden.release.costs import Cost
from leyden.release.evaluation import Evaluation
from leyden.release.side_by_side import Method, Training, side_by_side
from leyden.store import ledger, queue
from leyden.store.base import Store
from leyden.testing.fake_backend import ScriptedServices
from leyden.testing.fake_engine import FakeEngine
from leyden.testing.scripted import Behaviour, Reply

ATTACK = "<script>alert('x')</script>"


def solved(count: int, of: int = 32) -> list[list[float]]:
    return [[1.0]] * count + [[0.0]] * (of - count)


def add(store: Store, mark: str, run: str, label: str, version: int, result: Evaluation) -> None:
    store.write(
        lambda c: ledger.add_evaluation(
            c, store, evaluation_id=f"{run}-{label}", run_id=run, split="holdout", fingerprint=mark, policy="main",
            version=version, label=label, result=result.to_json(),
        )
    ).result(20)  # fmt: skip


def register(
    store: Store, run: str, number: int, parent: int | None, path: str, stage: str | None = None, prompts: Any = None
) -> None:
    """A version of `main`."""
    one = PolicyVersion(
        policy="main", version=number, kind="prompt" if prompts else "weights", parent=parent, path=path, run_id=run,
        prompts=prompts or {},
    )  # fmt: skip
    store.write(lambda c: ledger.add_policy_version(c, store, one, stage=stage)).result(20)


def add_step(store: Store, run: str, step: int, stage: str, half_s: float) -> None:
    """A step that read 500 tokens and took twice `half_s`."""
    cost = Cost(num_rollouts=8, prompt_tokens=500).to_json()
    report = {"seconds": {"rollouts": half_s, "update": half_s}, "cost": cost}
    store.write(
        lambda c: ledger.add_step(
            c, store, run_id=run, step=step, stage=stage, policy="main", version_before=step, version_after=step + 1,
            report=report,
        )
    ).result(20)  # fmt: skip


@pytest.fixture
def judged(project: Path) -> Path:
    """The project of `leyden init` with a run whose three evaluations are recorded."""
    config = load(project / "leyden.toml")
    store = wiring.store_of(config)
    held = load_tasks(project / "tasks" / "holdout.jsonl", split="holdout")
    mark = fingerprint(held)
    store.write(lambda c: ledger.add_run(c, store, "run-1", {}, {})).result(20)
    for number, stage in ((0, "base"), (4, "sft"), (9, "rl")):
        register(store, "run-1", number, 0 if number else None, f"checkpoints/{number}", stage)
    for n in range(9):
        add_step(store, "run-1", n, "sft" if n < 4 else "rl", 60.0)
    for label, version, count in (("base", 0, 2), ("sft", 4, 25), ("final", 9, 27)):
        add(
            store,
            mark,
            "run-1",
            label,
            version,
            evaluation(solved(count), version, fingerprint=mark, tokens=40.0 - version),
        )
    store.close()
    return project / "leyden.toml"


def test_stored_evaluations_are_compared_without_running_anything(leyden: Caller, judged: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    said = leyden("compare", "base", "sft", "RL=run-1/final", "-c", judged, "--out", page, "--json", "--stored")
    assert said.code == 0, said.err
    (tree,) = said.rows
    assert [row["name"] for row in tree["rows"]] == ["base", "sft", "RL"]
    assert tree["recommended"] == "sft" and tree["looks"] == 1
    assert tree["alpha"] == pytest.approx(0.025) and tree["report"] == str(page)
    assert [row["training"]["minutes"] for row in tree["rows"]] == [0.0, 8.0, 18.0]
    assert [row["training"]["tokens"] for row in tree["rows"]] == [0, 2000, 4500]
    assert tree["rows"][1]["per_success"]["value"] == pytest.approx(8 / (1000 * 23 / 32))
    html = page.read_text(encoding="utf-8")
    read(html)
    assert "RL" in html and "not separable" in html and "<svg" in html


def test_people_see_the_table_every_pair_and_the_recommendation(leyden: Caller, judged: Path, tmp_path: Path) -> None:
    said = leyden(
        "compare", "main@0", "main@4", "-c", judged, "--out", tmp_path / "p.html", "--calls-per-month", "1000"
    )
    assert said.code == 0, said.err
    assert "main@4 against main@0: +71.9 points" in said.out and "Recommended: main@4" in said.out
    assert "On the front of success against tokens" in said.out and "first time" in said.out


def test_the_runs_of_one_method_are_pooled_by_a_plus(leyden: Caller, judged: Path, tmp_path: Path) -> None:
    said = leyden(
        "compare", "base", "trained=sft+run-1/final", "-c", judged, "--out", tmp_path / "p.html", "--json", "--stored"
    )
    assert said.code == 0, said.err
    _, trained = said.rows[0]["rows"]
    assert trained["name"] == "trained" and trained["policy_version"] == "main@4 + main@9"
    assert trained["pass1"]["mean"] == pytest.approx((25 + 27) / 64)
    assert trained["training"]["minutes"] == pytest.approx((8 + 18) / 2)
    assert any("trained stands for 2 runs, which solved 78.1, 84.4 %" in note for note in said.rows[0]["notes"])
    unknown = leyden("compare", "base", "x=sft+nothing", "-c", judged, "--stored")
    assert unknown.code != 0 and "'nothing'" in unknown.err


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (("base", "main@7"), "no policy version 'main@7'; known: main@0, main@4, main@9"),
        (("base", "best"), "no stored evaluation 'best'; evaluations of these tasks: run-1/base"),
        (("base", "x="), "'x=' is no version"),
        (("base", "old"), "is of other tasks (fingerprint other"),
        (("base",), "at least two"),
        (("base", "base"), "named twice"),
    ],
)
def test_what_cannot_be_compared_is_said(leyden: Caller, judged: Path, asked: tuple[str, ...], complaint: str) -> None:
    config = load(judged)
    store = wiring.store_of(config)
    add(store, "other" * 8, "run-0", "old", 4, evaluation(solved(3, 5), 4))
    store.close()
    said = leyden("compare", *asked, "-c", judged, "--stored")
    assert said.code in (1, 2) and complaint in said.err.replace("\n", " ")


def test_a_missing_evaluation_is_an_error_when_nothing_may_run(leyden: Caller, judged: Path) -> None:
    said = leyden("compare", "main@0", "main@4", "-c", judged, "--stored", "-s", "eval.max_tasks=5")
    assert said.code == 2 and "no stored evaluation of main@0, main@4 on these tasks" in said.err


def test_training_costs_go_back_to_the_run_that_a_run_started_from(judged: Path) -> None:
    config = load(judged, ["costs.machine_usd_per_hour=6.0"])
    store = wiring.store_of(config)
    # Run 2 began with the checkpoint of version 9, and run 3 with a folder that nobody registered.
    register(store, "run-2", 10, None, "checkpoints/9")
    register(store, "run-2", 12, 10, "y")
    register(store, "run-3", 20, None, "z")
    register(store, "run-3", 21, 20, "w")
    add_step(store, "run-2", 11, "rl", 30.0)
    assert training_of(store, config, "main", 9).usd == pytest.approx(18 / 60 * 6)
    assert training_of(store, config, "main", 12).minutes == 19.0, "one of its own and eighteen of run-1"
    assert training_of(store, config, "main", 21).minutes == 0.0
    assert training_of(store, config, "main", 0) == Training(usd=0.0)
    assert training_of(store, load(judged), "main", 9).usd is None
    store.close()


def test_prompts_cost_all_of_the_search_and_what_made_the_weights_they_were_found_for(judged: Path) -> None:
    config = load(judged)
    store = wiring.store_of(config, create=False)
    path = next(v.path for v in store.read(ledger.policy_versions) if v.version == 9)
    register(store, "search-0", 40, None, str(path))
    prompts = {"system": {"where": "system", "original": "a", "text": "b"}}
    register(store, "search-0", 41, 40, str(path), prompts=prompts)
    register(store, "search-0", 42, 40, str(path), prompts=prompts)
    register(store, "search-1", 50, None, str(path))
    register(store, "search-1", 51, 50, str(path), prompts=prompts)
    store.write(
        lambda c: ledger.add_step(
            c, store, run_id="search-1", step=0, stage="prompts", policy="main", version_before=50, version_after=52,
            report={"seconds": {"rollouts": 120.0}, "cost": Cost(num_rollouts=4, usd=0.5).to_json(),
                    "reflection_usd": 0.25},
        )
    ).result(20)  # fmt: skip
    weights = training_of(store, config, "main", 9)
    both = training_of(store, config, "main", 51)
    store.close()
    assert both.minutes == weights.minutes + 2.0, "all rounds of its search, none of another search, and the weights'"
    assert both.usd == pytest.approx((weights.usd or 0.0) + 0.75 + 2 / 60 * config.costs.machine_usd_per_hour)


def test_the_page_is_whole_escaped_and_says_what_cannot_be_shown() -> None:
    methods = [
        Method(
            name=name, evaluation=evaluation([[value]] * 3, n, usd=0.01 * n), training=Training(minutes=n, usd=1.0 * n)
        )
        for n, (name, value) in enumerate((("base", 0.0), (ATTACK, 1.0), ("c", 1.0)))
    ]
    page = render_comparison(
        side_by_side(methods, calls_per_month=50), title=ATTACK, looks=ATTACK, facts={ATTACK: ATTACK}
    )
    parser = read(page)
    assert "<script" not in page and parser.tags.isdisjoint({"script", "link", "img"})
    assert parser.ids == ["result", "fronts", "pairs", "costs", "notes", "run", "glossary"]
    assert "keep the reference" in parser.text and "3 tasks with 3 pairs cannot show any difference" in parser.text
    for wrong in ("nan", "None", "inf "):
        assert wrong not in parser.text.replace("infrastructure", "")
    assert "prefers-color-scheme" in page and "http" not in page.replace("http-equiv", "")


def test_a_plan_is_printed_before_any_run(leyden: Caller, project: Path) -> None:
    said = leyden("eval", "-c", project / "leyden.toml", "--plan", "--effect", "0.2")
    assert said.code == 0, said.err
    assert "20 points need" in said.out and "32 tasks find" in said.out and "first time" in said.out
    (tree,) = leyden("eval", "-c", project / "leyden.toml", "--plan", "--json").rows
    assert tree["look"] == 1 and tree["plan"]["num_tasks"] == 32 and not tree["plan"]["hopeless"]
    few = leyden("eval", "-c", project / "leyden.toml", "--plan", "-s", "eval.max_tasks=3").out
    assert "3 tasks cannot show any difference" in few


@pytest.fixture
def fake() -> Iterator[Callable[[str], str]]:
    """Starts an engine that always answers the same text; its URL."""
    with ExitStack() as stack:
        yield lambda text: stack.enter_context(FakeEngine(Behaviour(reply=lambda body: Reply(text=text)))).url


@pytest.fixture
def failed(judged: Path) -> Path:
    """The same with the rollouts of an evaluation in the store: a third of them wrong, none said why."""
    config = load(judged)
    store = wiring.store_of(config)
    held = load_tasks(judged.parent / "tasks" / "holdout.jsonl", split="holdout")
    rollouts = [
        Rollout(id=f"ro_{n}", task=task, mode="val", run_id="run-1", policy_versions={"main": 0},
                metadata={"evaluation": "base"})
        for n, task in enumerate(held)
    ]  # fmt: skip
    store.write(lambda c: queue.enqueue(c, store, rollouts)).result(20)
    ScriptedServices(store, lambda rollout: float(int(rollout.id[3:]) % 3 > 0)).check()
    store.close()
    return judged


def test_failures_are_diagnosed_from_the_store(leyden: Caller, failed: Path, tmp_path: Path) -> None:
    said = leyden("diagnose", "-c", failed, "--json", "-s", "rewards.success=right")
    assert said.code == 0, said.err
    (tree,) = said.rows
    assert (tree["run"], tree["label"], tree["num_rollouts"], tree["counts"]) == (
        "run-1",
        "base",
        32,
        {"reasoning": 11},
    )
    text = leyden("diagnose", "run-1", "-c", failed, "-s", "rewards.success=right").out
    assert "right remedy for 11 of 11" in text and "ro_0" in text
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nname="hi"\ncategory="data"\nfield="final_text"\npattern="^HI$"\n', encoding="utf-8")
    (tree,) = leyden("diagnose", "-c", failed, "--rules", rules, "--json", "-s", "rewards.success=right").rows
    assert tree["counts"] == {"data": 11} and tree["remedy"] == "no"


def test_a_judge_behind_an_engine_is_asked_over_http(leyden: Caller, failed: Path, fake: Callable[[str], str]) -> None:
    url = fake('{"category": "data", "reason": "the table was missing"}')
    overrides = ("-s", "rewards.success=right", "-s", f"policies.judge.engine={url}", "-s", "policies.judge.model=m")
    (tree,) = leyden("diagnose", "-c", failed, "--judge", "judge", "--json", *overrides).rows
    assert tree["counts"] == {"data": 11} and (tree["judge_asked"], tree["judge_unusable"]) == (11, 0)
    said = leyden("diagnose", "-c", failed, "--judge", "main", "-s", "rewards.success=right")
    assert said.code == 2 and "policies.main.engine is empty" in said.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("nope",), "run 'nope' has no evaluation"),
        (("--label", "nope"), "it has: base, sft, final"),
        (("--label", "final"), "are gone from the store"),
        (("--judge", "nobody"), "no section [policies.nobody]"),
    ],
)
def test_what_cannot_be_diagnosed_is_said(
    leyden: Caller, failed: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    said = leyden("diagnose", *arguments, "-c", failed)
    assert said.code == 2 and complaint in said.err.replace("\n", " ")


def test_costs_are_shown_per_step_version_and_rollout(leyden: Caller, failed: Path) -> None:
    (tree,) = leyden("costs", "-c", failed, "--json", "-s", "costs.machine_usd_per_hour=2").rows
    assert tree["run"] == "run-1" and len(tree["rows"]) == 12
    assert tree["total"]["tokens"] == 9 * 500 and tree["total"]["usd"] == pytest.approx(18 / 60 * 2)
    assert tree["total"]["cost"]["storage_bytes"] > 32 * 50
    text = leyden("costs", "run-1", "-c", failed).out
    assert "evaluation final" in text and "main@9" in text and "Altogether 18.0 minutes" in text
    (one,) = leyden("costs", "--rollout", "ro_31", "-c", failed, "--json").rows
    assert (one["num_calls"], one["prompt_tokens"], one["completion_tokens"]) == (1, 3, 3) and one["storage_bytes"] > 50
    assert leyden("costs", "nope", "-c", failed).code == 2


def test_a_task_file_is_split_and_checked(leyden: Caller, project: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "all.jsonl", tmp_path / "parts"
    rows = [{"id": f"t{n}", "domain": "ab"[n % 2], "input": {"q": f"word{n} number {n}", "day": n}} for n in range(20)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = ("tasks", "split", source, "--by", "time", "--key", "day", "--holdout", "0.25", "--out", out)
    assert leyden(*command, "--json").rows == [{"out": str(out), "train": 15, "val": 0, "holdout": 5}]
    assert [t.id for t in load_tasks(out / "holdout.jsonl", split="holdout")] == [f"t{n}" for n in range(15, 20)]
    again = leyden(*command)
    assert again.code == 2 and "exists" in again.err
    by_domain = ("tasks", "split", source, "--by", "domain", "--holdout", "b", "--out", tmp_path / "d")
    assert "10 train, 10 holdout" in leyden(*by_domain).out
    for wrong, complaint in (
        (("--by", "luck", "--holdout", "0.2"), "time|domain|chance"),
        (("--by", "chance", "--holdout", "0.7", "--val", "0.6"), "leave nothing to train"),
        (("--by", "time", "--holdout", "0.2"), "--key"),
        (("--by", "chance", "--holdout", "half"), "no share"),
        (("--by", "domain", "--holdout", "z"), "'z'"),
    ):
        said = leyden("tasks", "split", source, *wrong, "--out", tmp_path / "w")
        assert said.code == 2 and complaint in said.err, said.err
    assert leyden("tasks", "mend").code == 2


def test_a_leak_between_files_is_found_by_the_check_and_refused_by_a_run(leyden: Caller, project: Path) -> None:
    config, train = project / "leyden.toml", project / "tasks" / "train.jsonl"
    clean = leyden("tasks", "check", "-c", config)
    assert clean.code == 0 and "0 of 64 tasks" in clean.out, clean.err
    held = json.loads((project / "tasks" / "holdout.jsonl").read_text("utf-8").splitlines()[0])
    text = json.dumps(held["input"]).replace("What is", "WHAT  is")
    leak = {**held, "id": "leak", "split": "train", "input": json.loads(text)}
    train.write_text(train.read_text("utf-8") + json.dumps(leak) + "\n", encoding="utf-8")
    no_model = leyden("tasks", "check", "-c", config, "-s", "tasks.near_model=nowhere")
    assert no_model.code != 0 and "nowhere has no config.json" in no_model.err.replace("\n", " "), no_model.err
    found = leyden("tasks", "check", "-c", config, "--json")
    assert found.code == 1 and [row["asked"] for row in found.rows[0]["leaks"]] == ["leak"]
    refused = leyden("eval", "-c", config, "--plan")
    assert refused.code == 1 and "'leak'" in refused.err and "tasks.near" in refused.err
    assert leyden("eval", "-c", config, "--plan", "-s", "tasks.near=1").code == 1, "an equal task is refused at any"
