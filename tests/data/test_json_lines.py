"""Tests of the reader of JSON lines: incomplete lines, and the steps of a resumed run."""

from __future__ import annotations

import json

from kit.data import json_lines


def write_lines(path, *objects):
    path.write_text("".join(json.dumps(value) + "\n" for value in objects))
    return path


def test_a_line_without_its_end_is_no_line_and_is_removed(tmp_path):
    path = tmp_path / "lines.jsonl"
    assert json_lines.read_objects(path) == []
    path.write_bytes(b'{"n": 1}\n7\n\xff\n{"n": 2}\n{"n": 3')
    assert json_lines.read_objects(path) == [{"n": 1}, {"n": 2}]
    assert json_lines.drop_incomplete_line(path)
    assert path.read_bytes() == b'{"n": 1}\n7\n\xff\n{"n": 2}\n'
    assert not json_lines.drop_incomplete_line(path)
    path.write_bytes(b'{"n": 3')
    assert json_lines.drop_incomplete_line(path) and path.read_bytes() == b""


def test_the_lines_of_a_resumed_run_replace_those_of_later_steps(tmp_path):
    """The first run trained 3 steps. The second one resumed from step 1 and trained step 2."""
    first = [{"step": step, "n": 1} for step in (0, 1, 2, 2, 3)]
    second = [{"step": step, "n": 2} for step in (1, 2)]
    path = write_lines(tmp_path / "metrics.jsonl", *first, *second)
    assert json_lines.read_metrics(path) == [*first[:2], *second]


def test_the_lines_of_other_commands_count_only_without_a_training(tmp_path):
    training = [{"step": 1, "n": 1}, {"step": 2, "n": 2}]
    evaluation = {"step": 0, "command": "evaluate"}
    path = write_lines(tmp_path / "metrics.jsonl", *training, evaluation)
    assert json_lines.read_metrics(path) == training
    assert json_lines.read_metrics(write_lines(path, evaluation)) == [evaluation]
