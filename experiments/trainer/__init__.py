"""The tiny trainer: read `loop` first."""
