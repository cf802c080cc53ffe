"""Studies: questions about attention, each answered by one file with a figure."""
