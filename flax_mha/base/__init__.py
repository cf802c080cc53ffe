"""Tools that every package uses: argument checks, dimensions, coordinates, trees, JAX internals."""
