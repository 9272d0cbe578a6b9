"""What `eagle3_jax.doctor` tries, and how it judges."""
