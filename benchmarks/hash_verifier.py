"""A verifier for benchmarks/gpu_check.py, whose rewards differ for any model."""

import zlib


def score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None
) -> float:
    """Return a number from 0 to 1 that depends on the whole text, like a hash."""
    return zlib.crc32(solution_str.encode()) % 1000 / 999
