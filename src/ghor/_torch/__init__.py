"""Everything that touches the internals of torch."""
