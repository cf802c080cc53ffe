"""Everything that keeps a run safe: locks, checksums, config checks, processes, signals, files."""
