"""Service keys, and who is behind a call of live traffic."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create both tables."""
    op.create_table(
        "service_keys",
        sa.Column("key_id", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("revoked_at", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("key_id"),
        sa.UniqueConstraint("key_hash"),
    )
    op.create_table(
        "live_calls",
        sa.Column("call_id", sa.String(length=128), nullable=False),
        sa.Column("service", sa.String(length=128), nullable=False),
        sa.Column("session", sa.String(length=128), nullable=True),
        sa.Column("subject", sa.String(length=128), nullable=True),
        sa.Column("purpose", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(["call_id"], ["calls.call_id"]),
        sa.PrimaryKeyConstraint("call_id"),
    )
    op.create_index("ix_live_calls_session", "live_calls", ["session"])
    op.create_index("ix_live_calls_subject", "live_calls", ["subject"])
