"""What there is to find out on a GPU, in one command."""
