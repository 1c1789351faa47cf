"""Why did rollouts fail, and is training the remedy? Rules over the trace, in a fixed order: the first counts.

The registry is closed: `RULES` is the whole list, and rules of your own come from a file (`custom`), before it.
"""

from collections.abc import Sequence

from leyden.release.diagnosis import budget, data, execution, formats, infrastructure, reasoning, tool
from leyden.release.diagnosis.base import CATEGORIES, Category, Facts, Finding, Rule
from leyden.release.diagnosis.summary import Diagnosis, Failure, diagnose

RULES: Sequence[Rule] = (
    *infrastructure.RULES,  # says nothing about the policy, so nothing else is looked for
    *budget.RULES,  # an answer that was cut off is also malformed; the cut is the cause
    *formats.RULES,
    *tool.CALL_RULES,  # a wrong call explains an empty result, so it comes before it
    *data.RULES,
    *tool.RESULT_RULES,
    *execution.RULES,
    *reasoning.RULES,  # the rest: it had what it needed and was wrong
)
"""Every rule, in the order in which they are tried."""

__all__ = ["CATEGORIES", "RULES", "Category", "Diagnosis", "Facts", "Failure", "Finding", "Rule", "diagnose"]
