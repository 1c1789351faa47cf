"""Keys of the configuration that were, and what is written in their place: a file of an earlier version is refused with
the way to mend it instead of with a list of keys that it does not look for.

Nothing is translated: whoever reads a file sees what is in force.
"""

from collections.abc import Mapping

_ALIAS = "the reflection model is a policy of its own, named by prompts.reflection: set "

SUCCESSORS: Mapping[str, str] = {
    "costs.prompt_usd_per_million": "set policies.NAME.usd_per_million.input, or providers.NAME.usd_per_million.input",
    "costs.completion_usd_per_million": (
        "set policies.NAME.usd_per_million.output, or providers.NAME.usd_per_million.output"
    ),
    "prompts.reflection_base_url": f"{_ALIAS}policies.NAME.provider, and providers.NAME.base_url to this address",
    "prompts.reflection_model": f"{_ALIAS}policies.NAME.model",
    "prompts.reflection_key_env": f"{_ALIAS}policies.NAME.provider, and providers.NAME.key_env to this variable",
    "prompts.reflection_input_price": f"{_ALIAS}policies.NAME.usd_per_million.input",
    "prompts.reflection_output_price": f"{_ALIAS}policies.NAME.usd_per_million.output",
    "prompts.max_reflection_cost": "set prompts.max_reflection_usd",
}
"""Full key (`NAME` stands for any name of a table, as in docs/configuration.md) to what to do. A key that is renamed or
removed gets a line here in the same change, and none here is a key that exists."""


def successor(path: tuple[str, ...]) -> str | None:
    """What to do about a key that is gone; None for one that never was."""
    for key, hint in SUCCESSORS.items():
        parts = key.split(".")
        if len(parts) == len(path) and all(p in ("NAME", q) for p, q in zip(parts, path, strict=True)):
            return hint
    return None
