"""Tests that the cause of a failure is found in the logs of Ray's workers."""

from __future__ import annotations

import pytest

from kit.run import log_files

DEAD = "EngineDeadError: EngineCore encountered an issue"
IN_THE_WEIGHT_SYNC = "Exception: Call to collective_rpc method failed: cancelled"
KILLED = "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down"


@pytest.mark.parametrize(
    ("error", "log", "expected"),
    [
        (DEAD, KILLED, "died: Worker proc VllmWorker-0"),
        (IN_THE_WEIGHT_SYNC, KILLED, "died: Worker proc VllmWorker-0"),
        (DEAD, "torch.OutOfMemoryError: CUDA\n", "died: torch.OutOfMemoryError: "),
        (DEAD, f"{DEAD}\nRuntimeError: cancelled\n", "died and logged no cause"),
    ],
)
def test_the_cause_in_the_log_of_a_dead_engine_is_reported(tmp_path, log, expected, error):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "worker-abc-01000000-7.err").write_text(log)
    cause = log_files.find_root_cause(RuntimeError(error), tmp_path)
    assert cause.startswith(f"vLLM's engine {expected}")
    assert cause.endswith(f"Worker logs: {tmp_path}")


def test_a_dead_worker_is_named_with_rays_reason_and_the_tail_of_its_log(tmp_path):
    (tmp_path / "ray").mkdir()
    log = tmp_path / "ray" / "worker-abc-01000000-7.err"
    log.write_text("one\ntwo\nthree\nfour\nfive\nsix\n")
    error = (
        "The actor died.\n\tclass_name: Actor\n\tpid: 7\nThe actor is dead because it was killed.\n"
    )
    assert log_files.find_root_cause(RuntimeError(error), tmp_path) == (
        "the worker Actor (pid 7) died because it was killed. "
        f"Last lines of {log}: two | three | four | five | six"
    )


def test_any_other_error_is_reported_in_one_line(tmp_path):
    error = RuntimeError("ray::f()\n  File x\nValueError: bad\n")
    cause = log_files.find_root_cause(error, tmp_path)
    assert cause == f"ValueError: bad. Worker logs: {tmp_path}"
