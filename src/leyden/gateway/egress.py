"""Where the gateway may connect to: no request of it may be steered to a place that its caller could not reach.

Engines of the configuration are trusted, for whoever writes it runs the process. Engines that are registered at
runtime (`POST /api/models`, the administrator only) must be at an address that `gateway.engine_hosts` allows; by
default loopback and private networks. Link-local addresses, where clouds keep their credentials, are refused always.
The check is made twice: when an engine is registered, and when its name is resolved for a connection, since a name
can mean another address by then. Redirects are not followed.
"""

import asyncio
import socket
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

from aiohttp import ThreadedResolver
from aiohttp.abc import AbstractResolver, ResolveResult

from leyden.base.errors import RequestRefused

RESOLVE_S = 5.0
"""Longest wait for a name when an engine is registered."""
_PRIVATE = tuple(map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")))
"""Networks of one's own; the library's `is_private` also counts documentation and test networks."""
_METADATA = frozenset({ip_address("fd00:ec2::254"), ip_address("100.100.100.200")})
"""Where clouds keep credentials outside the link-local range."""


def host_of(url: str) -> str:
    """The host of a URL in lower case; empty if it has none."""
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


async def check_endpoint(url: str, patterns: Sequence[str]) -> None:
    """RequestRefused (422) unless an engine may be at `url`."""
    try:
        parts = urlsplit(url)
        port_fits = parts.port is None or parts.port > 0
    except ValueError:
        parts, port_fits = urlsplit(""), False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_fits:
        raise _refused(url, "is no http or https URL with a host")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise _refused(url, "carries a user, a query or a fragment")
    host = parts.hostname.lower()
    for address in await _addresses(host, url):
        reason = why_not(host, address, patterns)
        if reason is not None:
            raise _refused(url, reason)


def why_not(host: str, address: str, patterns: Sequence[str]) -> str | None:
    """Why nothing may be asked at `address`, under which `host` is known; None if it may."""
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if found.is_link_local or found in _METADATA:
        return f"is at {address}, a link-local or metadata address, which is never allowed"
    if found.is_unspecified or found.is_multicast:
        return f"is at {address}, which is no address of a server"
    if patterns:
        if any(_matches(pattern, host, found) for pattern in patterns):
            return None
        return f"is at host {host}, which gateway.engine_hosts ({', '.join(patterns)}) does not allow"
    if found.is_loopback or any(found in network for network in _PRIVATE):
        return None
    return f"is at {address}, neither loopback nor private; allow it by gateway.engine_hosts"


class GuardedResolver(AbstractResolver):
    """Names to addresses for the client side; addresses that are not allowed are as good as unknown."""

    def __init__(self, trusted: Collection[str], patterns: Sequence[str]) -> None:
        self._trusted = frozenset(trusted)
        self._patterns = patterns
        self._inner = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """See aiohttp. OSError for a host of which no address is allowed."""
        found = await self._inner.resolve(host, port, family)
        if host.lower() in self._trusted:
            return found
        allowed = [entry for entry in found if why_not(host.lower(), entry["host"], self._patterns) is None]
        if not allowed:
            raise OSError(None, f"no address of {host} is one that an engine may have (gateway.engine_hosts)")
        return allowed

    async def close(self) -> None:
        """Let go."""
        await self._inner.close()


def _matches(pattern: str, host: str, address: IPv4Address | IPv6Address) -> bool:
    try:
        return address in ip_network(pattern, strict=False)
    except ValueError:
        return fnmatchcase(host, pattern.lower())


async def _addresses(host: str, url: str) -> list[str]:
    """Addresses of a host, also of one in an unusual spelling of a number."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError):
        raise _refused(url, f"names the host {host}, which has no address") from None
    return [str(entry[4][0]) for entry in found]


def _refused(url: str, reason: str) -> RequestRefused:
    return RequestRefused(
        f"endpoint {url[:200]!r} {reason}", status=422, field="endpoint",
        hint="register an engine at a loopback or private address, or one that gateway.engine_hosts names",
    )  # fmt: skip
