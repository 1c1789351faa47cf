"""Agents as processes: leased, started, limited, judged. Start reading at `attempt`."""
