"""The rest: nothing was cut, missing, malformed or broken, and the answer was wrong all the same."""

from leyden.release.diagnosis.base import Facts, Rule, shorten


def _rest(facts: Facts) -> str:
    low = [f"{name} {value:g}" for name, value in facts.components.items() if value <= 0.5]
    scored = f" ({', '.join(low)})" if low else ""
    return shorten(f"it ran, and the answer was wrong{scored}: {facts.final_text}")


RULES = (
    Rule(name="wrong_answer", category="reasoning", meaning="it ran to its end and the answer is wrong", find=_rest),
)
