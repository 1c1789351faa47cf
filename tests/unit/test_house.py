"""The rules of the house that a machine can check: names, sizes, docstrings, imports, versions."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import leyden
from leyden.base import config, errors

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "leyden"
FOLDERS = ("src", "tests", "examples", "scripts", "benchmarks")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
OURS = sorted(SRC.rglob("*.py"))

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
VAGUE = re.compile(r"(utils?|common|helpers?|managers?|misc)")

LONG_FILES = {
    "base/config.py": "declarations: every key with its docstring, read like a table",
    "base/records.py": "declarations: every record with its docstrings, read like a table",
    "loop.py": "a whole run is read top to bottom in one file",
}
"""Files of the package above 400 lines, and why. A file that shrinks has to leave the list."""

LONG_FUNCTIONS = {
    "cli/verbs/inspect.py:_show": "one rollout printed from top to bottom, a line of output per line",
    "cli/wiring.py:open_house": "what is opened in order is closed in the reverse order, in one place",
    "release/gate.py:compare": "a third is the docstring, a third one record with a field per line",
    "store/migrations/versions/0001_first.py:upgrade": "a frozen migration: the tables as they were then",
}
"""Functions of the package above 50 lines, and why. A function that shrinks has to leave the list."""

LIGHT = (
    "leyden",
    "leyden.base.config",
    "leyden.base.records",
    "leyden.base.stats",
    "leyden.store",
    "leyden.traces.recorder",
    "leyden.traces.reader",
    "leyden.traces.assemble",
    "leyden.rewards.verifiers",
    "leyden.gateway",
    "leyden.runner.lease",
    "leyden.release.gate",
    "leyden.learning.batch",
    "leyden.learning.schedule",
    "leyden.learning.algorithms",
    "leyden.learning.explain",
    "leyden.loop",
    "leyden.cli.main",
    "leyden.cli.wiring",
    "leyden.cli.report",
    "leyden.client",
    "leyden.testing.fake_engine",
)
"""Modules that must work in an installation without the extra `train`."""
BLOCKER = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "peft", "safetensors", "ray", "verl", "vllm"):
            raise ModuleNotFoundError(f"{name} is blocked here", name=name)
sys.meta_path.insert(0, Block())
"""


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        name = getattr(node, "name", "")
        inner = (
            f"{prefix}{name}." if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else prefix
        )
        yield from functions(node, inner)


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env=env,
        cwd=ROOT,
        check=False,
    )


def test_no_file_has_a_name_that_says_nothing() -> None:
    vague = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        for part in path.relative_to(ROOT).parts
        if VAGUE.fullmatch(Path(part).stem)
    ]
    assert vague == []


def test_long_files_are_those_of_the_list() -> None:
    long = {}
    for path in OURS:
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > MAX_FILE_LINES:
            long[str(path.relative_to(SRC))] = lines
    assert set(long) - set(LONG_FILES) == set(), f"split them, or give a reason here: {long}"
    assert set(LONG_FILES) - set(long) == set(), "these are short now: take them out of the list"
    assert all(LONG_FILES.values())


def test_long_functions_are_those_of_the_list() -> None:
    long = {}
    for path in OURS:
        for name, node in functions(tree_of(path)):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                long[f"{path.relative_to(SRC)}:{name}"] = lines
    assert set(long) - set(LONG_FUNCTIONS) == set(), f"split them, or give a reason here: {long}"
    assert set(LONG_FUNCTIONS) - set(long) == set(), "these are short now: take them out of the list"
    assert all(LONG_FUNCTIONS.values())


def test_every_error_class_stands_in_the_drawing_of_its_module() -> None:
    assert errors.__doc__ is not None
    drawn: dict[str, int] = {}
    for line in errors.__doc__.splitlines():
        match = re.match(r"^    ([| ]*)(?:\+- )?(\w+)", line)
        if match and match[2].endswith(
            (
                "Error",
                "Refused",
                "Found",
                "Conflict",
                "New",
                "Unusable",
                "Unreachable",
                "Incapable",
                "Interrupted",
            )
        ):
            drawn[match[2]] = len(match[1]) // 3 + ("+-" in line)
    classes = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    assert set(drawn) == set(classes)
    for name, depth in drawn.items():
        ours = [base for base in classes[name].__mro__ if issubclass(base, errors.LeydenError)]
        assert len(ours) == depth + 1, f"{name} is drawn at another depth than it has"
        line = next(line for line in errors.__doc__.splitlines() if re.search(rf"\b{name}\b", line))
        marked = "(ValueError)" in line
        assert issubclass(classes[name], ValueError) == marked, f"{name} and its mark in the drawing"


@pytest.mark.parametrize("name", ["base/records.py", "base/config.py"])
def test_a_string_stands_after_every_field_of_a_record(name: str) -> None:
    missing = []
    for node in ast.walk(tree_of(SRC / name)):
        if not isinstance(node, ast.ClassDef):
            continue
        for number, part in enumerate(node.body):
            if not isinstance(part, ast.AnnAssign):
                continue
            after = node.body[number + 1] if number + 1 < len(node.body) else None
            said = (
                isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            )
            if not said:
                missing.append(f"{node.name}.{ast.unparse(part.target)}")
    assert missing == []


def test_every_module_says_what_it_promises() -> None:
    silent = [str(path.relative_to(SRC)) for path in OURS if len(ast.get_docstring(tree_of(path)) or "") < 12]
    assert silent == []


def test_sources_are_ascii() -> None:
    scripts = [
        *(ROOT / "scripts").glob("*.sh"),
        *SRC.rglob("*.toml"),
        *SRC.rglob("*.css"),
        *(ROOT / "examples").rglob("*.toml"),
    ]
    foreign = [str(path.relative_to(ROOT)) for path in [*SOURCES, *scripts] if not path.read_bytes().isascii()]
    assert foreign == []


def test_nothing_waits_in_a_way_that_can_lose_a_cancellation() -> None:
    # In Python 3.11 `asyncio.wait_for` gives the result if it comes together with the cancellation.
    found = [str(path) for path in OURS if "asyncio.wait_for(" in path.read_text(encoding="utf-8")]
    assert found == [], "use `async with asyncio.timeout(...)`"


def test_the_light_rooms_need_no_torch() -> None:
    done = run_python(BLOCKER + f"import importlib\nfor name in {LIGHT!r}: importlib.import_module(name)")
    assert done.returncode == 0, done.stderr


def test_the_help_of_the_command_needs_no_torch() -> None:
    code = BLOCKER + "from leyden.cli.main import main; sys.argv = ['leyden', *sys.argv[1:]]; main()"
    for arguments in ((), ("train",)):
        done = run_python(code, *arguments, "--help")
        assert done.returncode == 0, done.stderr
        assert "Usage" in done.stdout


def test_imports_point_down() -> None:
    if importlib.util.find_spec("importlinter") is None:
        pytest.fail("import-linter is not installed; it is part of the extra `dev`")
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = run_python(program, "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_toml_of_the_repository_is_read_by_what_it_is_for() -> None:
    found = [
        *(ROOT / "examples").rglob("*.toml"),
        *SRC.rglob("*.toml"),
        *(ROOT / "benchmarks").rglob("*.toml"),
    ]
    assert len(found) >= 3
    for path in found:
        config.load(path)
    tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    top = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert top is not None
    assert top[1] == leyden.__version__
