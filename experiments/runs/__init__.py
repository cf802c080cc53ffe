"""What a run needs around its steps: a folder, a config, a log, signals, and other processes."""
