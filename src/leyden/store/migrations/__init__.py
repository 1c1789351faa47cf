"""Alembic's script folder; `env.py` runs on the connection that `sqlite_file` hands over."""
