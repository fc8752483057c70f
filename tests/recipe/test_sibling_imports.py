"""A file that a recipe names imports the files next to it."""

from __future__ import annotations

import asyncio
import inspect
import shutil
import sys
from pathlib import Path

import pytest
import torch

from kit.errors import UserFunctionError
from kit.recipe import user_functions
from kit.recipe.python_files import import_file
from tests.helpers.verifiers import list_rewards, make_router, play, run_session

# The folder of the file.
FILES = {
    "helpers.py": "VALUE = 'helpers'",
    "chain.py": "import helpers\nVALUE = helpers.VALUE + ' of chain'",
    "lazy.py": "def value():\n    import chain\n    return chain.VALUE",
    "pkg/__init__.py": "import helpers\nfrom . import part\nVALUE = helpers.VALUE + part.VALUE",
    "pkg/part.py": "VALUE = 'part'",
    "env.py": "VALUE = 'own env'",
    "json/inner.py": "VALUE = 'hidden by the package json'",
}


@pytest.fixture(autouse=True)
def forget_neighbors(tmp_path, monkeypatch):
    """Let each test have its own modules under the names of FILES."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def write_files(folder: Path, **files: str) -> Path:
    """Write FILES and further files with the given lines into a folder, and return it."""
    named = {f"{name}.py": text for name, text in files.items()}
    for name, text in (FILES | named).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("statement", "expression", "value"),
    [
        ("import chain", "chain.VALUE", "helpers of chain"),
        ("from lazy import value", "value()", "helpers of chain"),
        ("import pkg", "pkg.VALUE", "helperspart"),
        ("import json", "json.dumps(1)", "1"),  # as for Python, a plain folder comes last
    ],
)
def test_a_file_imports_the_files_next_to_it(tmp_path, statement, expression, value):
    folder = write_files(tmp_path, reward=f"{statement}\ndef f():\n    return {expression}")
    assert value == import_file(folder / "reward.py").f()


def test_a_name_of_another_module_is_refused(tmp_path):
    """The file would get that module, whose functions may be others."""
    folder = write_files(tmp_path / "one", reward="def f():\n    import env")
    with pytest.raises(UserFunctionError, match=r"`import env` would get .* instead of "):
        import_file(folder / "reward.py")
    folders = [write_files(tmp_path / name, reward="import chain") for name in ("two", "three")]
    import_file(folders[0] / "reward.py")
    with pytest.raises(UserFunctionError, match=r"two/chain\.py instead of .*three/chain\.py"):
        import_file(folders[1] / "reward.py")


VERIFIERS = """
import helpers
from pkg import part
from board import Board


def compute_score(data_source, solution_str, ground_truth, extra_info):
    import chain
    return float(solution_str in (chain.VALUE, part.VALUE, helpers.VALUE))


class Game:
    def reset(self, row):
        self.board = Board()

    def step(self, text):
        self.board.turns.append(text)
        return "more", float(len(self.board.turns)), len(self.board.turns) == 3
"""
BOARD = "class Board:\n    def __init__(self):\n        self.turns = []"


def test_verifiers_import_their_siblings_in_their_processes(tmp_path):
    """The steps of three games run in two processes."""
    folder = write_files(tmp_path / "my rewards", my=VERIFIERS, board=BOARD)
    router = make_router(tmp_path, f"{folder}/my.py:compute_score")
    assert list_rewards(play(router, "helpers", "helpers of chain", "other")) == [1.0, 1.0, 0.0]
    router = make_router(tmp_path, f"{folder}/my.py:Game", processes=2)

    async def play_three_games():
        async with router:
            return await asyncio.gather(*(run_session(router, *"abc") for _ in range(3)))

    for game in asyncio.run(play_three_games()):
        assert [turn.reward for turn in game] == [1.0, 2.0, 3.0]


LOSS = """
import losses_here as own

def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
         rollout_is_weights=None):
    return own.scale(advantages).mean(), {"count": own.COUNT.total}
"""
LOSSES = """
from pkg.part import VALUE

class Count:
    total = len(VALUE)

COUNT = Count()

def scale(values):
    return values * COUNT.total
"""


def test_a_worker_gets_a_loss_with_the_siblings_of_its_file(tmp_path, monkeypatch):
    """The folder does not exist in the process of the worker."""
    import ray

    folder = write_files(tmp_path / "losses", my=LOSS, losses_here=LOSSES)
    user_functions.register_in_verl("grpo", f"{folder}/my.py:loss")
    loss = user_functions.load_function(f"{folder}/my.py:loss", user_functions.LOSS_MODE)
    pickled = ray.cloudpickle.dumps(loss)
    shutil.rmtree(folder)
    for name in (loss.__module__, "losses_here", "helpers", "pkg", "pkg.part"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    unpickled = ray.cloudpickle.loads(pickled)
    value, metrics = unpickled(None, None, torch.ones(2), None, "", None)
    assert (float(value), metrics) == (4.0, {"count": 4})
    assert list(inspect.signature(unpickled).parameters) == list(
        user_functions.CALLS[user_functions.LOSS_MODE]
    )


def test_an_import_that_fails_is_an_error_with_its_line(tmp_path):
    folder = write_files(tmp_path / "my folder", my="import lost", lost="import absent")
    with pytest.raises(UserFunctionError, match=r"lost\.py:1 in <module>: ModuleNotFoundError"):
        user_functions.load_function(f"{folder}/my.py:f", "env.reward")
