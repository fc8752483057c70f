"""Optional features. A recipe key turns each of them on, and each of them can be deleted."""
