"""Tests of a run's folder: a full disk, incomplete lines, and two runs with the same name."""

from __future__ import annotations

import builtins
import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import algorithm
import training
from kit.data.json_lines import read_metrics, read_objects
from kit.errors import RunError
from kit.recipe.training_engine import SHARDS
from kit.run import checkpoints, cli, export, finite_check
from kit.run.launch import Started
from kit.run.run import Run
from tests.helpers.recipes import ROOT, load
from tests.helpers.trainer import Servers


class Disk:
    """A disk that is full from its `room`-th write on.

    That write writes half of the data, and then raises ENOSPC.
    """

    def __init__(self, folder: Path, monkeypatch):
        self.folder = folder
        self.room = float("inf")
        self.writes = 0
        disk = self
        original_open = io.open

        class File(io.FileIO):
            def write(self, data):
                disk.count_write(lambda: super(File, self).write(bytes(data)[: len(data) // 2]))
                return super().write(data)

        def open_file(
            file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **others
        ):
            is_inside = isinstance(file, int) or Path(file).absolute().is_relative_to(folder)
            if not is_inside or not set(mode) & set("wax+"):
                return original_open(file, mode, buffering, encoding, errors, newline, **others)
            raw = File(file, mode.replace("b", "").replace("t", ""))
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            if "b" in mode:
                return buffered
            return io.TextIOWrapper(buffered, encoding, errors, newline)

        monkeypatch.setattr(builtins, "open", open_file)
        monkeypatch.setattr(io, "open", open_file)
        for name in ("replace", "mkdir", "fsync"):
            monkeypatch.setattr(os, name, self.wrap(getattr(os, name)))

    def count_write(self, before_error=lambda: None):
        """Count a write, and raise an error if the disk is full."""
        self.writes += 1
        if self.writes >= self.room:
            before_error()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def wrap(self, function):
        """Return a function whose calls count as writes."""

        def call(*arguments, **named):
            self.count_write()
            return function(*arguments, **named)

        return call


class Group:
    """A worker group of one rank, whose shards have a few bytes."""

    world_size = 1

    def save_checkpoint(self, path, *_):
        Path(path).mkdir(parents=True)
        for prefix in SHARDS.values():
            (Path(path) / f"{prefix}_world_size_1_rank_0.pt").write_bytes(b"shard")

    def load_checkpoint(self, path):
        assert Path(path).is_dir(), path


@pytest.fixture
def command(workspace, tmp_path, monkeypatch):
    """Return a function that runs `train` with doubles, and returns its error message."""
    monkeypatch.chdir(tmp_path)
    changes = ("trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.test_freq=1")
    recipe, data, _ = load(workspace, *changes)
    workers = training.Workers(Group(), None, None)
    monkeypatch.setattr("kit.run.launch.start", lambda *_, **__: Started(workers, Servers([])))
    monkeypatch.setattr(
        training, "update_actor", lambda *_: {"actor/grad_norm": 1.0, "actor/pg_loss": 0.5}
    )
    monkeypatch.setattr(finite_check, "find_nonfinite_weights", lambda _: [])
    monkeypatch.setattr(algorithm.Trainer, "compare_engines", lambda *_: None)  # no engine runs
    monkeypatch.setattr("lab.report.report_page.render_page", lambda _: "page")
    for module in ("kit.run.run_files", "kit.run.checkpoints"):
        # the whole recipe takes 0.3 s to write
        monkeypatch.setattr(f"{module}.write_yaml", lambda _: "short: true")
    monkeypatch.setattr(sys, "argv", ["algorithm.py", "--config", "tiny", "--quiet"])

    def write_step(checkpoint, target):
        target.mkdir(exist_ok=True)
        (target / checkpoints.EXPORTED).write_text(str(checkpoints.step_of(checkpoint)))

    monkeypatch.setattr(export, "export", write_step)

    def make_plan(*_, **__):
        resume_from, notes = checkpoints.find_resume_point(recipe)
        return cli.Plan(recipe, data, resume_from, [], notes)

    monkeypatch.setattr(cli, "plan", make_plan)

    def run_command() -> str:
        try:
            with cli.exit_on_errors():
                planned = cli.read_plan()
                assert planned
                algorithm.run_command(planned)
        except SystemExit as end:
            return str(end.code)
        return ""

    return run_command


def assert_complete_lines(folder: Path) -> None:
    """Assert that every line of every JSONL file is complete."""
    for path in folder.rglob("*.jsonl"):
        text = path.read_bytes()
        assert not text or text.endswith(b"\n"), path
        assert len(read_objects(path)) == len(text.splitlines()), path


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.soak)])
def test_a_full_disk_at_any_write_is_a_one_line_error_and_loses_nothing(
    command, tmp_path, monkeypatch, stride
):
    disk = Disk(tmp_path, monkeypatch)
    folder = tmp_path / "runs" / "tiny"
    unwritten = set()
    for room in range(1, 1000, stride):
        disk.room = room
        disk.writes = 0
        message = command()
        if disk.writes < room:
            break
        disk.room = float("inf")
        if message:  # an error while writing the report does not end the run
            assert message.startswith("error: ") and "No space left on device" in message, message
            assert "\n" not in message and "Traceback" not in message, message
            unwritten.add(message.partition(" cannot be")[0])
        assert_complete_lines(folder)
        paths = (folder / "checkpoints").glob("global_step_*")
        saved = [path for path in paths if not checkpoints.find_damage(path)]
        last, _ = checkpoints.find_newest(folder / "checkpoints")
        assert not saved or last, (room, saved)
        if room % 4 == 0 and not (folder / "export" / checkpoints.EXPORTED).exists():
            last_step = checkpoints.step_of(last) if last else -1
            lines = read_metrics(folder / "metrics.jsonl")
            kept = [line for line in lines if line["step"] <= last_step]
            assert command() == "", room  # the disk has room again
            lines = read_metrics(folder / "metrics.jsonl")
            assert lines[: len(kept)] == kept, room
            steps = [line["step"] for line in lines if "training/global_step" in line]
            # The line of step 1 may be missing: the disk may become full after its checkpoint.
            is_exported = (folder / "export" / checkpoints.EXPORTED).is_file()
            assert steps in ([1, 2], [2], [1]) and is_exported, (room, steps)
            assert_complete_lines(folder)
        subprocess.run(["rm", "-r", folder], check=False)
    else:
        raise AssertionError("no run was complete")
    assert room > 40 and any("metrics.jsonl" in text for text in unwritten), unwritten


def test_an_incomplete_line_is_removed_and_the_run_resumes(command, tmp_path, capsys):
    assert command() == ""
    folder = tmp_path / "runs" / "tiny"
    (folder / "export" / checkpoints.EXPORTED).unlink()
    before = (folder / "metrics.jsonl").read_bytes()
    for name in ("metrics", "failures"):
        with (folder / f"{name}.jsonl").open("ab") as out:
            out.write(b'{"step": 2, "rollout/rew')
    capsys.readouterr()
    assert command() == ""
    output = capsys.readouterr().out
    assert output.count("Removed the incomplete last line of runs/tiny/metrics.jsonl") == 1, output
    assert (folder / "metrics.jsonl").read_bytes().startswith(before)
    assert_complete_lines(folder)


def test_an_export_that_fails_keeps_the_earlier_one(tmp_path, monkeypatch):
    checkpoint = tmp_path / "global_step_7"
    target = tmp_path / "export"
    target.mkdir()
    for name in ("model.safetensors", "README.md", "model.safetensors.index.json"):
        (target / name).write_text("of step 5")

    def merge(_checkpoint, folder):
        folder.mkdir()
        (folder / "model.safetensors").write_text("of step 7")

    def fill_the_disk(checkpoint, folder):
        merge(checkpoint, folder)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(export, "merge", fill_the_disk)
    with pytest.raises(OSError, match="full"):
        export.export(checkpoint, target)
    assert [path.read_text() for path in target.iterdir()] == ["of step 5"] * 3
    monkeypatch.setattr(export, "merge", merge)
    export.export(checkpoint, target)
    contents = [path.read_text() for path in sorted(target.iterdir())]
    # a file that the user added is kept, the index of the old weights is deleted
    assert contents == ["of step 5", "of step 7", "7\n"]


# --- two runs with the same name -----------------------------------------------------------------

# Locks a folder, and prints the id of a child process that holds the open file.
HOLD_LOCK = """
import subprocess, sys, time
from pathlib import Path
from kit.run.files import lock_folder
lock = lock_folder(Path(sys.argv[1]))
child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, close_fds=False)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_second_run_is_an_error_until_the_first_ends_or_is_killed(
    workspace, tmp_path, monkeypatch
):
    """The first is killed. A child that it executed is still alive."""
    monkeypatch.chdir(tmp_path)
    recipe = load(workspace).recipe
    folder = Path("runs/tiny")
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, folder],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    child = int(holder.stdout.readline())
    try:
        for command in ("train", "evaluate"):
            in_use = rf"runs/tiny is in use by another run \(pid {holder.pid} on .*Wait"
            with (
                pytest.raises(RunError, match=in_use),
                Run(recipe.model_copy(update={"command": command})),
            ):
                pytest.fail("two runs with the same name")
        assert (folder / "metrics.jsonl").read_text() == '{"step": 1}\n'
        assert not (folder / "config.yaml").exists()
        holder.kill()
        holder.wait()
        assert Path(f"/proc/{child}").exists()
        evaluation = recipe.model_copy(update={"command": "evaluate"})
        with Run(evaluation):
            assert (folder / "run.lock").read_text().startswith(f"pid {os.getpid()} on ")
    finally:
        holder.kill()
        os.kill(child, 9)


def test_two_runs_cannot_save_into_one_folder(workspace, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shared = f"trainer.default_local_dir={tmp_path / 'shared'}"
    first = load(workspace, "trainer.experiment_name=one", shared).recipe
    second = load(workspace, "trainer.experiment_name=two", shared).recipe
    with Run(first):
        with pytest.raises(RunError, match="shared is in use by another run"):
            with Run(second):
                pytest.fail("two runs that save to the same folder")
    with Run(second):
        pass
