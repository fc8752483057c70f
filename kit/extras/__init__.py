"""Optional features, each of which can be deleted. kit/features.py has their table."""
