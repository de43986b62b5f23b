"""Experiments: their data, configurations, training, records and reports. Needs the extra `ghor[lab]`."""
