"""The tables, declared once. Migrations in `migrations/` bring an older file to `SCHEMA_VERSION`.

Blobs are compressed JSON (zlib, level 1: a tenth of the size for a few microseconds) or little-endian arrays
(int32 token ids, float32 log-probabilities). `calls` and `completions` are append-only: an intent is never
updated, its completion is a second row, so a crash leaves an intent without completion and nothing half done.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

SCHEMA_VERSION = "0003"
"""Revision that this code reads and writes; equals the head of `migrations/versions`."""

metadata = MetaData()


def _id(name: str, **options: object) -> Column[str]:
    return Column(name, String(128), **options)  # type: ignore[arg-type]


runs = Table(
    "runs",
    metadata,
    _id("run_id", primary_key=True),
    Column("created_at", Float, nullable=False),
    Column("config", Text, nullable=False),
    Column("versions", Text, nullable=False),
    Column("state", String(16), nullable=False),
)

rollouts = Table(
    "rollouts",
    metadata,
    _id("rollout_id", primary_key=True),
    Column("created_seq", Integer, nullable=False, unique=True),
    _id("run_id"),
    _id("group_id"),
    Column("step", Integer),
    _id("task_id", nullable=False),
    Column("split", String(16), nullable=False),
    Column("domain", String(256), nullable=False),
    Column("purpose", String(64), nullable=False),
    Column("mode", String(8), nullable=False),
    Column("input", Text, nullable=False),
    Column("answer", Text),
    Column("policy_versions", Text, nullable=False),
    Column("sampling", Text, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("metadata", Text, nullable=False),
    Column("config", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("version", Integer, nullable=False),
    Column("num_attempts", Integer, nullable=False),
    _id("last_attempt_id"),
    Column("outcome", String(16)),
    Column("reward", Float(53)),
    Column("error_message", Text),
    Column("job_name", String(256)),
    Column("created_at", Float(53), nullable=False),
    Column("updated_at", Float(53), nullable=False),
    Column("finished_seq", Integer, unique=True),
    _id("lease_owner"),
    Column("lease_until", Float(53)),
    Index("ix_rollouts_state", "state", "created_seq"),
    Index("ix_rollouts_group", "group_id"),
    Index("ix_rollouts_run_step", "run_id", "step"),
)

attempts = Table(
    "attempts",
    metadata,
    _id("attempt_id", primary_key=True),
    _id("rollout_id", nullable=False),
    Column("number", Integer, nullable=False),
    Column("token_hash", String(64), nullable=False, unique=True),
    Column("started_at", Float(53), nullable=False),
    Column("ended_at", Float(53)),
    Column("outcome", String(16)),
    Column("exit_code", Integer),
    Column("detail", Text, nullable=False),
    Column("diagnosis", String(64)),
    Column("stdout_tail", Text, nullable=False),
    Column("stderr_tail", Text, nullable=False),
    Column("duration_s", Float(53)),
    _id("runner", nullable=False),
    UniqueConstraint("rollout_id", "number"),
)

calls = Table(
    "calls",
    metadata,
    _id("call_id", primary_key=True),
    _id("rollout_id"),
    _id("attempt_id"),
    Column("seq", Integer, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("occurrence", Integer, nullable=False),
    Column("origin", String(16), nullable=False),
    Column("dialect", String(32), nullable=False),
    Column("alias", String(256), nullable=False),
    Column("policy", String(128), nullable=False),
    Column("policy_version", Integer, nullable=False),
    Column("engine", String(256), nullable=False),
    Column("stream", Boolean, nullable=False),
    Column("request", LargeBinary, nullable=False),
    _id("request_parent"),
    Column("shared_messages", Integer, nullable=False),
    Column("sampling", Text, nullable=False),
    Column("rewrites", Text, nullable=False),
    Column("started_at", Float(53), nullable=False),
    Column("schema_version", String(8), nullable=False),
    Column("slots", LargeBinary),
    UniqueConstraint("attempt_id", "digest", "occurrence"),
    Index("ix_calls_attempt", "attempt_id", "seq"),
)

completions = Table(
    "completions",
    metadata,
    Column("call_id", String(128), ForeignKey("calls.call_id"), primary_key=True),
    Column("status", String(16), nullable=False),
    Column("http_status", Integer, nullable=False),
    Column("response", LargeBinary, nullable=False),
    Column("provenance", String(16), nullable=False),
    Column("refusal", String(64)),
    _id("prompt_parent"),
    Column("shared_tokens", Integer, nullable=False),
    Column("prompt_tail", LargeBinary, nullable=False),
    Column("usage", Text, nullable=False),
    Column("template_hash", String(64), nullable=False),
    Column("delivered", Boolean, nullable=False),
    Column("retry_count", Integer, nullable=False),
    Column("error", Text),
    Column("latency_ms", Float(53), nullable=False),
    Column("first_byte_ms", Float(53)),
    Column("ended_at", Float(53), nullable=False),
    Column("schema_version", String(8), nullable=False),
)

choices = Table(
    "choices",
    metadata,
    Column("call_id", String(128), ForeignKey("calls.call_id"), primary_key=True),
    Column("choice_index", Integer, primary_key=True),
    Column("completion_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("finish_reason", String(32), nullable=False),
    Column("text", Text, nullable=False),
)

service_keys = Table(
    "service_keys",
    metadata,
    _id("key_id", primary_key=True),
    _id("name", nullable=False),
    Column("key_hash", String(64), nullable=False, unique=True),
    Column("created_at", Float(53), nullable=False),
    Column("revoked_at", Float(53)),
)

live_calls = Table(
    "live_calls",
    metadata,
    Column("call_id", String(128), ForeignKey("calls.call_id"), primary_key=True),
    _id("service", nullable=False),
    _id("session"),
    _id("subject"),
    Column("purpose", String(64)),
    Index("ix_live_calls_session", "session"),
    Index("ix_live_calls_subject", "subject"),
)

spans = Table(
    "spans",
    metadata,
    _id("span_id", primary_key=True),
    _id("rollout_id", nullable=False),
    _id("attempt_id", nullable=False),
    Column("name", String(256), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("attributes", LargeBinary, nullable=False),
    Column("started_at", Float(53), nullable=False),
    Column("ended_at", Float(53)),
    Column("schema_version", String(8), nullable=False),
    Index("ix_spans_attempt", "attempt_id", "started_at"),
)

rewards = Table(
    "rewards",
    metadata,
    _id("reward_id", primary_key=True),
    _id("rollout_id", nullable=False),
    _id("attempt_id", nullable=False),
    _id("call_id"),
    Column("name", String(128), nullable=False),
    Column("value", Float(53), nullable=False),
    Column("source", String(16), nullable=False),
    Column("reward_version", String(64), nullable=False),
    Column("created_at", Float(53), nullable=False),
    Index("ix_rewards_attempt", "attempt_id", "created_at"),
)

policies = Table(
    "policies",
    metadata,
    Column("policy", String(128), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("stage", String(16)),
    Column("parent", Integer),
    Column("path", Text),
    _id("run_id"),
    Column("step", Integer),
    Column("serving", Boolean, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("prompts", Text),
)

engines = Table(
    "engines",
    metadata,
    Column("model", String(256), primary_key=True),
    Column("endpoint", String(512), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("created_at", Float(53), nullable=False),
)

steps = Table(
    "steps",
    metadata,
    _id("run_id", primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("stage", String(16), primary_key=True),
    Column("policy", String(128), nullable=False),
    Column("version_before", Integer, nullable=False),
    Column("version_after", Integer, nullable=False),
    Column("report", Text, nullable=False),
    Column("created_at", Float(53), nullable=False),
)

evaluations = Table(
    "evaluations",
    metadata,
    _id("evaluation_id", primary_key=True),
    _id("run_id"),
    Column("split", String(16), nullable=False),
    Column("fingerprint", String(64), nullable=False),
    Column("policy", String(128), nullable=False),
    Column("version", Integer, nullable=False),
    Column("label", String(64), nullable=False),
    Column("result", LargeBinary, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Index("ix_evaluations_fingerprint", "fingerprint", "created_at"),
)

control = Table(
    "control",
    metadata,
    Column("key", String(128), primary_key=True),
    Column("value", Text, nullable=False),
)

topics = Table(
    "topics",
    metadata,
    Column("topic", String(128), primary_key=True),
    Column("changes", Integer, nullable=False),
)
