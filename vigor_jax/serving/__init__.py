"""A trained policy behind JetStream's gRPC; `vigor_jax.serve` starts it."""
