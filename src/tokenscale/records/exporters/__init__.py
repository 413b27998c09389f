"""A run's events, handed on to other people's trackers: beside the run or after it, never inside."""
