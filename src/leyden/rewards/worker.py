"""The process in which a verifier runs; started by `leyden.rewards.verifiers`. Light, as `leyden.base.command` is,
but for built-in verifiers.

    worker.py callable FILE FUNCTION [--check]     worker.py command WORD...
    worker.py builtin VERIFIER SETTINGS FOLDER [--check]

One JSON object per line on standard input, one per line back: `{"value": ...}` or `{"error": ...}`; the first
line back is `{"ready": true}` or `{"error": ...}`. What the verifier prints goes to standard error.
"""

import contextlib
import ctypes
import inspect
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from leyden.base import command

MAX_OUTPUT_BYTES = 1 << 20
"""A command that prints more than this does not print one JSON object."""
PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Serve until standard input ends."""
    _die_with_parent()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # Last, and only for a checkout that is not installed: the library is imported from where this file lies.
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    try:
        verify: Callable[[dict[str, Any]], Any]
        if argv[1] == "callable":
            function = _load(argv[2], argv[3])
            verify = lambda request: function(  # noqa: E731 - one line says it
                request["task"], request["trace"], Path(request["workspace"])
            )
        elif argv[1] == "builtin":
            verify = _builtin(argv[2], argv[3], argv[4])
        else:
            verify = lambda request: _command(argv[2:], request)  # noqa: E731
    except BaseException as error:  # noqa: BLE001 - whatever loading raises is the answer
        _reply(replies, {"error": _last_line(error)})
        return 1
    _reply(replies, {"ready": True})
    if argv[-1] == "--check":
        return 0
    # Not sys.stdin: the verifier may read it, and must then find nothing.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for line in requests:
        try:
            reply = {"value": _plain(verify(json.loads(line)))}
            text = json.dumps(reply)
        except BaseException as error:  # noqa: BLE001 - also SystemExit: a verifier that exits has failed
            text = json.dumps({"error": _last_line(error)})
        replies.write(text + "\n")
        replies.flush()
    return 0


def _load(file: str, name: str) -> Callable[..., Any]:
    verify: Callable[..., Any] = command.load_named(file, name)
    try:
        inspect.signature(verify).bind(None, None, None)
    except TypeError:
        raise ImportError(f"{name}{inspect.signature(verify)} must take (task, trace, workspace)") from None
    return verify


def _builtin(name: str, settings: str, folder: str) -> Callable[[dict[str, Any]], Any]:
    from leyden.rewards import library

    function = library.make(name, json.loads(settings), Path(folder))
    return lambda request: function(request["task"], request["trace"], Path(request["workspace"]))


def _command(argv: list[str], request: dict[str, Any]) -> Any:
    with tempfile.TemporaryFile() as stdin:
        stdin.write(json.dumps(request).encode())
        stdin.seek(0)
        process = subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=request["workspace"],
            preexec_fn=_die_with_parent,  # safe: this process has one thread
        )
    try:
        stdout, stderr = _outputs(process)
        code = process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
    if code != 0:
        last = stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it wrote nothing to standard error"]
        raise RuntimeError(f"it ended with exit code {code}: {last[0][:500]}")
    try:
        value = json.loads(stdout)
    except ValueError:
        raise ValueError(
            f"it printed {stdout[:200].decode(errors='replace')!r}, which is not one JSON object"
        ) from None
    return value


def _outputs(process: "subprocess.Popen[bytes]") -> tuple[bytes, bytes]:
    """Standard output, refused when too long, and the tail of standard error."""
    assert process.stdout is not None and process.stderr is not None
    stdout, stderr = bytearray(), bytearray()
    with selectors.DefaultSelector() as ready, process.stdout, process.stderr:
        ready.register(process.stdout, selectors.EVENT_READ, stdout)
        ready.register(process.stderr, selectors.EVENT_READ, stderr)
        while ready.get_map():
            for key, _ in ready.select():
                data = os.read(key.fd, 65536)
                if not data:
                    ready.unregister(key.fileobj)
                key.data.extend(data)
            if len(stdout) > MAX_OUTPUT_BYTES:
                raise ValueError(f"it printed more than {MAX_OUTPUT_BYTES} bytes, which is not one JSON object")
            del stderr[:-65536]
    return bytes(stdout), bytes(stderr)


def _plain(value: Any) -> Any:
    """`value` with numpy scalars as Python ones; refuses what is no number, mapping of names, or None."""
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"it returned a component named {name!r}; names are strings")
        return {name: _steps(item) if name == "calls" else _number(name, item) for name, item in value.items()}
    return value if value is None else _number("reward", value)


def _steps(value: Any) -> Any:
    """`{call id: {component: number}}`, the rewards of single calls."""
    if not isinstance(value, dict) or not all(isinstance(k, str) and isinstance(v, dict) for k, v in value.items()):
        raise TypeError(f"it returned {value!r} for 'calls'; give {{call id: {{component: number}}}}")
    return {call: {name: _number(f"{call}.{name}", item) for name, item in of.items()} for call, of in value.items()}


def _number(name: str, value: Any) -> Any:
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, int | float | str):
        raise TypeError(
            f"it returned {value!r} ({type(value).__name__}) for {name!r}; "
            "return a number, or a dict of component names and numbers"
        )
    return value


def _last_line(error: BaseException) -> str:
    """`ValueError: ... (verify.py, line 3)`, the innermost place in the verifier's own code."""
    text = traceback.format_exception_only(error)[-1].strip()[:1000]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in (__file__, command.__file__)]
    frames = [f for f in frames if not f.filename.startswith("<frozen")]
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text


def _reply(replies: IO[str], message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
