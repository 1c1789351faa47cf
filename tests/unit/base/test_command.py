"""Reading command lines."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.base.command import clean_environment, fill, parse_command
from leyden.base.config import from_tree
from leyden.base.errors import HarnessError


def words(template: str, folder: Path, **task_input: Any) -> list[str]:
    return parse_command(template, folder).argv(task_input)


def test_python_is_the_interpreter_and_a_file_becomes_absolute(tmp_path: Path) -> None:
    (tmp_path / "agent.py").touch()
    (tmp_path / "data").mkdir()
    assert words("python agent.py --n 3 data ./data --file=agent.py none.py", tmp_path) == [
        sys.executable,
        str(tmp_path / "agent.py"),
        *("--n", "3"),
        "data",
        str(tmp_path / "data"),
        f"--file={tmp_path / 'agent.py'}",
        "none.py",
    ]


def test_a_field_is_one_word_whatever_it_contains(tmp_path: Path) -> None:
    nasty = "a b; $(rm -rf x) 'q' \"r\" \\ \n"
    assert words("echo {input.q} x{input.a.b}y '{input.q}'", tmp_path, q=nasty, a={"b": [1, "\u00fc"]})[1:] == [
        nasty,
        'x[1, "\u00fc"]y',
        nasty,
    ]


def test_a_word_from_a_task_is_never_taken_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "agent.py").touch()
    assert words("echo {input.q}", tmp_path, q="agent.py")[1] == "agent.py"


@given(value=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20))
def test_a_field_survives_a_shell_unchanged(value: str) -> None:
    argv = words("printf %s {input.q} | cat", Path("/"), q=value)
    assert argv[:2] == ["/bin/sh", "-c"]
    assert shlex.split(argv[2])[2] == value


def test_a_shell_line_runs_with_its_files_and_python_resolved(tmp_path: Path) -> None:
    (tmp_path / "say it.py").write_text("print('said')")
    (tmp_path / "say.py").write_text("import sys; print('said', sys.executable, sys.argv[1:])")
    argv = words("X=1 python say.py {input.q} 'say.py' \"python\" && echo python $X", tmp_path, q="a 'b'")
    out = subprocess.run(argv, capture_output=True, text=True, check=True, cwd="/").stdout
    assert out == f"said {sys.executable} [\"a 'b'\", 'say.py', 'python']\npython\n"


def test_characters_of_a_shell_inside_single_quotes_need_no_shell(tmp_path: Path) -> None:
    assert words("echo 'a|b'", tmp_path)[1:] == ["a|b"]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("", "is empty"),
        ("no-such-program-here x", "no program 'no-such-program-here' on PATH"),
        ("./missing.sh", "no file"),
        ("./plain.sh", "is not executable; run `chmod"),
        ("./plain.py", "write `python ./plain.py`"),
        ("echo 'unfinished", "cannot be split into words"),
        ("{input.program} x", "cannot come from the task"),
        ('echo "{input.q}" | cat', "take the quotes away"),
    ],
)
def test_a_command_that_cannot_start_is_refused_by_name(tmp_path: Path, template: str, says: str) -> None:
    (tmp_path / "plain.sh").touch(mode=0o644)
    (tmp_path / "plain.py").touch(mode=0o644)
    with pytest.raises(HarnessError) as caught:
        parse_command(template, tmp_path)
    assert says in str(caught.value) and (template in str(caught.value) or not template)


def test_a_program_beside_the_configuration_is_found(tmp_path: Path) -> None:
    (tmp_path / "run-agent").touch(mode=0o755)
    assert words("run-agent", tmp_path) == words("./run-agent", tmp_path) == [str(tmp_path / "run-agent")]


def test_a_missing_field_is_named_with_the_known_ones() -> None:
    with pytest.raises(HarnessError, match=r"\{input.question\}.*it has: q, r"):
        fill("{input.question}", {"q": 1, "r": 2}, "x")


def test_our_keys_are_not_passed_on(tmp_path: Path) -> None:
    config = from_tree(
        {"gateway": {"admin_key_env": "ADMIN"}, "policies": {"main": {"engine_key_env": "ENGINE"}}},
        base_dir=tmp_path,
    )
    environ = {"ADMIN": "1", "ENGINE": "2", "LEYDEN_X": "3", "AGL_KEY": "4", "HOME": "5", "PATH": os.defpath}
    assert clean_environment(config, environ) == {"HOME": "5", "PATH": os.defpath}
