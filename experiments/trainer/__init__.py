"""The tiny trainer: `loop` is what it does; the rest is what a run needs around it."""
