"""What every launcher promises, over every launcher."""

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from leyden.base.errors import HarnessError
from leyden.runner.base import LaunchSpec
from leyden.runner.local import LocalLauncher

ENV = {"PATH": os.environ["PATH"], "MARK": "leyden-test-mark"}
Script = Callable[[str], Path]


@pytest.fixture(params=["plain", "preloaded"])
async def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LocalLauncher]:
    preload = ["json"] if request.param == "preloaded" else []
    launcher = LocalLauncher(preload=preload, path=[str(tmp_path)] if preload else [], term_grace_s=0.3)
    yield launcher
    await launcher.close()


@pytest.fixture
def script(tmp_path: Path) -> Script:
    def write(text: str) -> Path:
        path = tmp_path / "agent.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write


def spec(path: Path, *args: str, **changes: Any) -> LaunchSpec:
    fields: dict[str, Any] = {
        "argv": [sys.executable, str(path), *args],
        "cwd": path.parent,
        "env": ENV,
        "timeout_s": 30.0,
    }
    return LaunchSpec(**{**fields, **changes})


def alive(mark: str) -> list[int]:
    """Processes whose command line holds `mark`."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if mark in " ".join(process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"10 s passed without: {what}")


async def test_a_program_sees_what_a_plain_python_would_show_it(launcher: LocalLauncher, script: Script) -> None:
    path = script("""
        import json, os, sys
        print(json.dumps([sys.argv, __name__, __file__, sys.path, os.getcwd(), dict(os.environ),
                          sys.stdin.read(), os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid(),
                          sys.modules["__main__"].__dict__ is globals(), __spec__ is None, __package__]))
        print("to stderr", file=sys.stderr)
    """)
    finished = await launcher.launch(spec(path, "a b", "--c"))
    plain = subprocess.run(
        [sys.executable, str(path), "a b", "--c"], env=ENV, cwd=path.parent, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, start_new_session=True, check=True,
    )  # fmt: skip
    assert finished.stdout_tail == plain.stdout
    assert finished.stderr_tail == "to stderr\n"
    assert (finished.exit_code, finished.timed_out, finished.fault, finished.num_survivors) == (
        0,
        False,
        "",
        0,
    )
    assert finished.cpu_s > 0 and finished.duration_s > 0


@pytest.mark.parametrize(
    ("text", "exit_code", "stderr"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('said why')", 1, "said why"),
        ("import os; os._exit(7)", 7, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("raise KeyboardInterrupt", -2, None),
        ("def f():\n    raise ValueError('broken')\nf()", 1, "ValueError: broken"),
        ("def f(:", 1, "SyntaxError"),
        ("import no_such_module_here", 1, "ModuleNotFoundError"),
    ],
)
async def test_exit_codes_and_tracebacks_are_those_of_python(
    launcher: LocalLauncher, script: Script, text: str, exit_code: int, stderr: str | None
) -> None:
    path = script(text)
    finished = await launcher.launch(spec(path))
    assert finished.exit_code == exit_code
    if stderr is not None:
        assert stderr in finished.stderr_tail
        assert "forkserver" not in finished.stderr_tail


async def test_threads_and_exit_hooks_end_before_the_process(launcher: LocalLauncher, script: Script) -> None:
    path = script("""
        import atexit, sys, threading, time
        out = open("kept.txt", "w")
        out.write("buffered")
        atexit.register(lambda: print("hook"))
        threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
        sys.stdout.write("main ")
    """)
    finished = await launcher.launch(spec(path))
    assert finished.stdout_tail == "main thread\nhook\n"
    assert (path.parent / "kept.txt").read_text() == "buffered"


async def test_random_numbers_differ_between_attempts(launcher: LocalLauncher, script: Script) -> None:
    path = script("import random, uuid; print(random.random(), uuid.uuid4())")
    first, second = await asyncio.gather(launcher.launch(spec(path)), launcher.launch(spec(path)))
    assert first.stdout_tail != second.stdout_tail


async def test_the_time_limit_ends_the_whole_group(launcher: LocalLauncher, script: Script) -> None:
    path = script("""
        import subprocess, sys, time
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", "limit-mark"])
        print("begun", flush=True)
        time.sleep(1000)
    """)
    finished = await launcher.launch(spec(path, timeout_s=1.0))
    assert finished.timed_out and finished.exit_code == -15 and finished.stdout_tail == "begun\n"
    assert alive("limit-mark") == []


async def test_a_harness_that_ignores_the_friendly_signal_is_killed(launcher: LocalLauncher, script: Script) -> None:
    path = script("""
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1000)
    """)
    finished = await launcher.launch(spec(path, timeout_s=1.0))
    assert finished.timed_out and finished.exit_code == -9


@pytest.mark.parametrize("way", ["child", "setsid", "daemon", "clean environment"])
async def test_what_outlives_the_harness_is_killed(launcher: LocalLauncher, script: Script, way: str) -> None:
    path = script("""
        import os, subprocess, sys
        way = sys.argv[1]
        sleep = [sys.executable, "-c", "import time; time.sleep(1000)", "outlive-mark"]
        if way == "child":
            subprocess.Popen(sleep)
        elif way == "setsid":
            subprocess.Popen(sleep, start_new_session=True)
        elif way == "clean environment":
            subprocess.Popen(sleep, start_new_session=True, env={}, stdout=-3, stderr=-3)
        elif os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for fd in range(3):
                    os.close(fd)
                os.execv(sleep[0], sleep)
            os._exit(0)
        else:
            os.wait()
    """)
    finished = await launcher.launch(spec(path, way))
    assert finished.exit_code == 0, finished.stderr_tail
    assert finished.num_survivors == 1
    assert alive("outlive-mark") == []


async def test_what_a_running_harness_started_lives_as_long_as_it(launcher: LocalLauncher, script: Script) -> None:
    path = script("""
        import os, subprocess, sys, time
        subprocess.Popen("setsid sleep 1000 & setsid sleep 1000 &", shell=True).wait()
        deadline = time.time() + 20
        while not os.path.exists("go") and time.time() < deadline:
            time.sleep(0.01)
        print(open(f"/proc/self/task/{os.getpid()}/children").read().count(" "))
    """)
    running = asyncio.create_task(launcher.launch(spec(path)))
    quick = path.with_name("quick.py")
    quick.write_text("import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)")
    for _ in range(3):
        assert (await launcher.launch(spec(quick))).num_survivors == 1
    (path.parent / "go").touch()
    finished = await running
    assert finished.stdout_tail == "2\n" and finished.num_survivors == 2


async def test_a_flood_of_output_leaves_a_tail_and_no_memory(launcher: LocalLauncher, script: Script) -> None:
    path = script("""
        import os
        block = b"x" * 65535 + b"\\n"
        for _ in range(1600):
            os.write(1, block)
        os.write(1, b"the end")
    """)
    await launcher.start()
    before = psutil.Process().memory_info().rss
    finished = await launcher.launch(spec(path, output_bytes=4096, timeout_s=60.0))
    grown = psutil.Process().memory_info().rss - before
    assert finished.num_stdout_bytes == 1600 * 65536 + 7
    assert finished.stdout_tail.endswith("\nthe end") and len(finished.stdout_tail) == 4096
    assert grown < 16 << 20


async def test_bytes_that_are_no_text_are_shown_not_raised(launcher: LocalLauncher, script: Script) -> None:
    finished = await launcher.launch(spec(script("import os; os.write(1, b'a\\xff\\x00b')")))
    assert finished.stdout_tail == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b"


async def test_the_memory_limit_holds(launcher: LocalLauncher, script: Script) -> None:
    path = script("x = bytearray(1 << 30); print(len(x))")
    finished = await launcher.launch(spec(path, memory_bytes=512 << 20))
    assert finished.exit_code == 1 and "MemoryError" in finished.stderr_tail


async def test_cancelling_ends_the_harness_first(launcher: LocalLauncher, script: Script) -> None:
    path = script("""
        import subprocess, sys, time
        subprocess.Popen(["setsid", sys.executable, "-c", "import time; time.sleep(1000)", "cancel-mark"])
        open("begun", "w")
        time.sleep(1000)
    """)
    task = asyncio.create_task(launcher.launch(spec(path)))
    await until((path.parent / "begun").exists, "the harness begins")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert alive("cancel-mark") == []


async def test_cancelling_before_the_start_leaves_nothing(launcher: LocalLauncher, script: Script) -> None:
    path = script("import time; time.sleep(1000)")
    await launcher.start()
    for wait_s in (0.0, 0.001, 0.005):
        task = asyncio.create_task(launcher.launch(spec(path, "early-mark")))
        await asyncio.sleep(wait_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await until(lambda: alive("early-mark") == [], "no harness is left")


async def test_many_harnesses_run_at_once(launcher: LocalLauncher, script: Script) -> None:
    path = script("import sys; print(sys.argv[1])")
    results = await asyncio.gather(*(launcher.launch(spec(path, str(i))) for i in range(20)))
    assert [finished.stdout_tail for finished in results] == [f"{i}\n" for i in range(20)]


async def test_closing_ends_what_still_runs(launcher: LocalLauncher, script: Script) -> None:
    path = script("import time; open('begun', 'w'); time.sleep(1000)")
    task = asyncio.create_task(launcher.launch(spec(path, "close-mark")))
    await until((path.parent / "begun").exists, "the harness begins")
    await launcher.close()
    assert (await task).fault
    assert alive("close-mark") == []


async def test_a_lost_server_is_a_fault_of_ours_and_is_replaced(launcher: LocalLauncher, script: Script) -> None:
    path = script("import time; open('begun', 'w'); time.sleep(1000)")
    task = asyncio.create_task(launcher.launch(spec(path, "lost-mark")))
    await until((path.parent / "begun").exists, "the harness begins")
    [server] = [c for c in psutil.Process().children() if "forkserver.py" in " ".join(c.cmdline())]
    server.kill()
    finished = await task
    assert "died with exit code -9" in finished.fault and finished.exit_code is None
    await until(lambda: alive("lost-mark") == [], "the kernel ends the orphan")
    assert (await launcher.launch(spec(script("print('again')")))).stdout_tail == "again\n"


async def test_a_program_that_cannot_be_executed_is_a_harness_error(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    (tmp_path / "not-a-program").write_bytes(b"\x7fELF nonsense")
    (tmp_path / "not-a-program").chmod(0o755)
    try:
        for program, says in (
            (tmp_path / "none", "FileNotFoundError"),
            (tmp_path / "not-a-program", "OSError"),
        ):
            with pytest.raises(HarnessError, match=says):
                await launcher.launch(LaunchSpec(argv=[str(program)], cwd=tmp_path, env=ENV, timeout_s=5))
        with pytest.raises(HarnessError, match="Argument list too long"):
            argv = [sys.executable, "x" * (1 << 18)]
            await launcher.launch(LaunchSpec(argv=argv, cwd=tmp_path, env=ENV, timeout_s=5))
    finally:
        await launcher.close()


async def test_a_preload_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(HarnessError, match=r"importing 'no_such_module' failed: ModuleNotFoundError"):
        await LocalLauncher(preload=["no_such_module"]).start()


async def test_a_preload_module_that_starts_threads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    )
    with pytest.raises(HarnessError, match="starts threads"):
        await LocalLauncher(preload=["threaded"], path=[str(tmp_path)]).start()


async def test_a_killed_runner_leaves_no_harness(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "import subprocess, time\n"
        "subprocess.Popen(['setsid', 'sh', '-c', 'sleep 1000 # killed-mark'])\n"
        "open('begun', 'w')\ntime.sleep(1000)\n"
    )
    runner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import asyncio, sys\n"
            "from pathlib import Path\n"
            "from leyden.runner.local import LocalLauncher\n"
            "from leyden.runner.base import LaunchSpec\n"
            "folder = Path(sys.argv[1])\n"
            "spec = LaunchSpec(argv=[sys.executable, str(folder / 'agent.py'), 'killed-mark'], cwd=folder,\n"
            "                  env={'PATH': '/usr/bin:/bin'}, timeout_s=100)\n"
            "asyncio.run(LocalLauncher().launch(spec))\n",
            str(tmp_path),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        await until((tmp_path / "begun").exists, "the harness begins")
        await until(lambda: len(alive("killed-mark")) >= 2, "its child begins")
    finally:
        runner.kill()
        runner.wait()
    await until(lambda: alive("killed-mark") == [], "everything is gone")
