"""Tests that each page and example runs commands for a GPU node in that node's environment.

On a GPU node only .venv-gpu exists (make math). .venv has packages for a CPU.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from tests.helpers.pages import PAGES, read_blocks

GPU = ".venv-gpu"
NAMES = r"\.venv[\w.-]*"
ACTIVATE = re.compile(rf"\bsource ({NAMES})/bin/activate")
# `ray start`, `python algorithm.py ...`, with or without the folder of an environment
COMMAND = re.compile(
    rf"(?:(?P<folder>{NAMES})/bin/)?(?P<words>\b(?:ray (?:start|stop|get-auth-token)"
    r"|python (?:\S*algorithm\.py|benchmarks/gpu_acceptance\.py))\b[^\n]*)"
)
# Interfaces that verl's groups use between nodes: see docs/cluster.md.
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Command(NamedTuple):
    """A command of a page, with the environment in which it runs ("" if the page names none)."""

    place: str
    environment: str
    text: str
    block: str


def read_commands(text: str, place: str, active: str = "") -> list[Command]:
    """The commands of a block that start Ray or a run."""
    lines = re.sub(r"\\\n\s*", "", text).replace(">-\n    ", "").splitlines()
    commands = []
    for line in lines:
        command = re.sub(r"(^|\s)#.*", "", line)
        if activated := ACTIVATE.search(command):
            active = activated[1]
        for match in COMMAND.finditer(command):
            commands.append(Command(place, match["folder"] or active, match["words"], text))
    return commands


def list_commands_of_pages() -> list[Command]:
    """The commands of all pages. Activated environments stay active until the end of a page."""
    commands: list[Command] = []
    for page in PAGES:
        active = ""
        for block in read_blocks(page):
            if block.language in ("bash", "text", "yaml"):
                commands += read_commands(block.text, page.name, active)
            if activated := ACTIVATE.findall(block.text):
                active = activated[-1]
    return commands


def needs_gpus(command: Command) -> bool:
    """Whether a command is for a GPU node. Ray in a block with --config cpu rehearses it."""
    text = command.block if command.text.startswith("ray ") else command.text
    on_cpu = re.search(r"--config cpu\b|\.py show\b|--dry-run\b", text)
    return on_cpu is None


def find_wrong_environments(commands: list[Command]) -> list[tuple[str, str, str]]:
    """The commands for a GPU node that run in the environment for a CPU."""
    cpu = ("", ".venv")
    return [c[:3] for c in commands if c.environment in cpu and needs_gpus(c)]


def test_commands_for_a_gpu_node_use_its_environment():
    commands = list_commands_of_pages()
    on_gpus = [command for command in commands if needs_gpus(command)]
    assert len(on_gpus) > 8
    assert find_wrong_environments(commands) == []


@pytest.mark.parametrize(
    ("block", "is_wrong"),
    [
        (".venv/bin/ray start --head", True),
        ("ray start --head", True),
        ("srun x \\\n    .venv/bin/ray start", True),
        (".venv-gpu/bin/ray start --head", False),
        ("source .venv-gpu/bin/activate\nray start --head", False),
        (".venv/bin/ray start\n.venv/bin/python algorithm.py --config a --config cpu", False),
        ("python algorithm.py --config math --dry-run", False),
        (".venv/bin/python algorithm.py show runs/a", False),
        ("  entrypoint: >-\n    python algorithm.py --config math\n    x=1", True),
        ("  entrypoint: python algorithm.py --config math", True),
        ("python algorithm.py --config a    # without --dry-run", True),
    ],
)
def test_a_wrong_environment_is_found(block, is_wrong):
    assert bool(find_wrong_environments(read_commands(block, "page"))) == is_wrong


def read_cluster_blocks() -> list[str]:
    """The blocks of all pages in which GPU nodes start Ray."""
    blocks = [c.block for c in list_commands_of_pages() if c.text.startswith("ray start")]
    return [block for block in dict.fromkeys(blocks) if "--config cpu" not in block]


def test_ray_starts_after_the_interfaces_are_set():
    """Ray's workers inherit the environment of `ray start`."""
    blocks = read_cluster_blocks()
    assert len(blocks) == 3
    for block in blocks:
        before = block.partition("ray start")[0]
        assert re.search(r"^export .*=eth0", before, re.MULTILINE)
        assert all(name in before for name in INTERFACES)


def test_each_srun_passes_the_cores_of_its_task():
    """Since Slurm 22.05, srun does not inherit them."""
    count = 0
    for page in PAGES:
        for block in read_blocks(page):
            code = re.sub(r"(^|\s)#(?!SBATCH).*", "", block.text.replace("\\\n", " "))
            for call in re.findall(r"\bsrun\b[^\n]*", code):
                count += 1
                assert '--cpus-per-task="$SLURM_CPUS_PER_TASK"' in call, call
    assert count == 3


def test_cluster_examples_verify_math_in_warm_processes():
    """Gym's math_with_judge forks for each response. Several GPUs would wait for it."""
    on_clusters = []
    for command in list_commands_of_pages():
        words = command.text.split()
        several_nodes = "trainer.nnodes" in command.text
        if needs_gpus(command) and several_nodes and words[words.index("--config") + 1] == "math":
            on_clusters.append(command)
    assert len(on_clusters) == 4
    assert [c[:3] for c in on_clusters if "--config warm_math" not in c.text] == []
