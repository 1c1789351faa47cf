"""How good an attempt was: verifiers run apart, components are weighed into one number."""
