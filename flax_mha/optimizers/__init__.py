"""Parts of optimizers that know the heads of attention layers. They need optax."""
