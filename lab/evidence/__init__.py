"""Compare training runs over seeds: the commands `sweep` and `compare`."""
