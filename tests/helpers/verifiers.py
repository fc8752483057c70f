"""Helpers of the tests of Python verifiers: make a router for one verifier, and play a session."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from omegaconf import OmegaConf

import gym_client
from gym_client import GymError
from kit.chat.parsed_response import ParsedResponse
from kit.features import make_features
from kit.recipe.load import base_configs
from kit.recipe.recipe import Recipe
from kit.recipe.sections import read_sections
from kit.recipe.user_functions import load_recipe_functions
from kit.verify.python_verifiers.pool import make_pools
from kit.verify.python_verifiers.settings import read_verifiers
from kit.verify.verifiers import VerifierRouter

FOLDER = Path(__file__).resolve().parents[1] / "verify" / "python_verifiers"
EXAMPLE_SOURCE = (FOLDER / "example_verifiers.py").read_text()
HOSTILE_SOURCE = (FOLDER / "hostile_verifiers.py").read_text()
ROW = {"question": "say 7", "answer": "7", "responses_create_params": {}}
TESTS = json.dumps({"inputs": ["1 2", "3 4"], "outputs": ["7", "7"]})
PROGRAM_ROW = {
    "data_source": "taco",
    "reward_model": {"ground_truth": TESTS},
    "responses_create_params": {},
}


MATH_ROW = {
    "data_source": "numina_olympiads",
    "reward_model": {"ground_truth": "x+y"},
    "responses_create_params": {},
}
needs_bubblewrap = pytest.mark.skipif(
    not shutil.which("bwrap"), reason="needs bubblewrap, an optional package"
)


def make_recipe(verifier, allow_unsandboxed_code=False, **pool) -> Recipe:
    """Make a recipe with a Python verifier. pool: keys of env.verifier_pool."""
    pool = {"processes": 1, "timeout_s": 20.0, "memory_gb": 1.0} | pool
    env = {"verifier": verifier, "verifier_pool": pool}
    env["allow_unsandboxed_code"] = allow_unsandboxed_code
    _, base = base_configs()
    config: Any = OmegaConf.merge(base, {"env": env})
    functions = load_recipe_functions(config)
    active = make_features(config, "train")
    return Recipe("train", config, base, read_sections(config), functions, frozenset(), active)


def make_router(folder, verifier, **settings):
    """Make a router with one Python verifier.

    folder: for the logs. settings: the arguments of make_recipe.
    """
    recipe = make_recipe(verifier, **settings)
    pools = make_pools(recipe, read_verifiers(recipe.verl).specs, folder)
    return VerifierRouter(gym_client.Gym({}), pools)


async def run_session(router, *texts, row=None):
    """Run one session with the only verifier, with one turn for each text or parsed response.

    Return the result of each turn, or its GymError.
    """
    (name,) = router.pools
    results = []
    async with router.session(name, row or ROW) as session:
        call = session.verify if session.kind == "verify" else session.step
        for text in texts:
            response = ParsedResponse.of_text(text) if isinstance(text, str) else text
            try:
                results.append(await call({}, response))
            except GymError as error:
                results.append(error)
    return results


def play(router, *texts, row=None):
    """Open the router and run one session. Return a result or a GymError for each text."""

    async def run():
        async with router:
            return await run_session(router, *texts, row=row)

    return asyncio.run(run())


def list_rewards(results):
    """Return the reward of each result, or the reason of its error."""
    return [r.reason if isinstance(r, GymError) else r.reward for r in results]


def find_remaining_processes(*command: str) -> list[int]:
    """Wait up to 2 s until no process has this command line. Return the remaining ids."""
    deadline = time.monotonic() + 2
    while True:
        pids = []
        for process in psutil.process_iter(["cmdline"]):
            if process.info["cmdline"] == [*command]:
                pids.append(process.pid)
        if not pids or time.monotonic() > deadline:
            return pids
        time.sleep(0.05)


def enter_hostile_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a new folder that has HOSTILE_SOURCE as my.py."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "my.py").write_text(HOSTILE_SOURCE)
    monkeypatch.chdir(folder)
