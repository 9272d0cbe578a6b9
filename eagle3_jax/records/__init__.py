"""The parts behind `eagle3_jax.record`."""
