"""Is the answer JSON, and does it fit a schema (JSON Schema, by the jsonschema library)."""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from jsonschema import exceptions, validators
from pydantic import field_validator, model_validator

from leyden.base.errors import VerifierError
from leyden.rewards.library.base import Evidence, Member, TextSettings, check_source


class JsonSettings(TextSettings):
    """`[rewards.settings.json_schema]`"""

    schema_file: str = ""
    """File of the schema, relative to the configuration."""
    inline: dict[str, Any] = {}
    """The schema itself, instead of a file."""
    equals: str = ""
    """Key of the task's answer that the JSON must also equal; empty: only its form counts."""

    @field_validator("source")
    @classmethod
    def _source(cls, value: str) -> str:
        check_source(value)
        return value

    @model_validator(mode="after")
    def _one(self) -> "JsonSettings":
        if bool(self.schema_file) == bool(self.inline):
            raise ValueError("give schema_file or inline, one of the two")
        return self


def parse_json(said: str) -> tuple[bool, Any]:
    """(whether the whole text is one JSON value, the value). NaN and infinity are no JSON."""
    try:
        return True, json.loads(said, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False, None


def schema_match(said: str, schema: Mapping[str, Any]) -> float:
    """1.0 when `said` is JSON that fits `schema`, else 0.0. Raises VerifierError when the schema is none."""
    parsed, value = parse_json(said)
    return float(parsed and fits(value, schema))


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a JSON value fits a schema. Raises VerifierError when the schema is none."""
    checked = _validator(json.dumps(schema, sort_keys=True))
    try:
        return bool(checked.is_valid(value))
    except RecursionError:  # nested deeper than any answer that somebody wants
        return False


@lru_cache(maxsize=256)
def _validator(text: str) -> Any:
    schema = json.loads(text)
    kind = validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except exceptions.SchemaError as error:
        raise VerifierError(f"the JSON schema cannot be used: {error.message}") from None
    return kind(schema)


def _score(evidence: Evidence, settings: JsonSettings) -> dict[str, float]:
    schema = settings.inline or _read(str(evidence.base_dir / settings.schema_file))
    parsed, value = parse_json(evidence.text(settings.source))
    found = {"json_parses": float(parsed), "json_schema": float(parsed and fits(value, schema))}
    if settings.equals:
        found["json_schema"] *= float(parsed and _same(value, evidence.wanted(settings.equals)))
    return found


@lru_cache(maxsize=16)
def _read(path: str) -> dict[str, Any]:
    try:
        schema = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise VerifierError(f"rewards.settings.json_schema.schema_file {path} cannot be read: {error}") from None
    if not isinstance(schema, dict):
        raise VerifierError(f"rewards.settings.json_schema.schema_file {path} holds no JSON object")
    return schema


def _same(a: Any, b: Any) -> bool:
    """Equality of JSON values: 1 equals 1.0, but true is no number."""
    try:
        return bool(a == b) and json.dumps(a).count("true") == json.dumps(b).count("true")
    except RecursionError:
        return False


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


MEMBER = Member(
    name="json_schema",
    says="the answer is JSON and fits a JSON Schema, and equals a field of the task's answer if asked for",
    settings=JsonSettings,
    score=_score,
    components=("json_schema", "json_parses"),
    answer_key=lambda settings: settings.equals or None,
)
