"""From a queued rollout to its outcome and reward, through real processes."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.unit.runner.conftest import Bench

from leyden.base.config import from_tree
from leyden.base.errors import ConfigError, HarnessError, VerifierError
from leyden.base.records import VERIFICATION_SPAN, Attempt, Outcome, Rollout, RolloutState, Task
from leyden.runner.environment import build_environment
from leyden.runner.lease import Runner, check_harness
from leyden.store import aio, queue

GOOD = "import sys; sys.path.insert(0, {folder!r}); from model import call; print(call())"


def good(bench: Bench, more: str = "", **harness: Any) -> None:
    bench.agent(GOOD.format(folder=str(bench.folder)) + "\n" + more, **harness)


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"20 s passed without: {what}"
        await asyncio.sleep(0.01)


def alive(mark: str) -> list[int]:
    return [
        p.pid
        for p in psutil.process_iter(["cmdline", "status"])
        if mark in " ".join(p.info["cmdline"] or []) and p.info["status"] != psutil.STATUS_ZOMBIE
    ]


async def test_a_rollout_is_run_verified_and_recorded(bench: Bench) -> None:
    good(bench, "open('answer.txt', 'w').write('done')")
    bench.verifier(
        "return {'correct': float((workspace / 'answer.txt').read_text() == 'done'"
        " and task['answer']['secret'] == '42'"
        " and trace['final_text'] == 'fine' and trace['messages'][-1]['content'] == 'hello'),"
        " 'tokens': trace['num_completion_tokens']}",
        weights={"correct": 1.0, "tokens": -0.1},
    )
    rollout, attempt = await bench.one()
    assert (rollout.state, rollout.outcome) == (RolloutState.SUCCEEDED, Outcome.COMPLETED), rollout
    assert rollout.reward == pytest.approx(0.8) and rollout.error_message is None
    assert attempt.exit_code == 0 and attempt.stdout_tail == "fine\n" and attempt.diagnosis is None
    assert attempt.detail.endswith("reward 0.8 = correct 1 x 1 + tokens 2 x -0.1")
    trace = bench.trace()
    assert {r.name: (r.value, r.source) for r in trace.rewards} == {
        "correct": (1.0, "verifier"),
        "tokens": (2.0, "verifier"),
    }
    before, after, verified = trace.spans
    assert verified.name == VERIFICATION_SPAN and verified.ended_at is not None
    assert verified.ended_at >= verified.started_at >= after.started_at
    assert (before.kind, before.attributes["num_files"]) == ("state_before", 0)
    assert after.kind == "state_after" and list(after.attributes["files"]) == ["answer.txt"]


async def test_many_rollouts_share_the_slots(bench: Bench) -> None:
    good(bench, concurrency=3)
    bench.verifier("return 1")
    await bench.enqueue(12)
    ended = await bench.run(12)
    assert {rollout.reward for rollout in ended} == {1.0} and len({r.id for r in ended}) == 12


async def test_a_harness_gets_its_environment_and_no_secret(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEYDEN_ADMIN_KEY", "LEYDEN_SPARE", "ENGINE_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    good(bench, "open('env.json', 'w').write(json.dumps(dict(os.environ)))\nimport json", keep_workspaces=True)
    text = (bench.folder / "agent.py").read_text()
    (bench.folder / "agent.py").write_text("import json, os\n" + text)
    bench.tree["harness"]["env"] = {"QUESTION": "ask {input.q}"}
    bench.tree["policies"] = {"main": {"engine_key_env": "ENGINE_KEY"}}
    _, attempt = await bench.one()
    folder = bench.folder / "runs" / "workspaces" / attempt.id
    env = json.loads((folder / "env.json").read_text())
    base = f"{bench.gateway.url}/proxy/rollout/r0/attempt/{attempt.id}/mode/train"
    expected = {
        "OPENAI_BASE_URL": f"{base}/openai/v1",
        "AGL_OPENAI_BASE_URL": f"{base}/openai/v1",
        "ANTHROPIC_BASE_URL": f"{base}/anthropic",
        "AGL_EVENT_URL": f"{bench.gateway.url}/api/rollouts/r0/attempt/{attempt.id}/events",
        "LEYDEN_ROLLOUT": "r0",
        "LEYDEN_ATTEMPT": attempt.id,
        "LEYDEN_SPLIT": "train",
        "LEYDEN_WORKSPACE": str(folder),
        "QUESTION": "ask ?",
    }
    assert {name: env[name] for name in expected} == expected
    assert json.loads(env["LEYDEN_TASK"]) == {"id": "t0", "split": "train", "domain": "", "input": {"q": "?"}}
    key = env["OPENAI_API_KEY"]
    assert key == env["ANTHROPIC_API_KEY"] == env["AGL_KEY"] and bench.gateway.seen[0][1] == f"Bearer {key}"
    assert "secret" not in env.values() and "42" not in json.dumps(env["LEYDEN_TASK"])
    assert "127.0.0.1" in env["NO_PROXY"]


@pytest.mark.parametrize("telemetry", [False, True])
def test_an_instrumented_harness_finds_the_gateway_where_it_is_asked_for(tmp_path: Path, telemetry: bool) -> None:
    settings = from_tree({"harness": {"command": "true", "telemetry": telemetry}}, base_dir=tmp_path)
    rollout = Rollout(id="r0", task=Task(id="t0"))
    attempt = Attempt(id="a0", rollout_id="r0", number=1, started_at=0.0)
    env = build_environment(settings, "http://127.0.0.1:1", rollout, attempt, "key", tmp_path)
    found = {name.removeprefix("OTEL_EXPORTER_OTLP_TRACES_"): env[name] for name in env if name.startswith("OTEL_")}
    expected = {
        "ENDPOINT": "http://127.0.0.1:1/proxy/rollout/r0/attempt/a0/mode/train/v1/traces",
        "HEADERS": "authorization=Bearer%20key",
        "PROTOCOL": "http/protobuf",
    }
    assert found == (expected if telemetry else {})


async def test_a_large_task_comes_in_a_file_beside_the_workspace(bench: Bench) -> None:
    good(
        bench,
        "task = json.load(open(os.environ['LEYDEN_TASK_FILE']))\n"
        "print(len(task['input']['q']), 'LEYDEN_TASK' in os.environ)",
    )
    text = (bench.folder / "agent.py").read_text()
    (bench.folder / "agent.py").write_text("import json, os\n" + text)
    await bench.enqueue(input={"q": "x" * 300_000})
    [rollout] = await bench.run()
    assert rollout.outcome is Outcome.COMPLETED
    assert bench.attempts()[0].stdout_tail == "fine\n300000 False\n"
    assert bench.trace().spans[1].attributes["num_files"] == 0


async def test_a_workspace_is_a_fresh_copy_of_the_template(bench: Bench) -> None:
    (bench.folder / "template" / "sub").mkdir(parents=True)
    (bench.folder / "template" / "sub" / "a.txt").write_text("a")
    good(bench, "open('sub/a.txt', 'a').write('b'); print(open('sub/a.txt').read())", workspace="template")
    await bench.enqueue(2)
    await bench.run(2)
    assert {bench.attempts(f"r{i}")[0].stdout_tail for i in range(2)} == {"fine\nab\n"}
    before, after = (span for span in bench.trace().spans if span.name == "workspace")
    assert before.attributes["files"]["sub/a.txt"]["bytes"] == 1
    assert before.attributes["files"]["sub/a.txt"] != after.attributes["files"]["sub/a.txt"]
    assert (bench.folder / "template" / "sub" / "a.txt").read_text() == "a"


@pytest.mark.parametrize("preload", [[], ["json"]])
async def test_a_callable_is_called_with_the_task(bench: Bench, preload: list[str]) -> None:
    (bench.folder / "agent.py").write_text(
        "import model\nasync def solve(task):\n    return {'said': model.call(), 'asked': task['input']['q']}\n"
    )
    bench.tree["harness"] = {"callable": "agent.py:solve", "preload": preload}
    _, attempt = await bench.one()
    assert attempt.outcome is Outcome.COMPLETED, attempt
    assert json.loads(attempt.stdout_tail) == {"said": "fine", "asked": "?"}


async def test_a_preloaded_harness_is_run_unchanged(bench: Bench) -> None:
    good(
        bench,
        "print(__name__, sys.argv[1:])",
        command="python agent.py {input.q} x",
        preload=["json", "model"],
    )
    _, attempt = await bench.one()
    assert attempt.stdout_tail == "fine\n__main__ ['?', 'x']\n"


# What can go wrong with a harness.


@pytest.mark.parametrize(
    ("harness", "says"),
    [
        ({}, "there is no harness"),
        ({"command": "no-such-agent --fast"}, "no program 'no-such-agent'"),
        ({"command": "./agent.sh"}, "'./agent.sh'.*is not executable"),
        ({"command": "./none"}, "no file"),
        ({"command": "python agent.py", "cwd": "none"}, "no folder"),
        ({"command": "python agent.py", "workspace": "none"}, "harness.workspace: no folder"),
        ({"callable": "none.py:f"}, "no file"),
        ({"callable": "agent.py"}, "not of the form"),
        ({"command": "sh agent.sh", "preload": ["json"]}, "remove harness.preload"),
        (
            {"command": "python agent.py", "preload": ["json"], "env": {"PYTHONHASHSEED": "{input.q}"}},
            "PYTHONHASHSEED",
        ),
    ],
)
def test_a_harness_that_cannot_start_is_found_before_the_first_rollout(
    bench: Bench, harness: dict[str, Any], says: str
) -> None:
    (bench.folder / "agent.sh").touch(mode=0o644)
    bench.agent("pass")
    bench.tree["harness"] = harness
    with pytest.raises(HarnessError, match=says):
        check_harness(bench.config())
    with pytest.raises(HarnessError):
        Runner(bench.store, bench.config(), bench.gateway.url)


def test_a_policy_for_an_unknown_outcome_or_a_broken_verifier_is_found_first(bench: Bench) -> None:
    good(bench)
    bench.tree["rewards"] = {"on_failure": {"crash": "zero"}}
    with pytest.raises(ConfigError, match=r"rewards\.on_failure\.crash"):
        check_harness(bench.config())
    bench.tree["rewards"] = {"verifier": "none.py:verify"}
    with pytest.raises(VerifierError, match="no file"):
        Runner(bench.store, bench.config(), bench.gateway.url)


async def test_a_preload_module_that_is_missing_stops_the_run(bench: Bench) -> None:
    good(bench, preload=["no_such_module"])
    with pytest.raises(HarnessError, match="no_such_module"):
        await Runner(bench.store, bench.config(), bench.gateway.url).run(asyncio.Event())


CLOSED_PORT = "http://127.0.0.1:1/v1"


@pytest.mark.parametrize(
    ("agent", "diagnosis", "says"),
    [
        ("pass", "no_calls", "ignores OPENAI_BASE_URL"),
        ("raise SystemExit(2)", "no_calls", "failed before its first call"),
        (f"call({CLOSED_PORT!r})", "wrong_url", "let it take its base URL from OPENAI_BASE_URL"),
        ("import no_such_sdk", "missing_import", "is not installed"),
        ("import time; time.sleep(1000)", "no_calls", "before its first call"),
    ],
)
async def test_an_agent_that_never_reaches_the_model_gets_a_diagnosis_and_no_reward(
    bench: Bench, agent: str, diagnosis: str, says: str
) -> None:
    good(bench)
    text = (bench.folder / "agent.py").read_text().replace("print(call())", agent)
    bench.agent(text, timeout_s=1.5)
    bench.verifier("return 1")
    rollout, attempt = await bench.one()
    assert (attempt.diagnosis, rollout.state, rollout.reward) == (diagnosis, RolloutState.FAILED, None)
    assert attempt.outcome in (Outcome.AGENT_ERROR, Outcome.TIMEOUT)
    assert says in attempt.detail and rollout.error_message == attempt.detail


async def test_refused_calls_are_named_with_the_refusal(bench: Bench) -> None:
    good(bench)
    bench.gateway.status = 403
    _, attempt = await bench.one()
    assert attempt.diagnosis == "calls_refused" and "no policy is called 'gpt-9'" in attempt.detail


async def test_an_agent_that_prints_nothing_is_as_good_as_any(bench: Bench) -> None:
    good(bench)
    bench.agent((bench.folder / "agent.py").read_text().replace("print(call())", "call()"))
    bench.verifier("return 1")
    rollout, attempt = await bench.one()
    assert rollout.reward == 1.0 and attempt.stdout_tail == ""


@pytest.mark.parametrize(("verify", "reward"), [("return 0.25", 0.25), ("return None", 0.0)])
async def test_an_agent_that_fails_gets_what_the_verifier_says_or_zero(
    bench: Bench, verify: str, reward: float
) -> None:
    good(bench, "raise ValueError('lost my way')")
    bench.verifier(verify)
    rollout, attempt = await bench.one()
    assert (rollout.state, rollout.outcome) == (RolloutState.SUCCEEDED, Outcome.AGENT_ERROR)
    assert rollout.reward == reward and attempt.exit_code == 1
    assert "ValueError: lost my way" in (rollout.error_message or "")


async def test_an_agent_that_hangs_after_a_call_gets_zero(bench: Bench) -> None:
    good(bench, "import time; time.sleep(1000)", timeout_s=1.5)
    bench.verifier("return 1")
    rollout, attempt = await bench.one()
    assert (rollout.outcome, rollout.reward) == (
        Outcome.TIMEOUT,
        0.0,
    ) and "time limit of 1.5 s" in attempt.detail


async def test_the_time_limit_of_a_rollout_goes_before_that_of_the_configuration(bench: Bench) -> None:
    good(bench, "import time; time.sleep(1000)")
    await bench.enqueue(config={"timeout_seconds": 1.0})
    [rollout] = await bench.run()
    assert rollout.outcome is Outcome.TIMEOUT


async def test_the_policy_of_an_outcome_can_be_replaced(bench: Bench) -> None:
    good(bench, "raise SystemExit(1)")
    bench.verifier("return 1", on_failure={"agent_error": "exclude"})
    rollout, _ = await bench.one()
    assert (rollout.state, rollout.reward) == (RolloutState.FAILED, None)


async def test_an_engine_failure_is_retried_then_excluded_and_never_a_reward(bench: Bench) -> None:
    good(bench)
    bench.gateway.status = 502
    bench.verifier("return 1")
    rollout, attempt = await bench.one()
    assert (rollout.state, rollout.outcome, rollout.reward) == (
        RolloutState.FAILED,
        Outcome.INFRA_ERROR,
        None,
    )
    assert len(bench.attempts()) == 3 and attempt.diagnosis == "engine_failed" and "502" in attempt.detail


async def test_a_retry_that_succeeds_counts(bench: Bench) -> None:
    flag = bench.folder / "second"
    good(bench)
    bench.verifier(
        f"import pathlib; p = pathlib.Path({str(flag)!r}); first = not p.exists(); p.touch(); return 1 / (not first)"
    )
    rollout, _ = await bench.one()
    assert rollout.reward == 1.0
    assert [(a.number, a.outcome) for a in bench.attempts()] == [
        (1, Outcome.ENV_ERROR),
        (2, Outcome.COMPLETED),
    ]


async def test_a_dead_gateway_is_not_the_agents_fault(bench: Bench) -> None:
    good(bench, max_attempts=1)
    bench.gateway.url = "http://127.0.0.1:1"
    rollout, attempt = await bench.one()
    assert rollout.outcome is Outcome.INFRA_ERROR and attempt.diagnosis == "gateway_down"


@pytest.mark.parametrize(
    "body", ["raise KeyError(1)", "return float('nan')", "return True", "import time; time.sleep(99)"]
)
async def test_a_verifier_that_fails_is_an_environment_error_and_never_reward_zero(bench: Bench, body: str) -> None:
    good(bench, max_attempts=2)
    bench.verifier(body, timeout_s=0.5)
    rollout, attempt = await bench.one()
    assert (rollout.state, rollout.outcome, rollout.reward) == (RolloutState.FAILED, Outcome.ENV_ERROR, None)
    assert attempt.diagnosis == "verifier_failed" and "verify.py:verify" in attempt.detail
    assert len(bench.attempts()) == 2


async def test_weights_that_do_not_fit_are_an_environment_error(bench: Bench) -> None:
    good(bench, max_attempts=1)
    bench.verifier("return {'correct': 1}", weights={"corect": 1.0})
    rollout, attempt = await bench.one()
    assert rollout.outcome is Outcome.ENV_ERROR and "rewards.weights.corect" in attempt.detail
    assert [r.name for r in bench.trace().rewards] == ["correct"]


async def test_no_reward_is_none_with_a_diagnosis(bench: Bench) -> None:
    good(bench)
    rollout, attempt = await bench.one()
    assert (rollout.state, rollout.reward) == (RolloutState.SUCCEEDED, None)
    assert attempt.diagnosis == "no_reward" and "rewards.verifier is not set" in attempt.detail


async def test_a_task_without_the_field_that_the_command_asks_for_never_starts(bench: Bench) -> None:
    good(bench, command="python agent.py {input.question}", max_attempts=1)
    rollout, attempt = await bench.one()
    assert rollout.outcome is Outcome.ENV_ERROR and attempt.diagnosis == "cannot_start"
    assert "has no 'question'; it has: q" in attempt.detail


async def test_a_rollout_that_asks_for_another_launcher_is_refused_by_name(bench: Bench) -> None:
    good(bench, max_attempts=1)
    await bench.enqueue(config={"timeout_seconds": 5, "k8s": {"job_template": "x"}})
    [rollout] = await bench.run()
    assert rollout.outcome is Outcome.ENV_ERROR and "config.k8s" in (rollout.error_message or "")


async def test_an_agent_that_prints_its_key_does_not_put_it_in_the_store(bench: Bench) -> None:
    good(bench, "import os; print(os.environ['OPENAI_API_KEY'])")
    _, attempt = await bench.one()
    assert attempt.stdout_tail == "fine\n[attempt key]\n"


# Leases.


async def test_a_stopped_runner_ends_its_harnesses_and_gives_the_rollouts_back(bench: Bench) -> None:
    good(bench, f"open({str(bench.folder / 'begun')!r}, 'w'); import time; time.sleep(1000) # stop-mark")
    await bench.enqueue()
    stop = asyncio.Event()
    running = asyncio.create_task(Runner(bench.store, bench.config(), bench.gateway.url).run(stop))
    await until((bench.folder / "begun").exists, "the harness begins")
    stop.set()
    await running
    [attempt] = bench.attempts()
    assert attempt.outcome is Outcome.CANCELLED and attempt.ended_at is not None
    assert bench.rollout().state is RolloutState.RUNNING
    assert alive(str(bench.folder / "agent.py")) == []
    good(bench)
    bench.verifier("return 1")
    [rollout] = await bench.run()
    assert rollout.reward == 1.0 and len(bench.attempts()) == 2


async def test_a_lost_lease_discards_the_result(bench: Bench) -> None:
    good(bench, f"open({str(bench.folder / 'begun')!r}, 'w'); import time; time.sleep(1000)")
    bench.verifier("return 1")
    await bench.enqueue()
    stop = asyncio.Event()
    running = asyncio.create_task(Runner(bench.store, bench.config(), bench.gateway.url, lease_s=1.0).run(stop))
    await until((bench.folder / "begun").exists, "the harness begins")
    later = time.time() + 100
    [taken] = await aio.write(bench.store, lambda conn: queue.lease(conn, bench.store, "other", 1, 100, later))
    await until(lambda: alive(str(bench.folder / "agent.py")) == [], "the harness is ended")
    stop.set()
    await running
    [attempt] = bench.attempts()
    assert attempt.outcome is Outcome.INFRA_ERROR and attempt.diagnosis == "lost_runner"
    assert bench.rollout().state is RolloutState.RUNNING and taken.id == "r0"


async def test_a_rollout_that_was_cancelled_meanwhile_stays_cancelled(bench: Bench) -> None:
    good(bench, f"open({str(bench.folder / 'begun')!r}, 'w'); import time; time.sleep(1000)")
    await bench.enqueue(run_id="run")
    stop = asyncio.Event()
    running = asyncio.create_task(Runner(bench.store, bench.config(), bench.gateway.url, lease_s=0.3).run(stop))
    await until((bench.folder / "begun").exists, "the harness begins")
    await aio.write(bench.store, lambda conn: queue.cancel_unfinished(conn, bench.store, "run", time.time()))
    await until(lambda: alive(str(bench.folder / "agent.py")) == [], "the harness is ended")
    stop.set()
    await running
    assert bench.rollout().outcome is Outcome.CANCELLED and len(bench.attempts()) == 1


async def test_a_rollout_that_keeps_killing_its_runners_is_given_up(bench: Bench) -> None:
    good(bench, max_attempts=2)
    await bench.enqueue()
    for number in range(2):
        owner, now = f"dead{number}", time.time() - 100 + 10 * number

        def lose(conn: Any, owner: str = owner, now: float = now) -> None:
            queue.lease(conn, bench.store, owner, 1, 1.0, now)
            queue.start_attempt(conn, bench.store, "r0", owner, now)

        await aio.write(bench.store, lose)
    [rollout] = await bench.run()
    assert rollout.outcome is Outcome.INFRA_ERROR and "lost in 2 attempts" in (rollout.error_message or "")


async def test_a_killed_runner_leaves_no_harness_and_another_takes_over(bench: Bench, tmp_path: Path) -> None:
    good(bench, f"open({str(bench.folder / 'begun')!r}, 'w'); import time; time.sleep(1000)")
    await bench.enqueue()
    runner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import asyncio, sys\n"
            "from pathlib import Path\n"
            "from leyden.base.config import from_tree\n"
            "from leyden.runner.lease import Runner\n"
            "from leyden.store import open_store\n"
            "folder, url = Path(sys.argv[1]), sys.argv[2]\n"
            "config = from_tree({'harness': {'command': 'python agent.py'}}, base_dir=folder)\n"
            "store = open_store(f'sqlite:///{folder}/leyden.db')\n"
            "asyncio.run(Runner(store, config, url, lease_s=1.0).run(asyncio.Event()))\n",
            str(bench.folder),
            bench.gateway.url,
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
    )
    try:
        await until((bench.folder / "begun").exists, "the harness begins")
    finally:
        runner.kill()
        runner.wait()
    await until(lambda: alive(str(bench.folder / "agent.py")) == [], "the harness is gone")
    good(bench)
    bench.verifier("return 1")
    [rollout] = await bench.run(lease_s=1.0)
    assert rollout.reward == 1.0
    assert [a.diagnosis for a in bench.attempts()] == ["lost_runner", None]
