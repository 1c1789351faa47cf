"""The prompts of a policy version, and what a prompt policy did to a call."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add both columns; rows of before have none of either."""
    op.add_column("policies", sa.Column("prompts", sa.Text(), nullable=True))
    op.add_column("calls", sa.Column("slots", sa.LargeBinary(), nullable=True))
