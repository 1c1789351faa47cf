"""What may be stored, and in which words. Pure: it changes values, it opens nothing."""

from leyden.traces.privacy.policy import FIELDS, KEEP, Privacy

__all__ = ["FIELDS", "KEEP", "Privacy"]
