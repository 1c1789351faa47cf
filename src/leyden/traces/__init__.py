"""How a call becomes a durable, private, token-exact record: `recorder` is the only road in, `reader` the
only one out."""
