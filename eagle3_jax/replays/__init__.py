"""What `eagle3_jax.replay` is made of."""
