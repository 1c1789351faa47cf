"""What the gateway benchmark puts beside the gateway: a load generator and its peer."""
