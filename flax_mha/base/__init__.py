"""Tools of all rooms: checks of arguments, sizes by letter, coordinates of scores, trees, JAX."""
