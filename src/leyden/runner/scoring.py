"""Who is asked about an attempt: the verifier, the judge, and the hidden verifier of canary tasks.

Promises: the judge is asked through the gateway with the attempt's own key, so its calls are recorded with the
attempt; what the hidden verifier says reaches no total. Does not weigh components (`leyden.rewards.components`).
"""

import time
from dataclasses import replace
from pathlib import Path

from leyden.base.config import Config
from leyden.base.records import Attempt, Reward, Rollout, Trace
from leyden.rewards.canary import look
from leyden.rewards.judge import ask_at, open_judge
from leyden.rewards.verifiers import Assessment, Verifier
from leyden.runner.environment import openai_url


class Scorer:
    """The verifiers of a configuration."""

    def __init__(
        self, config: Config, gateway_url: str, verifier: Verifier | None, canary: Verifier | None = None
    ) -> None:
        """Raises VerifierError when the judge's rubric cannot be read."""
        self._config = config
        self._gateway_url = gateway_url
        self._verifier = verifier
        self._canary = canary
        self._judge = open_judge(config)

    @property
    def asks(self) -> str:
        """Who is asked, for a diagnosis; empty when nobody is."""
        asked = (("the verifier", self._verifier), ("the judge", self._judge))
        return " and ".join(name for name, one in asked if one is not None)

    async def assess(self, rollout: Rollout, attempt: Attempt, token: str, trace: Trace, folder: Path) -> Assessment:
        """What the verifier and the judge say. Raises VerifierError."""
        found = Assessment(components=None)
        if self._verifier is not None:
            found = await self._verifier.assess(rollout.task, trace, folder)
        if self._judge is None:
            return found
        ask = ask_at(openai_url(self._gateway_url, rollout, attempt), token, self._config.rewards.judge)
        judged = await self._judge.assess(ask, rollout.task, trace, folder)
        if judged.score is None:
            return replace(found, unusable=judged.why)
        return replace(found, components={**(found.components or {}), self._judge.component: judged.score})

    async def hidden(self, trace: Trace, folder: Path) -> list[Reward]:
        """What the hidden verifier says; empty where it does not look."""
        return await look(self._canary, self._config.rewards, trace, folder) if self._canary is not None else []


def rewards_of(found: Assessment) -> list[Reward]:
    """Components of the attempt and of its calls as records."""
    now = time.time()
    whole = [Reward(name=n, value=v, created_at=now) for n, v in (found.components or {}).items()]
    return whole + [
        Reward(name=n, value=v, call_id=call, created_at=now) for call, of in found.calls.items() for n, v in of.items()
    ]
