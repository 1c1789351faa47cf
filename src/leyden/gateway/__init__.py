"""The process in front of the agent: relays model calls, records them, and serves the REST surface. Never
torch.

`serve(config, store)` blocks; `create_gateway` and `create_app` give the ASGI application. Start reading at
`forward`.
"""

from leyden.gateway.app import Listening, create_app, create_gateway, serve

__all__ = ["Listening", "create_app", "create_gateway", "serve"]
