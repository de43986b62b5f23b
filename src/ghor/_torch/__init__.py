"""What touches the internals of torch, in one place."""
