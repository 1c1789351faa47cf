"""The docs against the code: what they name exists, and what exists is named.

Scripts/docs.py makes two pages from the code; the others are written by hand and compared here.
"""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from leyden.base import config, errors
from leyden.base.records import Drop, Outcome, Provenance
from leyden.cli.main import VERBS
from leyden.store.schema import metadata
from leyden.traces.tokens import Refusal

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "leyden"
PAGES = sorted((ROOT / "docs").glob("*.md"))
README = ROOT / "README.md"
WRITTEN = [*PAGES, *([README] if README.exists() else [])]
TEXT = {page.name: page.read_text(encoding="utf-8") for page in WRITTEN}

NOT_LOADED = "<!-- not loaded -->"
"""Stands on the line before a toml block that is no whole configuration, with the reason after it."""
FENCE = re.compile(r"^(?P<before>[^\n]*\n)?```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"leyden ([a-z]+)((?: [^\n`]*)?)")
DIAGNOSIS = re.compile(r'diagnosis="(\w+)"|return \(?\s*"(\w+)",\s|replace\(ending, .*diagnosis="(\w+)"')


@pytest.fixture(scope="module")
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("leyden_docs", ROOT / "scripts" / "docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def named(page: str) -> set[str]:
    """Everything that stands in code spans of a page."""
    return set(re.findall(r"`([^`\n]+)`", TEXT[page]))


def diagnoses() -> set[str]:
    """Every short name that the runner and the queue give to a likely fault of the set-up."""
    found = {"lost_runner"}
    assert '"lost_runner"' in (SRC / "store" / "queue.py").read_text(encoding="utf-8")
    for name in ("outcome.py", "attempt.py"):
        text = (SRC / "runner" / name).read_text(encoding="utf-8")
        found |= {word for match in DIAGNOSIS.findall(text) for word in match if word}
    return found


def anchors(text: str) -> set[str]:
    """Fragments that headings can be linked by, as code hosts make them."""
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_made_pages_are_up_to_date(made: ModuleType) -> None:
    assert made.stale() == [], "run: python scripts/docs.py"


def test_every_verb_has_a_section_and_every_option_a_row(made: ModuleType) -> None:
    for verb in VERBS:
        section = TEXT["cli.md"].split(f"## `leyden {verb}`\n")[1].split("\n## ")[0]
        for option in made.options(verb):
            assert all(name in section for name in option.names), (verb, option)
            assert option.meaning, f"leyden {verb} {option.names} has no help"


def test_every_key_of_the_configuration_is_in_the_docs() -> None:
    assert config.known_keys()
    for key, meaning in config.known_keys().items():
        section, _, name = key.rpartition(".")
        assert meaning, f"{key} has no docstring"
        assert f"| `{name}` |" in TEXT["configuration.md"].split(f"## `[{section}]`\n")[1].split("\n## ")[0], key


def test_every_error_class_is_in_the_docs() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes - named("errors.md") == set()


def test_every_outcome_drop_refusal_and_provenance_is_in_the_docs_with_its_meaning() -> None:
    for page, names in (
        ("your-agent.md", [outcome.value for outcome in Outcome]),
        ("token-truth.md", [drop.value for drop in Drop]),
        ("token-truth.md", [source.value for source in Provenance]),
        ("token-truth.md", get_args(Refusal)),
    ):
        rows = {
            name
            for row in re.findall(r"^\| (.+?) \|", TEXT[page], re.MULTILINE)
            for name in re.findall(r"`(\w+)`", row)
        }
        assert set(names) - rows == set(), page
        assert set(names) - named("errors.md") == set()


def test_every_diagnosis_is_in_the_docs_and_every_documented_one_is_made() -> None:
    section = TEXT["your-agent.md"].split("\n## Diagnoses\n")[1].split("\n## ")[0]
    documented = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert documented == diagnoses()
    assert diagnoses() - named("errors.md") == set()


def test_every_table_of_the_store_is_in_the_docs() -> None:
    section = TEXT["files.md"].split("\n## The store\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(metadata.tables)


def test_the_tree_of_the_house_is_the_real_one() -> None:
    tree = re.findall(r"^    ([\w/]+\.py) +(\S.*)$", TEXT["how-it-works.md"], re.MULTILINE)
    drawn = [path for path, _ in tree]
    real = {str(path.relative_to(SRC)) for path in SRC.rglob("*.py")}
    real -= {path for path in real if path.endswith("__init__.py") or path.startswith("cli/templates/")}
    assert len(drawn) == len(set(drawn))
    assert sorted(set(drawn) - real) == [], "drawn, but not there"
    assert sorted(real - set(drawn)) == [], "there, but not drawn"


def test_the_index_leads_to_every_page() -> None:
    linked = {target.partition("#")[0] for target in LINK.findall(TEXT["index.md"])}
    assert {page.name for page in PAGES} - {"index.md"} == linked


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(TEXT[page.name]):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, fragment = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), f"{page.name} links to {target}"
        if fragment:
            assert fragment in anchors(there.read_text(encoding="utf-8")), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_every_toml_block_loads(page: Path) -> None:
    for match in FENCE.finditer(TEXT[page.name]):
        if match["kind"] == "toml" and NOT_LOADED not in (match["before"] or ""):
            config.from_tree(tomllib.loads(match["body"]), base_dir=ROOT, where=page.name)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_every_mentioned_verb_and_option_exists(page: Path, made: ModuleType) -> None:
    shown = {verb: {name for option in made.options(verb) for name in option.names} for verb in VERBS}
    code = "\n".join(
        re.findall(r"`([^`\n]+)`", TEXT[page.name]) + re.findall(r"^    (.+)$", TEXT[page.name], re.MULTILINE)
    )
    code += "\n" + "\n".join(match["body"] for match in FENCE.finditer(TEXT[page.name]))
    for verb, rest in COMMAND.findall(code):
        assert verb in VERBS, f"{page.name} mentions `leyden {verb}`"
        used = re.findall(r"(?<!\S)(--?[a-z][a-z-]*)", rest.partition("#")[0])
        assert set(used) - shown[verb] - {"--help"} == set(), f"{page.name}: leyden {verb}{rest}"


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_every_mentioned_key_exists(page: Path) -> None:
    sections = {key.partition(".")[0] for key in config.known_keys()}
    known = set(config.known_keys()) | {key.rpartition(".")[0] for key in config.known_keys()}
    for word in named(page.name):
        key = word.partition(" =")[0].partition("=")[0]
        if not re.fullmatch(r"[a-z]+(\.\w+)+", key) or key.partition(".")[0] not in sections:
            continue
        if key.endswith((".py", ".toml", ".md", ".log", ".json", ".jsonl")) or key == "rewards.weights.x":
            continue
        assert key in known, f"{page.name} mentions {key}"


def test_the_readme_has_exactly_the_two_commands_of_the_set_up() -> None:
    assert README.exists(), "README.md is not written yet"
    body = TEXT["README.md"]
    first = next((m["body"] for m in FENCE.finditer(body) if m["kind"] in ("sh", "bash", "console", "")), "")
    commands = [line for line in first.splitlines() if line.strip() and not line.startswith("#")]
    assert len(commands) == 2, f"the first block of commands of the README has {len(commands)}: {commands}"
