"""An OpenEnv server for the tests. It runs in .venv-environments, with the package openenv.

The arguments are its port and its number of places.
"""

import os
import sys
import time

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """A number, or what the environment should do."""

    guess: str


class Hint(Observation):
    """The answer to a guess."""

    hint: str = ""


def raise_error():
    raise ValueError("the database is down")


DEEDS = {"raise": raise_error, "hang": lambda: time.sleep(6), "die": lambda: os._exit(3)}


class Game(Environment):
    """Guess the seed. The right number earns 1 and ends the episode, "?" has no reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=0, episode_id=None, **_):
        if seed < 0:
            raise ValueError("no such seed")
        self.seed = seed
        return Hint(hint="Guess.")

    def step(self, action, **_):
        DEEDS.get(action.guess, lambda: None)()
        is_right = action.guess == str(self.seed)
        reward = None if action.guess == "?" else float(is_right) or 0.25
        return Hint(hint=f"Not {action.guess}.", done=is_right, reward=reward)

    @property
    def state(self):
        return State(episode_id="x", step_count=0)


if __name__ == "__main__":
    port, places = map(int, sys.argv[1:3])
    app = create_app(Game, Guess, Hint, env_name="game", max_concurrent_envs=places)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
