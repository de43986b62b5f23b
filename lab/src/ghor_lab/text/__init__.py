"""The language model: its data, methods, sweep and report."""
