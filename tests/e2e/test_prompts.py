"""A harness whose prompt is hard-coded in its file improves by `leyden train`; the file does not change."""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.project import ENV, make_project, project_store, run_folder, write_lines
from tests.unit.cli.calling import Caller

from leyden.base.prompts import as_read
from leyden.store import ledger, lookups
from leyden.testing.fake_engine import FakeEngine
from leyden.testing.scripted import Faults, Reply
from leyden.traces.reader import Reader

HARNESS = '''\
import json
import os
from urllib.request import Request, urlopen

SYSTEM = f"""You count {{letters}} in words. Today's word list is {os.environ["LIST"]}."""
TOOL = {"name": "look_up", "description": "Looks a word up.", "parameters": {"type": "object", "properties": {}}}
body = {
    "model": "main",
    "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": os.environ["WORD"]}],
    "tools": [{"type": "function", "function": TOOL}],
}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urlopen(Request(url, json.dumps(body).encode(), headers)) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
'''

VERIFIER = """\
def verify(task, trace, workspace):
    return {"right": float(trace["final_text"].strip() == task["answer"])}
"""

SETTINGS = """\
[harness]
command = "PYTHON agent.py"
env = { WORD = "{input.word}", LIST = "{input.list}" }
concurrency = 4
timeout_s = 60

[tasks]
train = "train.jsonl"
val = "val.jsonl"
holdout = "holdout.jsonl"

[policies.main]
engine = "ENGINE"
trainable = false

[policies.thinker]
engine = "THINKER"
trainable = false
sampling = { max_tokens = 4096 }

[rewards]
verifier = "verify.py:verify"

[learn]
algorithm = "apo"
step_timeout_s = 90

[prompts]
reflection = "thinker"
rounds = 2
beam = 1
edits = 1
minibatch = 2
reflection_tries = 2
reflection_backoff_s = 0.05

[eval]
resamples = 200
"""

pytestmark = pytest.mark.timeout(1200)  # a dozen verbs, three of which start a gateway

RULE = "Answer with digits only."
BETTER = "You count {letters} in words of {list}. " + RULE


@pytest.fixture
def leyden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Caller:
    """Verbs in this process, in the folder of the project; what they start are processes of their own."""
    monkeypatch.setenv("PYTHONPATH", ENV["PYTHONPATH"])
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return Caller(monkeypatch, capfd)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as opened:

        def reply(body: Mapping[str, Any]) -> Reply:
            word = body["messages"][-1]["content"]
            return Reply(text=str(len(word)) if RULE in body["messages"][0]["content"] else f"It has {len(word)}.")

        opened.behaviour.reply = reply
        yield opened


@pytest.fixture
def thinker() -> Iterator[FakeEngine]:
    with FakeEngine() as opened:

        def reply(body: Mapping[str, Any]) -> Reply:
            if "Write better prompts" in body["messages"][0]["content"]:
                return Reply(text=f'<slot name="system">\n{BETTER}\n</slot>')
            return Reply(text="It must say that only digits are wanted.")

        opened.behaviour.reply = reply
        yield opened


OF_WEIGHTS = ("mini_batches", "learning_rate", "grad_clip")
"""Keys of the project that a search for prompts would not read, which is an error."""


def project(folder: Path, engine: FakeEngine, thinker: FakeEngine) -> Path:
    """A harness, a verifier, tasks and a configuration; the path of the harness."""
    harness = folder / "agent.py"
    harness.write_text(HARNESS, encoding="utf-8")
    (folder / "verify.py").write_text(VERIFIER, encoding="utf-8")
    settings = SETTINGS.replace("PYTHON", sys.executable).replace("ENGINE", engine.url).replace("THINKER", thinker.url)
    (folder / "leyden.toml").write_text(settings, encoding="utf-8")
    for split, count in (("train", 3), ("val", 3), ("holdout", 7)):
        rows = [
            {"id": f"{split}-{i}", "split": split, "input": {"word": split + "x" * i, "list": f"list {split} {i}"},
             "answer": str(len(split) + i)}
            for i in range(count)
        ]  # fmt: skip
        write_lines(folder / f"{split}.jsonl", rows)
    return harness


def test_from_discovery_to_promotion_without_touching_the_harness(
    tmp_path: Path, engine: FakeEngine, thinker: FakeEngine, leyden: Caller
) -> None:
    folder = tmp_path / "project"
    harness = project(folder, engine, thinker)
    before = hashlib.sha256(harness.read_bytes()).hexdigest()

    leyden("run", "--split", "train")
    found = leyden("prompts", "discover", "--json").rows[0]
    system, tool = found["slots"]["system"], found["slots"]["tool_look_up"]
    assert system["original"] == "You count {{letters}} in words. Today's word list is {list}."
    assert tool["original"] == "Looks a word up." and tool["tool"] == "look_up"

    thinker.behaviour.faults = Faults(status=500)
    stopped = leyden("train")
    assert stopped.code == 1 and "--resume" in stopped.err and "502" in stopped.err, stopped.err
    thinker.behaviour.faults = Faults()
    run = run_folder(folder)
    num_calls = len(engine.requests)
    said = leyden("train", "--resume", str(run)).out
    assert "better" in said, said
    assert hashlib.sha256(harness.read_bytes()).hexdigest() == before

    summary = json.loads((run / "summary.json").read_text())
    assert summary["verdicts"]["base"]["answer"] == "better"
    final = summary["verdicts"]["base"]["candidate"]
    assert "-You count {letters} in words. Today's word list is {list}." in (run / "prompts/final.diff").read_text()
    report = (run / "report.html").read_text()
    assert "<ins>+You count {letters} in words of {list}. Answer with digits only.</ins>" in report
    rounds = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rounds and {row["stage"] for row in rounds} == {"prompts"}
    # 7 holdout tasks, 2 failures and 3 validation tasks were run before; the rest is new.
    assert len(engine.requests) - num_calls <= 3 + 2 + 3 + 7

    diff = leyden("prompts", "diff", final).out
    assert "+" + BETTER in diff
    assert "no difference" in leyden("prompts", "diff", final, str(run / "prompts/final.toml")).out
    assert BETTER in leyden("prompts", "show", final).out
    leyden("prompts", "export", final, "--out", "out")
    assert BETTER in (folder / "out" / f"{final}.txt").read_text()
    assert "serves now" in leyden("prompts", "promote", final).out
    leyden("run", "--split", "holdout", "--limit", "1")
    store = project_store(folder)
    try:
        assert store.read(ledger.all_serving) == {"main": int(final.partition("@")[2])}
        runs = store.read(lambda c: ledger.evaluations(c, run_id=run.name))
        assert [one.label for one in runs] == ["base", "final"]
    finally:
        store.close()
    assert RULE in engine.requests[-1]["messages"][0]["content"]
    assert "list holdout 0" in engine.requests[-1]["messages"][0]["content"]


def test_gepa_is_stopped_by_a_reflection_model_that_is_down_and_goes_on_to_better_prompts(
    tmp_path: Path, engine: FakeEngine, thinker: FakeEngine, leyden: Caller
) -> None:
    pytest.importorskip("gepa")
    folder = tmp_path / "project"
    before = hashlib.sha256(project(folder, engine, thinker).read_bytes()).hexdigest()

    def reply(body: Mapping[str, Any]) -> Reply:
        instruction = body["messages"][0]["content"].split("```")[1]
        return Reply(text=f"```\n{BETTER if 'You count' in instruction else 'Looks up a word.'}\n```")

    thinker.behaviour.reply = reply
    leyden("run", "--split", "train")
    leyden("prompts", "discover")
    search = ("--set", 'learn.algorithm="gepa"', "--set", "prompts.max_rollouts=60")
    thinker.behaviour.faults = Faults(status=500)
    stopped = leyden("train", *search)
    assert stopped.code == 1 and "--resume" in stopped.err and "502" in stopped.err, stopped.err
    thinker.behaviour.faults = Faults()
    run, num_calls = run_folder(folder), len(engine.requests)
    assert "better" in leyden("train", "--resume", str(run)).out
    assert hashlib.sha256((folder / "agent.py").read_bytes()).hexdigest() == before

    summary = json.loads((run / "summary.json").read_text())
    assert summary["verdicts"]["base"]["answer"] == "better"
    final = summary["verdicts"]["base"]["candidate"]
    assert BETTER in leyden("prompts", "show", final).out
    rounds = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {row["stage"] for row in rounds} == {"prompts"} and rounds[-1]["score"] == 1.0
    assert rounds[0]["score"] == 0.0, "no answer was right before"
    store = project_store(folder)
    try:
        known = store.read(lambda c: ledger.policy_versions(c, "main"))
        traces = Reader(store).traces([r.id for r in store.read(lambda c: lookups.newest(c, 1000))])
    finally:
        store.close()
    prompted = [version.name for version in known if version.kind == "prompt"]
    assert final in prompted and len(prompted) == len({json.dumps(v.prompts) for v in known if v.kind == "prompt"})
    num_run = sum(trace.rollout.run_id == run.name for trace in traces)
    assert len(engine.requests) - num_calls < num_run, "what was run before is not run again"
    said = [call for trace in traces for call in trace.calls if call.policy == "main"]
    assert any("prompt:system" in call.rewrites for call in said)
    assert all(RULE not in call.request["messages"][0]["content"] for call in said), "the harness says what it said"


def test_demonstrations_need_no_reflection_model_and_a_budget_of_nothing_is_refused(
    tmp_path: Path, engine: FakeEngine, thinker: FakeEngine, leyden: Caller
) -> None:
    folder = tmp_path / "project"
    project(folder, engine, thinker)

    def reply(body: Mapping[str, Any]) -> Reply:
        word, system = body["messages"][-1]["content"], body["messages"][0]["content"]
        return Reply(text=str(len(word)) if "Example" in system or word.startswith("train") else "many")

    engine.behaviour.reply = reply
    leyden("run", "--split", "train")
    leyden("prompts", "discover")
    refused = leyden("train", "--set", "prompts.max_reflections=0")
    assert refused.code == 2 and "prompts.max_reflections = 0" in refused.err
    refused = leyden("train", "--set", "prompts.max_rollouts=2")
    assert refused.code == 2 and "scoring one candidate takes 3 rollouts" in refused.err
    assert not list((folder / "runs").glob("*-apo-*")), "a refused run left a folder"
    again = leyden("prompts", "discover")
    assert again.code == 2 and "--force" in again.err

    leyden("train", "--set", 'learn.algorithm="bootstrap_demos"', "--set", "prompts.candidates=2")
    assert len(thinker.requests) == 0
    run = run_folder(folder)
    assert json.loads((run / "summary.json").read_text())["verdicts"]["base"]["answer"] == "better"
    store = project_store(folder)
    try:
        ids = [r.id for r in store.read(lambda c: lookups.newest(c, 1))]
        call = Reader(store).traces(ids)[0].calls[0]
    finally:
        store.close()
    read = as_read(call.request, call.slots["texts"])["messages"][0]["content"]
    assert "Example" in read and "Example" not in call.request["messages"][0]["content"]
    assert "prompt:system" in call.rewrites


SPEAKING_AGENT = """\
import json
import os
from urllib.request import Request, urlopen

messages = [{"role": "system", "content": "Say it."}, {"role": "user", "content": os.environ["WORD"]}]
body = {"model": "main", "messages": messages, "max_tokens": TOKENS}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urlopen(Request(url, json.dumps(body).encode(), headers)) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""


def test_the_embedded_sampler_serves_each_set_of_prompts_under_its_own_number(leyden: Caller) -> None:
    config = make_project(Path.cwd(), agent=SPEAKING_AGENT, num_train=4, num_holdout=2, tokens=4)
    kept = [line for line in config.read_text(encoding="utf-8").splitlines() if not line.startswith(OF_WEIGHTS)]
    config.write_text("\n".join(kept), encoding="utf-8")
    verifier = "def verify(task, trace, workspace):\n    return {'letters': float(bool(trace['final_text']))}\n"
    Path("verify.py").write_text(verifier, encoding="utf-8")
    Path("prompts.json").write_text(json.dumps({"slots": {"system": {"original": "Say it."}}}), encoding="utf-8")
    overrides = (
        'learn.algorithm="bootstrap_demos"', "policies.main.max_context=400", "prompts.candidates=2",
        "prompts.max_demos=1", "prompts.search=random", "prompts.slots=prompts.json",
    )  # fmt: skip
    done = leyden("train", "--config", config, *(word for one in overrides for word in ("--set", one)))
    assert done.code == 0, done.err
    store = project_store(Path.cwd())
    try:
        versions = store.read(lambda c: ledger.policy_versions(c, "main"))
        traces = Reader(store).traces([r.id for r in store.read(lambda c: lookups.newest(c, 1000))])
    finally:
        store.close()
    assert [version.kind for version in versions] == ["weights", "prompt", "prompt", "prompt"]
    calls = [call for trace in traces for call in trace.calls]
    assert {call.policy_version for call in calls} == {0, 1, 2, 3}
    assert all(call.status == "ok" and call.provenance == "served" for call in calls)
    lengths = {version: {len(c.prompt_ids) for c in calls if c.policy_version == version} for version in range(4)}
    assert lengths[0] == lengths[1], "the original text in its own place changes no token"
    assert min(lengths[2]) > max(lengths[1]), "the engine read the demonstration"
