"""A file that a recipe names imports the files next to it, and never another module of the name."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch

from env import Task
from kit.config import python_files, user_functions
from kit.config.python_files import import_file
from kit.errors import UserFunctionError
from kit.gym.python_verifiers.settings import read_verifiers
from kit.runs import verifier_trial
from tests.helpers.verifiers import (
    list_rewards,
    make_recipe,
    make_router,
    play,
    run_session,
)

# The folder of the file. Some names are those of other modules.
FILES = {
    "helpers.py": "VALUE = 'helpers'",
    "chain.py": "import helpers\nVALUE = helpers.VALUE + ' of chain'",
    "lazy.py": "def value():\n    import chain\n    return chain.VALUE",
    "pkg/__init__.py": "import helpers\nfrom . import part\nVALUE = helpers.VALUE + part.VALUE",
    "pkg/part.py": "from pkg.deep import leaf\nfrom .deep.leaf import VALUE as AGAIN\n"
    "VALUE = leaf.VALUE + AGAIN",
    "pkg/deep/__init__.py": "",
    "pkg/deep/leaf.py": "import below\nVALUE = 'leaf' + below.VALUE",
    "below.py": "VALUE = ''",
    "plain/inner.py": "import helpers\nVALUE = 'inner' + helpers.VALUE",  # without __init__.py
    "random.py": "VALUE = 'own random'",
    "env.py": "VALUE = 'own env'",
    "uses_env.py": "import env",
    "trl.py": "VALUE = 'own trl'",
    "json/inner.py": "VALUE = 'hidden by the package json'",
}


@pytest.fixture(autouse=True)
def forget_neighbors():
    """Let each test have its own modules under the names of FILES."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in python_files.NEIGHBORS]:
        del sys.modules[name]
    python_files.NEIGHBORS.clear()


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
        ("import helpers", "helpers.VALUE", "helpers"),
        ("from helpers import *", "VALUE", "helpers"),
        ("from lazy import value", "value()", "helpers of chain"),
        ("import pkg", "pkg.VALUE", "helpersleafleaf"),
        ("from pkg import part, deep", "part.VALUE + deep.__name__[-4:]", "leafleafdeep"),
        ("from plain import inner", "inner.VALUE", "innerhelpers"),
        ("import json", "json.dumps(1)", "1"),  # as for Python, a plain folder comes last
    ],
)
def test_a_file_imports_the_files_next_to_it(tmp_path, statement, expression, value):
    folder = write_files(tmp_path, reward=f"{statement}\nRESULT = {expression}")
    assert value == import_file(folder / "reward.py").RESULT


@pytest.mark.parametrize("name", ["random", "env", "uses_env"])
def test_a_name_of_another_module_is_refused(tmp_path, name):
    """The file would import that module, whose functions may be others."""
    folder = write_files(tmp_path, reward=f"def f():\n    import {name}")
    conflict = "env" if name == "uses_env" else name
    with pytest.raises(UserFunctionError, match=rf"`import {conflict}` would get .* instead of "):
        import_file(folder / "reward.py")


def test_files_of_one_name_in_two_folders_are_refused_only_if_both_are_imported(tmp_path):
    first = write_files(tmp_path / "one", reward="import chain\nVALUE = chain.VALUE")
    second = write_files(tmp_path / "two", reward="VALUE = 2", other="import lazy")
    assert import_file(first / "reward.py").VALUE == "helpers of chain"
    assert import_file(second / "reward.py").VALUE == 2
    with pytest.raises(UserFunctionError, match=r"one/chain\.py instead of .*two/chain\.py"):
        import_file(second / "other.py")


def test_no_other_module_changes_and_only_imported_names_are_entered(tmp_path):
    folder = write_files(tmp_path, reward="import helpers, json")
    search_path = list(sys.path)
    before = dict(sys.modules)
    import_file(folder / "reward.py")
    assert all(sys.modules[name] is before[name] for name in before)
    assert sys.path == search_path and set(python_files.NEIGHBORS) == {"helpers"}
    for library in (random, json):
        assert importlib.import_module(library.__name__) is library


@pytest.mark.parametrize("name", ["my reward.py", "reward.v2.py", "2nd-reward.py", "a.py"])
def test_a_file_may_have_any_name_and_be_reached_by_any_path(tmp_path, monkeypatch, name):
    folder = write_files(tmp_path / "a folder.with dots")
    lines = ["import chain", "def reward(episode):", "    return len(chain.VALUE)"]
    (folder / name).write_text("\n".join(lines))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link.py").symlink_to(folder / name)
    monkeypatch.chdir(tmp_path / "elsewhere")
    modules = set()
    for path in (f"../{folder.name}/{name}", str(folder / name), "link.py"):
        function = user_functions.load_function(f"{path}:reward", "env.reward")
        assert function(None) == len("helpers of chain")
        modules.add(function.__module__)
    assert len(modules) == 1


def test_a_folder_in_the_search_path_has_no_second_copy_of_its_modules(tmp_path, monkeypatch):
    """The kit's own folder is in it: a second class UserFunctionError would not be caught."""
    source = "import own_copy\nfrom kit.errors import UserFunctionError"
    folder = write_files(tmp_path, own_copy="VALUE = 1", reward=source)
    monkeypatch.syspath_prepend(str(folder))
    module = import_file(folder / "reward.py")
    own_copy = importlib.import_module("own_copy")
    assert module.own_copy is own_copy and module.UserFunctionError is UserFunctionError
    del sys.modules["own_copy"]


# --- in the processes of verifiers ---------------------------------------------------------------

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


def test_verifiers_import_their_siblings_in_the_pool_and_in_the_trial(tmp_path):
    folder = write_files(tmp_path / "my rewards", my=VERIFIERS, board=BOARD)
    reference = f"{folder}/my.py:compute_score"
    results = play(make_router(tmp_path, reference), "helpers", "helpers of chain", "other")
    assert list_rewards(results) == [1.0, 1.0, 0.0]
    recipe = make_recipe(reference)
    task = Task("r:1", {"answer": "helpers"}, "compute_score", [], [])
    specs = read_verifiers(recipe.verl).specs
    lines = verifier_trial.try_verifiers(specs, [task], recipe)
    assert lines == [
        "tried on row r:1: reward 0 for 'So the answer is 7.', 1 for the ground truth 'helpers'"
    ]


def test_the_state_of_an_environment_may_have_objects_of_a_sibling(tmp_path):
    """Its steps run in two processes, which pickle the objects by the names of their classes."""
    folder = write_files(tmp_path, my=VERIFIERS, board=BOARD)
    router = make_router(tmp_path, f"{folder}/my.py:Game", processes=2)

    async def play_three_games():
        async with router:
            return await asyncio.gather(*(run_session(router, *"abc") for _ in range(3)))

    for game in asyncio.run(play_three_games()):
        assert [turn.reward for turn in game] == [1.0, 2.0, 3.0]


# --- functions of the recipe ---------------------------------------------------------------------

FUNCTIONS = """
import helpers
from pkg.part import VALUE
import losses_here as own


def reward(episode):
    import chain
    return len(chain.VALUE) + len(VALUE)


def keep(episodes):
    return own.keep(episodes)


def take(tasks, size, batch, seed, pass_rates):
    return own.keep(tasks)[:size]


def flat(token_level_rewards, response_mask):
    return own.scale(token_level_rewards), own.scale(token_level_rewards)


def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
         rollout_is_weights=None):
    return own.scale(advantages).mean(), {helpers.VALUE: own.COUNT.total}
"""
LOSSES = """
import helpers

class Count:
    total = len(helpers.VALUE)

COUNT = Count()

def keep(items):
    return list(items)

def scale(values):
    return values * COUNT.total
"""


def load(folder: Path, function: str, key: str):
    return user_functions.load_function(f"{folder}/my.py:{function}", key)


def test_functions_of_a_recipe_import_their_siblings(tmp_path):
    folder = write_files(tmp_path, my=FUNCTIONS, losses_here=LOSSES)
    assert load(folder, "reward", "env.reward")(None) == len("helpers of chain") + len("leafleaf")
    tasks = [Task("r:1", {}, "s", [], [])]
    assert load(folder, "keep", "env.filters")([]) == []
    assert load(folder, "take", "env.sampler")(tasks, 1, 0, 0, {}) == tasks
    rewards = torch.ones(1, 2)
    advantage = load(folder, "flat", user_functions.ADVANTAGE)
    assert torch.equal(advantage(rewards, rewards)[0], 7 * rewards)


def test_a_worker_gets_a_loss_with_the_siblings_of_its_file(tmp_path, monkeypatch):
    """The folder does not exist in the process of the worker."""
    import ray

    folder = write_files(tmp_path / "losses", my=FUNCTIONS, losses_here=LOSSES)
    user_functions.register_in_verl("grpo", f"{folder}/my.py:loss")
    loss = load(folder, "loss", user_functions.LOSS_MODE)
    pickled = ray.cloudpickle.dumps(loss)
    shutil.rmtree(folder)
    for name in [loss.__module__, *python_files.NEIGHBORS]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    python_files.NEIGHBORS.clear()
    unpickled = ray.cloudpickle.loads(pickled)
    value, metrics = unpickled(None, None, torch.ones(2), None, "", None)
    assert (float(value), metrics) == (7.0, {"helpers": 7})
    assert list(inspect.signature(unpickled).parameters) == list(user_functions.LOSS)
    with pytest.raises(UserFunctionError, match=r"loss_mode=.*my\.py:loss failed"):
        unpickled(None, None, None, None, "", None)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import absent", "'absent'. Install it for {python}, or save it in {folder} and"),
        ("import uses_absent", "'absent'. Install it for {python}, or save it in {folder} and"),
        (
            "import importlib\nimportlib.import_module('helpers')",
            "or save it in {folder} and import it with an import statement.",
        ),
        ("1 / 0", "ZeroDivisionError: division by zero. Run `python '{folder}/my.py'` to see"),
    ],
)
def test_an_import_that_fails_is_an_error_with_the_right_fix(tmp_path, source, expected):
    folder = write_files(tmp_path / "my folder", my=source, uses_absent="import absent")
    expected = expected.format(python=sys.executable, folder=folder)
    recipe = make_recipe(f"{folder}/my.py:f")
    specs = read_verifiers(recipe.verl).specs
    with pytest.raises(UserFunctionError) as error:
        verifier_trial.try_verifiers(specs, [], recipe)
    assert expected in str(error.value)
    with pytest.raises(UserFunctionError) as error:
        load(folder, "f", "env.reward")
    assert expected.partition(". ")[2] in str(error.value)
