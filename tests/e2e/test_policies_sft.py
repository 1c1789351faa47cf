"""Several policies imitate demonstrations before they are reinforced, in a real run that is killed and gone on with."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.e2e.project import leyden, metrics, project_store, read, run_folder, start, write_lines
from tests.e2e.team import make_team
from tests.e2e.test_policies import repeated
from tests.e2e.test_resume import num_steps, recorded, until

from leyden.base.errors import ConfigError, TaskError
from leyden.cli import wiring
from leyden.store import ledger

SFT = """
[sft]
epochs = 8
batch_size = 2
learning_rate = 3e-2
"""

ANSWERS = {"planner": ("abababab", "babababa", "ababbaba"), "writer": ("ABABABAB", "BABABABA")}


def write_demos(path: Path, answers: Mapping[str, tuple[str, ...]]) -> None:
    rows = [
        {
            "task": f"shown-{i}",
            "policy": policy,
            "messages": [
                {"role": "system", "content": f"You are the {policy}."},
                {"role": "user", "content": f"word {i}"},
                {"role": "assistant", "content": answer},
            ],
        }
        for policy, said in answers.items()
        for i, answer in enumerate(said)
    ]
    write_lines(path, rows)


@pytest.mark.timeout(300)
def test_policies_imitate_their_own_demonstrations_then_reinforce_and_resume_bit_by_bit(tmp_path: Path) -> None:
    path = make_team(tmp_path, settings=SFT + "[policies.writer.sft]\nepochs = 12\n", num_holdout=2)
    write_demos(tmp_path / "demos.jsonl", ANSWERS)
    small = ("-s", "learn.steps=3", "-s", "learn.group_size=4", "-s", "tasks.demos=demos.jsonl", "-s", "eval.samples=8")
    process = start("train", "-c", str(path), *small, cwd=tmp_path)
    # The checkpoint of imitation is the newest when step 1 is recorded, so step 1 is learned again from there.
    until(lambda: num_steps(tmp_path) >= 1, process, tmp_path, "step 1")
    process.kill()
    process.wait(10)
    run = run_folder(tmp_path)
    before, imitated = metrics(run), metrics(run, "sft")
    num_imitated = 8 * 2
    assert [row["step"] for row in imitated] == list(range(num_imitated)), "the planner has two batches an epoch"
    for name, num_own in (("planner", 16), ("writer", 12)):
        losses = [row["policies"][name]["loss"] for row in imitated if name in row["policies"]]
        assert len(losses) == num_own and losses[-1] < 0.5 * losses[0], (name, losses)
    leyden("train", "--resume", str(run), cwd=tmp_path)
    assert [recorded(row) for row in metrics(run, "sft")] == [recorded(row) for row in imitated], "not done again"
    rows = metrics(run)
    assert [repeated(row) for row in rows[: len(before)]] == [repeated(row) for row in before], "bit-identical"
    assert [row["policies"]["writer"]["version"] for row in rows] == [num_imitated + 1 + step for step in range(3)]
    said = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    judged = {one["label"]: one for one in said["evaluations"]}
    assert [one["policy_version"] for one in judged.values()] == [
        f"planner@{n}+writer@{n}" for n in (0, num_imitated, num_imitated + 3)
    ]
    assert judged["SFT"]["reward"]["mean"] > judged["Base"]["reward"]["mean"] + 0.1, judged
    page = (run / "report.html").read_text(encoding="utf-8")
    assert all(f"{stage} of writer" in page for stage in ("Supervised fine-tuning", "Reinforcement learning"))
    store = project_store(tmp_path)
    try:
        known = store.read(lambda connection: ledger.policy_versions(connection))
    finally:
        store.close()
    assert [v.name for v in known if v.step == 0] == [f"planner@{num_imitated}", f"writer@{num_imitated}"]
    assert not any(v.policy == "critic" for v in known)
    moment = ("--version-of", f"planner@{num_imitated}", "-s", "tasks.demos=demos.jsonl")
    again = leyden("eval", "-c", str(path), *moment, "--json", cwd=tmp_path).stdout
    found = json.loads(again.splitlines()[-1])["evaluations"][0]
    assert found["policy_version"] == f"planner@{num_imitated}+writer@{num_imitated}"


def test_demonstrations_for_nobody_and_for_the_frozen_are_refused_by_name(tmp_path: Path) -> None:
    path, demos = make_team(tmp_path, settings=SFT), tmp_path / "demos.jsonl"
    write_demos(demos, ANSWERS)
    named = ("tasks.demos=demos.jsonl",)
    shown = wiring.tasks_of(read(path, *named))[3]
    assert [demo.policy for demo in shown] == ["planner"] * 3 + ["writer"] * 2
    write_demos(demos, {**ANSWERS, "critic": ("hm",)})
    with pytest.raises(TaskError, match=r"line 6: 'policy' is 'critic', which this run does not train"):
        wiring.tasks_of(read(path, *named))
    write_demos(demos, {"planner": ANSWERS["planner"]})
    with pytest.raises(ConfigError, match=r"policies\.writer\.sft would do nothing: no line of demos\.jsonl is for"):
        wiring.tasks_of(read(path, *named, "policies.writer.sft={ epochs = 1 }"))
