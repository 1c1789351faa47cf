"""First revision: every table of the schema, spelled out so that later changes of `schema` do not reach
back."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables. Longer than a function should be: it is a list."""
    op.create_table(
        "attempts",
        sa.Column("attempt_id", sa.String(length=128), nullable=False),
        sa.Column("rollout_id", sa.String(length=128), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("token_hash", sa.String(length=64), nullable=False),
        sa.Column("started_at", sa.Float(precision=53), nullable=False),
        sa.Column("ended_at", sa.Float(precision=53), nullable=True),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("diagnosis", sa.String(length=64), nullable=True),
        sa.Column("stdout_tail", sa.Text(), nullable=False),
        sa.Column("stderr_tail", sa.Text(), nullable=False),
        sa.Column("duration_s", sa.Float(precision=53), nullable=True),
        sa.Column("runner", sa.String(length=128), nullable=False),
        sa.PrimaryKeyConstraint("attempt_id"),
        sa.UniqueConstraint("rollout_id", "number"),
        sa.UniqueConstraint("token_hash"),
    )
    op.create_table(
        "calls",
        sa.Column("call_id", sa.String(length=128), nullable=False),
        sa.Column("rollout_id", sa.String(length=128), nullable=True),
        sa.Column("attempt_id", sa.String(length=128), nullable=True),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("occurrence", sa.Integer(), nullable=False),
        sa.Column("origin", sa.String(length=16), nullable=False),
        sa.Column("dialect", sa.String(length=32), nullable=False),
        sa.Column("alias", sa.String(length=256), nullable=False),
        sa.Column("policy", sa.String(length=128), nullable=False),
        sa.Column("policy_version", sa.Integer(), nullable=False),
        sa.Column("engine", sa.String(length=256), nullable=False),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column("request", sa.LargeBinary(), nullable=False),
        sa.Column("request_parent", sa.String(length=128), nullable=True),
        sa.Column("shared_messages", sa.Integer(), nullable=False),
        sa.Column("sampling", sa.Text(), nullable=False),
        sa.Column("rewrites", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Float(precision=53), nullable=False),
        sa.Column("schema_version", sa.String(length=8), nullable=False),
        sa.PrimaryKeyConstraint("call_id"),
        sa.UniqueConstraint("attempt_id", "digest", "occurrence"),
    )
    op.create_index("ix_calls_attempt", "calls", ["attempt_id", "seq"], unique=False)
    op.create_table(
        "control",
        sa.Column("key", sa.String(length=128), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_table(
        "engines",
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("endpoint", sa.String(length=512), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("model", "endpoint"),
    )
    op.create_table(
        "evaluations",
        sa.Column("evaluation_id", sa.String(length=128), nullable=False),
        sa.Column("run_id", sa.String(length=128), nullable=True),
        sa.Column("split", sa.String(length=16), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("policy", sa.String(length=128), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("label", sa.String(length=64), nullable=False),
        sa.Column("result", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("evaluation_id"),
    )
    op.create_index("ix_evaluations_fingerprint", "evaluations", ["fingerprint", "created_at"], unique=False)
    op.create_table(
        "policies",
        sa.Column("policy", sa.String(length=128), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("stage", sa.String(length=16), nullable=True),
        sa.Column("parent", sa.Integer(), nullable=True),
        sa.Column("path", sa.Text(), nullable=True),
        sa.Column("run_id", sa.String(length=128), nullable=True),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("serving", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("policy", "version"),
    )
    op.create_table(
        "rewards",
        sa.Column("reward_id", sa.String(length=128), nullable=False),
        sa.Column("rollout_id", sa.String(length=128), nullable=False),
        sa.Column("attempt_id", sa.String(length=128), nullable=False),
        sa.Column("call_id", sa.String(length=128), nullable=True),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("value", sa.Float(precision=53), nullable=False),
        sa.Column("source", sa.String(length=16), nullable=False),
        sa.Column("reward_version", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("reward_id"),
    )
    op.create_index("ix_rewards_attempt", "rewards", ["attempt_id", "created_at"], unique=False)
    op.create_table(
        "rollouts",
        sa.Column("rollout_id", sa.String(length=128), nullable=False),
        sa.Column("created_seq", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=128), nullable=True),
        sa.Column("group_id", sa.String(length=128), nullable=True),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("task_id", sa.String(length=128), nullable=False),
        sa.Column("split", sa.String(length=16), nullable=False),
        sa.Column("domain", sa.String(length=256), nullable=False),
        sa.Column("purpose", sa.String(length=64), nullable=False),
        sa.Column("mode", sa.String(length=8), nullable=False),
        sa.Column("input", sa.Text(), nullable=False),
        sa.Column("answer", sa.Text(), nullable=True),
        sa.Column("policy_versions", sa.Text(), nullable=False),
        sa.Column("sampling", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("num_attempts", sa.Integer(), nullable=False),
        sa.Column("last_attempt_id", sa.String(length=128), nullable=True),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("reward", sa.Float(precision=53), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.Column("job_name", sa.String(length=256), nullable=True),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("updated_at", sa.Float(precision=53), nullable=False),
        sa.Column("finished_seq", sa.Integer(), nullable=True),
        sa.Column("lease_owner", sa.String(length=128), nullable=True),
        sa.Column("lease_until", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("rollout_id"),
        sa.UniqueConstraint("created_seq"),
        sa.UniqueConstraint("finished_seq"),
    )
    op.create_index("ix_rollouts_group", "rollouts", ["group_id"], unique=False)
    op.create_index("ix_rollouts_run_step", "rollouts", ["run_id", "step"], unique=False)
    op.create_index("ix_rollouts_state", "rollouts", ["state", "created_seq"], unique=False)
    op.create_table(
        "runs",
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("versions", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.PrimaryKeyConstraint("run_id"),
    )
    op.create_table(
        "spans",
        sa.Column("span_id", sa.String(length=128), nullable=False),
        sa.Column("rollout_id", sa.String(length=128), nullable=False),
        sa.Column("attempt_id", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("attributes", sa.LargeBinary(), nullable=False),
        sa.Column("started_at", sa.Float(precision=53), nullable=False),
        sa.Column("ended_at", sa.Float(precision=53), nullable=True),
        sa.Column("schema_version", sa.String(length=8), nullable=False),
        sa.PrimaryKeyConstraint("span_id"),
    )
    op.create_index("ix_spans_attempt", "spans", ["attempt_id", "started_at"], unique=False)
    op.create_table(
        "steps",
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("stage", sa.String(length=16), nullable=False),
        sa.Column("policy", sa.String(length=128), nullable=False),
        sa.Column("version_before", sa.Integer(), nullable=False),
        sa.Column("version_after", sa.Integer(), nullable=False),
        sa.Column("report", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "step", "stage"),
    )
    op.create_table(
        "topics",
        sa.Column("topic", sa.String(length=128), nullable=False),
        sa.Column("changes", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("topic"),
    )
    op.create_table(
        "choices",
        sa.Column("call_id", sa.String(length=128), nullable=False),
        sa.Column("choice_index", sa.Integer(), nullable=False),
        sa.Column("completion_ids", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("finish_reason", sa.String(length=32), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["call_id"],
            ["calls.call_id"],
        ),
        sa.PrimaryKeyConstraint("call_id", "choice_index"),
    )
    op.create_table(
        "completions",
        sa.Column("call_id", sa.String(length=128), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("http_status", sa.Integer(), nullable=False),
        sa.Column("response", sa.LargeBinary(), nullable=False),
        sa.Column("provenance", sa.String(length=16), nullable=False),
        sa.Column("refusal", sa.String(length=64), nullable=True),
        sa.Column("prompt_parent", sa.String(length=128), nullable=True),
        sa.Column("shared_tokens", sa.Integer(), nullable=False),
        sa.Column("prompt_tail", sa.LargeBinary(), nullable=False),
        sa.Column("usage", sa.Text(), nullable=False),
        sa.Column("template_hash", sa.String(length=64), nullable=False),
        sa.Column("delivered", sa.Boolean(), nullable=False),
        sa.Column("retry_count", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("latency_ms", sa.Float(precision=53), nullable=False),
        sa.Column("first_byte_ms", sa.Float(precision=53), nullable=True),
        sa.Column("ended_at", sa.Float(precision=53), nullable=False),
        sa.Column("schema_version", sa.String(length=8), nullable=False),
        sa.ForeignKeyConstraint(
            ["call_id"],
            ["calls.call_id"],
        ),
        sa.PrimaryKeyConstraint("call_id"),
    )
