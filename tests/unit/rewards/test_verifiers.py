"""Running verifiers in their own process."""

import asyncio
import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from leyden.base.config import Config, from_tree
from leyden.base.errors import VerifierError
from leyden.base.records import Attempt, Reward, Rollout, Span, Task, Trace
from leyden.rewards.verifiers import check_verifier, open_verifier, verifier_file

TASK = Task(id="t", domain="d", input={"q": 1}, answer={"a": 2})
TRACE = Trace(
    rollout=Rollout(id="r", task=TASK),
    attempt=Attempt(id="a", rollout_id="r", number=1, started_at=0.0),
    calls=(),
    spans=[Span(id="s", rollout_id="r", attempt_id="a", name="tool", kind="tool", attributes={"x": 1})],
    rewards=[Reward(name="x", value=1.0)],
)


def configure(tmp_path: Path, text: str, **rewards: Any) -> Config:
    (tmp_path / "verify.py").write_text(textwrap.dedent(text))
    return from_tree({"rewards": {"verifier": "verify.py:verify", **rewards}}, base_dir=tmp_path)


async def verify(config: Config, times: int = 1) -> Mapping[str, float] | None:
    pool = open_verifier(config, num_workers=1)
    assert pool is not None
    try:
        results = [await pool.verify(TASK, TRACE, config.base_dir) for _ in range(times)]
        return results[-1]
    finally:
        await pool.close()


async def test_a_callable_is_told_task_trace_and_workspace(tmp_path: Path) -> None:
    config = configure(
        tmp_path,
        """
        import helper_beside
        def verify(task, trace, workspace):
            print("this must not disturb the protocol")
            assert task == {"id": "t", "split": "train", "domain": "d", "input": {"q": 1}, "answer": {"a": 2}}
            assert trace["num_calls"] == 0 and trace["spans"][0]["name"] == "tool", trace
            assert (workspace / "verify.py").is_file()
            return {"correct": helper_beside.VALUE, "n": 3}
        """,
    )
    (tmp_path / "helper_beside.py").write_text("import numpy; VALUE = numpy.float32(0.5)")
    check_verifier(config)
    assert await verify(config) == {"correct": 0.5, "n": 3.0}
    assert verifier_file(config) == tmp_path / "verify.py"


@pytest.mark.parametrize(
    ("value", "expected"), [("0.5", {"reward": 0.5}), ("None", None), ("{}", None), ("1", {"reward": 1.0})]
)
async def test_one_number_is_the_component_reward_and_nothing_is_no_reward(
    tmp_path: Path, value: str, expected: Any
) -> None:
    assert await verify(configure(tmp_path, f"def verify(task, trace, workspace): return {value}")) == expected


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise KeyError('gone')", r"KeyError: 'gone' \(verify.py, line 1\)"),
        ("exit(3)", "SystemExit: 3"),
        ("return float('nan')", "'reward' is nan"),
        ("return {'a': float('inf')}", "'a' is inf"),
        ("return True", r"True \(bool\)"),
        ("return {'correct': False}", r"'correct' is False \(bool\)"),
        ("import numpy; return numpy.bool_(True)", r"True \(bool\)"),
        ("return '1.0'", r"'1.0' \(str\)"),
        ("return [1.0]", r"\[1.0\] \(list\) for 'reward'"),
        ("return {1: 1.0}", "names are strings"),
        ("import os; os._exit(5)", "died with exit code 5"),
        ("import time; time.sleep(1000)", "did not answer within 0.5 s and was ended"),
    ],
)
async def test_a_verifier_that_misbehaves_is_an_error_and_never_a_reward(tmp_path: Path, body: str, says: str) -> None:
    config = configure(tmp_path, f"def verify(task, trace, workspace): {body}", timeout_s=0.5)
    with pytest.raises(VerifierError, match=says):
        await verify(config)


async def test_a_hanging_worker_is_replaced_with_all_that_it_started(tmp_path: Path) -> None:
    config = configure(
        tmp_path,
        """
        import os, pathlib, subprocess, time
        def verify(task, trace, workspace):
            if not (workspace / "hung").exists():
                child = subprocess.Popen(["sleep", "1000"])
                (workspace / "hung").write_text(f"{os.getpid()} {child.pid}")
                time.sleep(1000)
            return 1.0
        """,
        timeout_s=1.0,
    )
    pool = open_verifier(config, num_workers=1)
    assert pool is not None
    try:
        with pytest.raises(VerifierError, match="within 1 s"):
            await pool.verify(TASK, TRACE, tmp_path)
        assert await pool.verify(TASK, TRACE, tmp_path) == {"reward": 1.0}
    finally:
        await pool.close()
    for pid in map(int, (tmp_path / "hung").read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_workers_persist_and_work_at_the_same_time(tmp_path: Path) -> None:
    config = configure(
        tmp_path,
        """
        import os, time
        def verify(task, trace, workspace):
            (workspace / f"here-{os.getpid()}").touch()
            while len(list(workspace.glob("here-*"))) < 2:
                time.sleep(0.01)
            return os.getpid()
        """,
    )
    pool = open_verifier(config, num_workers=2)
    assert pool is not None
    try:
        first = await asyncio.gather(*(pool.verify(TASK, TRACE, tmp_path) for _ in range(2)))
        second = [await pool.verify(TASK, TRACE, tmp_path) for _ in range(2)]
    finally:
        await pool.close()
    pids = {result["reward"] for result in first if result}
    assert len(pids) == 2 and all(result and result["reward"] in pids for result in second)


async def test_no_key_of_ours_reaches_a_verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEYDEN_ADMIN_KEY", "LEYDEN_ATTEMPT", "AGL_KEY", "ENGINE_KEY"):
        monkeypatch.setenv(name, "secret")
    (tmp_path / "verify.py").write_text(
        "import os\ndef verify(task, trace, workspace): return float('secret' in os.environ.values())"
    )
    tree = {
        "rewards": {"verifier": "verify.py:verify"},
        "policies": {"main": {"engine_key_env": "ENGINE_KEY"}},
    }
    assert await verify(from_tree(tree, base_dir=tmp_path)) == {"reward": 0.0}


async def test_a_cancelled_verification_leaves_no_process(tmp_path: Path) -> None:
    config = configure(
        tmp_path,
        """
        import os, time
        def verify(task, trace, workspace):
            (workspace / "pid").write_text(str(os.getpid()))
            time.sleep(1000)
        """,
    )
    pool = open_verifier(config, num_workers=1)
    assert pool is not None
    task = asyncio.create_task(pool.verify(TASK, TRACE, tmp_path))
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await pool.close()
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def command(tmp_path: Path, text: str, **rewards: Any) -> Config:
    (tmp_path / "check.py").write_text(textwrap.dedent(text))
    return from_tree({"rewards": {"verifier": "python check.py", **rewards}}, base_dir=tmp_path)


async def test_a_command_reads_one_object_and_prints_one(tmp_path: Path) -> None:
    config = command(
        tmp_path,
        """
        import json, sys
        request = json.load(sys.stdin)
        assert set(request) == {"task", "trace", "workspace"}
        print(json.dumps({"correct": request["task"]["answer"]["a"]}))
        """,
    )
    check_verifier(config)
    assert await verify(config, times=2) == {"correct": 2.0}
    assert verifier_file(config) == tmp_path / "check.py"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("print('all good!')", "it printed 'all good!.n', which is not one JSON object"),
        ("pass", "it printed '', which is not"),
        ("print('{} {}')", "is not one JSON object"),
        ("print('NaN')", "'reward' is nan"),
        ("print('true')", "True .bool"),
        ("import sys; sys.exit('no database')", "exit code 1: no database"),
        ("while True: print('x' * 65536)", "printed more than"),
        ("import time; time.sleep(1000)", "did not answer within 1 s"),
    ],
)
async def test_a_command_that_misbehaves_is_an_error(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(VerifierError, match=says):
        await verify(command(tmp_path, text, timeout_s=1.0))


@pytest.mark.parametrize(
    ("verifier", "says"),
    [
        ("none.py:verify", "no file"),
        ("verify.py:absent", "has no function 'absent'; it has: verify, narrow"),
        ("verify.py:narrow", r"narrow\(task\) must take"),
        ("broken.py:verify", "SyntaxError"),
        ("dying.py:verify", "died while it started"),
        ("no-such-program x", "no program 'no-such-program'"),
        ("echo {input.q}", "the task comes on standard input"),
    ],
)
def test_a_verifier_that_cannot_be_loaded_is_found_before_the_run(tmp_path: Path, verifier: str, says: str) -> None:
    configure(tmp_path, "def verify(task, trace, workspace): pass\ndef narrow(task): pass")
    (tmp_path / "broken.py").write_text("def verify(")
    (tmp_path / "dying.py").write_text("import os; os._exit(1)")
    with pytest.raises(VerifierError, match=says):
        check_verifier(from_tree({"rewards": {"verifier": verifier}}, base_dir=tmp_path))


def test_no_verifier_is_fine_and_none(tmp_path: Path) -> None:
    config = from_tree({}, base_dir=tmp_path)
    check_verifier(config)
    assert open_verifier(config, num_workers=1) is None and verifier_file(config) is None and os.name == "posix"
