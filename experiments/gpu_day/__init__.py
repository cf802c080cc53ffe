"""All measurements that need a GPU, in one command."""
