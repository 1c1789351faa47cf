"""From the name that a harness asks for to the engine that answers: alias -> policy -> version -> replica.

Aliases are the policies of the configuration and the models that were registered (`POST /api/models`). A
rollout's pinned version wins over the version that the store says is serving. Replicas are sticky: one
rollout always goes to the same one, so that its prefix cache helps. What the store says is cached until its
counter of changes moves.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from leyden.base.config import Config, PolicyConfig
from leyden.base.errors import ConfigError, EngineUnreachable, RequestRefused
from leyden.base.records import Rollout
from leyden.gateway.changes import Changes
from leyden.gateway.health import Health
from leyden.gateway.matching import Matchers
from leyden.gateway.providers import BASE_URLS, ENGINES, PLAIN, Provider, Wire, wire_of
from leyden.store import aio, ledger
from leyden.store.base import Store

DRAINING = "replicas.draining"
"""Control value: base URLs that an administrator keeps new calls away from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where a call goes."""

    policy: str
    """The policy that answers."""
    version: int
    """Its version."""
    endpoint: str
    """Base URL of the engine, without `/v1`."""
    key: str
    """The engine's key; empty if it has none."""
    names: Sequence[str]
    """Names under which the engine may serve it, the likeliest first."""
    trainable: bool
    """Whether token ids and log-probabilities are required of the engine."""
    has_others: bool = False
    """Whether other replicas serve it too."""
    wire: Wire = PLAIN
    """The format in which it is spoken to."""
    provider: Provider | None = None
    """The provider that it leads to, if it is none of our engines."""

    def __repr__(self) -> str:
        return f"Route({self.policy}@{self.version} at {self.endpoint})"


@dataclass(frozen=True, slots=True)
class _Engine:
    endpoint: str
    version: int


class Router:
    """Knows aliases, serving versions and replicas."""

    def __init__(self, config: Config, store: Store, health: Health | None = None) -> None:
        self._health = health or Health(eject_after=3)
        self._config = config
        self._store = store
        self.matchers = Matchers(config)
        """Decide for names that stand for no single policy."""
        self._changes = Changes(store, ledger.TOPIC)
        self._engines: dict[str, list[_Engine]] = {}
        self._serving: dict[str, int] = {}
        self._seen = -1
        self._routes: dict[tuple[str, int, str], Route] = {}
        self._provided = {
            name: _provider_route(config, name) for name, policy in config.policies.items() if policy.provider
        }

    async def aliases(self) -> list[str]:
        """Every name that a call may ask for."""
        await self._refresh()
        return sorted({*self._config.policies, *self._engines})

    async def policy(self, alias: str) -> PolicyConfig | None:
        """The configuration behind an alias, None for a model that was only registered. Raises RequestRefused
        (404)."""
        policy = self._config.policies.get(alias)
        if policy is None:
            await self._refresh()
            if alias not in self._engines:
                known = await self.aliases()
                raise RequestRefused(
                    f"there is no model {alias!r} here",
                    status=404,
                    kind="model_not_found",
                    field="model",
                    hint=f"known: {', '.join(known)}" if known else "no policy is configured and no model registered",
                )
        return policy

    async def engines(self) -> list[tuple[str, str]]:
        """(base URL, key) of every engine that a call can go to."""
        await self._refresh()
        found: dict[str, str] = {}
        for alias in {*self._config.policies, *self._engines}:
            config = self._config.policies.get(alias)
            if config is None or not config.provider:
                for endpoint in await self.endpoints(alias):
                    found[endpoint] = found.get(endpoint) or _engine_key(alias, config)
        return sorted(found.items())

    async def endpoints(self, alias: str) -> list[str]:
        """Base URLs of the engines of an alias."""
        await self._refresh()
        return [engine.endpoint for engine in self._engines_of(alias)]

    async def route(self, alias: str, rollout: Rollout | None, session: str = "") -> Route:
        """Where a call goes now; live traffic is sticky by `session`. Raises EngineUnreachable if no engine serves
        the alias."""
        provided = self._provided.get(alias)
        if provided is not None:
            return provided
        await self._refresh()
        config = self._config.policies.get(alias)
        engines = self._engines_of(alias)
        if not engines:
            raise EngineUnreachable(
                f"no engine serves {alias!r}: the learner has not registered its sampler, and "
                f"policies.{alias}.engine is not set"
            )
        version = self._version(alias, rollout, engines)
        fit = [e for e in engines if e.version == version] or engines
        usable = fit if len(fit) == 1 else [e for e in fit if self._health.usable(e.endpoint)] or fit
        engine = _sticky(usable, rollout.id if rollout else session)
        slot = (alias, version, engine.endpoint)
        made = self._routes.get(slot)
        if made is None:
            made = self._routes[slot] = _route(alias, version, engine.endpoint, config)
        return made if len(usable) == 1 else replace(made, has_others=True)

    def _engines_of(self, alias: str) -> list[_Engine]:
        found = self._engines.get(alias, [])
        config = self._config.policies.get(alias)
        if not found and config is not None and config.engine:
            found = [_Engine(config.engine.rstrip("/").removesuffix("/v1"), 0)]
        return found

    def _version(self, policy: str, rollout: Rollout | None, engines: Sequence[_Engine]) -> int:
        if rollout is not None and policy in rollout.policy_versions:
            return rollout.policy_versions[policy]
        if policy in self._serving:
            return self._serving[policy]
        return max(engine.version for engine in engines)

    async def _refresh(self) -> None:
        changes = self._changes.count()
        if changes == self._seen:
            return
        rows, serving, draining = await aio.read(
            self._store,
            lambda c: (ledger.engines(c), ledger.all_serving(c), ledger.get_control(c, DRAINING) or []),
        )
        engines: dict[str, list[_Engine]] = {}
        for row in rows:
            endpoint = row.endpoint.rstrip("/").removesuffix("/v1")
            engines.setdefault(row.model, []).append(_Engine(endpoint, row.version))
        self._engines, self._serving, self._seen = engines, serving, changes
        self._routes.clear()
        self._health.set_draining(draining)


def _route(alias: str, version: int, endpoint: str, config: PolicyConfig | None) -> Route:
    """The route to an engine of ours."""
    names = [f"{alias}@{version}", alias]
    if config is None:
        names.reverse()
    elif config.model:
        names.append(config.model)
    return Route(
        policy=alias,
        version=version,
        endpoint=endpoint,
        key=_engine_key(alias, config),
        names=names,
        trainable=config is None or config.trainable,
        wire=PLAIN if config is None else ENGINES[config.engine_kind],
    )


def _provider_route(config: Config, alias: str) -> Route:
    """Where a provider's model is. Raises ConfigError when its key is not in the environment."""
    policy = config.policies[alias]
    settings = config.providers[policy.provider]
    key = os.environ.get(settings.key_env, "") if settings.key_env else ""
    if settings.key_env and not key:
        raise ConfigError(
            f"providers.{policy.provider}.key_env names {settings.key_env}, which is not set; export it, or remove "
            f"the policy {alias!r}"
        )
    return Route(
        policy=alias,
        version=0,
        endpoint=(settings.base_url or BASE_URLS[settings.kind]).rstrip("/"),
        key=key,
        names=[policy.model],
        trainable=False,
        wire=wire_of(settings),
        provider=Provider(
            name=policy.provider,
            timeout_s=settings.timeout_s,
            price=config.price_of(alias),
        ),
    )


def _sticky(engines: Sequence[_Engine], rollout_id: str) -> _Engine:
    """Rendezvous hashing: a replica that comes or goes moves only its own share of rollouts."""
    if len(engines) == 1:
        return engines[0]
    return max(engines, key=lambda e: blake2b(f"{rollout_id}\0{e.endpoint}".encode(), digest_size=8).digest())


def _engine_key(alias: str, config: PolicyConfig | None) -> str:
    if config is None or not config.engine_key_env:
        return ""
    key = os.environ.get(config.engine_key_env, "")
    if not key:
        raise ConfigError(
            f"policies.{alias}.engine_key_env names {config.engine_key_env}, which is not set; "
            "export it, or remove engine_key_env"
        )
    return key
