"""Call each custom function of a recipe once on synthetic episodes, before any worker starts.

Convenience: a mistake in a function shows after seconds, without a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NoReturn

import numpy as np

import env
import gym_client
from gym_client import Json
from kit.data.episode import Episode, append_tokens
from kit.engine.inputs import RunInputs
from kit.errors import UserFunctionError
from kit.recipe.keys import ACTOR
from kit.recipe.recipe import Recipe
from kit.recipe.user_functions import (
    ADVANTAGE,
    LOSS_MODE,
    LossInputs,
    is_user_function,
    load_function,
    make_loss_config,
    select_arguments,
)

TEXT = "So the answer is 7."
GROUPS = 2
MAX_GROUP = 4  # episodes


class NeedsVerifier(Exception):  # noqa: N818  (no error: the trial ends here)
    """A function reads a field that only a real verifier fills in."""


def raise_needs_verifier(*_: object, **__: object) -> NoReturn:
    """Take the place of every method that reads a mapping."""
    raise NeedsVerifier


class UnknownFields(Json):
    """The verifier's fields of a synthetic episode. Their values are unknown before a run.

    If a function reads one, it cannot be tried. So each access raises NeedsVerifier.
    """

    __contains__ = __getitem__ = __iter__ = __len__ = __reversed__ = raise_needs_verifier
    __eq__ = __ne__ = __or__ = __ror__ = raise_needs_verifier
    get = keys = values = items = copy = pop = raise_needs_verifier


def check_functions(recipe: Recipe, inputs: RunInputs) -> None:
    """Call every custom function of a recipe once, to find mistakes before the workers start.

    Without training tasks (evaluate, sft) there is nothing to call. A function that reads fields of
    the verifier's answer is not checked, since these are unknown before a run. Raises
    UserFunctionError.
    """
    tasks = [*inputs.train, *inputs.generated]
    if not tasks or not isinstance(tasks[0], env.Task):
        return
    for call in list_calls(recipe, inputs):
        try:
            call()
        except UserFunctionError as error:
            if not isinstance(error.__cause__, NeedsVerifier):
                note = "(Tried on synthetic episodes. Nothing was started.)"
                raise UserFunctionError(f"{error} {note}") from error


def list_calls(recipe: Recipe, inputs: RunInputs) -> Iterator[Callable[[], object]]:
    """Yield a call of each custom function of a recipe."""
    n = min(max(recipe.rollout.n, 2), MAX_GROUP)
    functions = recipe.functions
    yield functools.partial(functions.reward, make_episodes(inputs, n)[-1])
    for function in functions.filters:
        yield functools.partial(function, make_episodes(inputs, n))
    if inputs.train and functions.sampler:  # it picks from the rows of files
        data = recipe.data
        tasks = list(inputs.train)
        yield functools.partial(functions.sampler, tasks, data.train_batch_size, 1, data.seed, {})
    advantage = recipe.algorithm.adv_estimator
    if is_user_function(advantage):
        estimator = load_function(advantage, ADVANTAGE)
        yield functools.partial(estimator, **select_arguments(estimator, make_batch(recipe)))
    if is_user_function(recipe.get(LOSS_MODE)):
        yield functools.partial(call_loss, recipe)


def call_loss(recipe: Recipe) -> None:
    """Compute a custom loss and its gradient as a worker does. Raises UserFunctionError."""
    name = recipe.get(LOSS_MODE)
    batch = make_batch(recipe)
    mask = batch["response_mask"]  # [B, R]
    actor = make_loss_config(recipe.for_verl(ACTOR), mask)
    inputs = LossInputs(
        old_log_prob=batch["old_log_probs"],
        log_prob=batch["old_log_probs"].clone().requires_grad_() + 0.1,
        advantages=batch["token_level_rewards"] - 0.5,
        response_mask=mask.bool(),
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
        rollout_is_weights=batch["rollout_is_weights"],
    )
    loss, _ = load_function(name, LOSS_MODE)(**vars(inputs))
    try:
        loss.backward()
    except RuntimeError as error:
        raise UserFunctionError(
            f"{LOSS_MODE}={name}: its loss has no gradient: {error}. Compute it from log_prob, and "
            "change nothing in place."
        ) from error


def make_episodes(inputs: RunInputs, n: int) -> list[Episode]:
    """Make n synthetic responses to each of the first two rows. Those of a row are a group.

    In a group, the rewards rise from 0 to 1 and the responses get longer. The first response ended
    at the length limit.
    """
    ids = inputs.tokenizer.encode(TEXT, add_special_tokens=False)
    episodes = []
    for group, task in enumerate([*inputs.train, *inputs.generated][:GROUPS]):
        for member in range(n):
            episode = make_episode(task, f"0/{group}", ids, member + 1)
            episode.reward = member / (n - 1)
            episode.ended = "stop" if member else "length"
            episodes.append(episode)
    return episodes


def make_episode(task: env.Task, group: str, ids: list[int], repeats: int) -> Episode:
    """Make a synthetic response to a row: TEXT with the token ids `ids`, several times.

    If the row has tools or the environment writes the prompt, the response has two turns.
    """
    episode = Episode(task.row_id, group, task.server, task.prompt_ids or ids, row=task.row)
    episode.baseline = 0.5
    episode.reward_components = UnknownFields()
    episode.verify_result = UnknownFields()
    episode.timings = dict.fromkeys(("generate", "tools", "verify", "verify_call"), 1.0)
    is_multi_turn = bool(task.tools) or not task.messages
    for turn in range(2 if is_multi_turn else 1):
        if turn:
            episode.output.append({"role": "user", "type": "message", "content": TEXT})
            append_tokens(episode, ids)
        episode.output.append(gym_client.make_message(" ".join([TEXT] * repeats)))
        append_tokens(episode, ids * repeats, [-1.0] * len(ids) * repeats)
    return episode


def make_batch(recipe: Recipe) -> Json:
    """Make the fields of AdvantageInputs, as training.compute_advantages passes them.

    There are two groups of two episodes: B=4, R=5. The second response has two turns: its third
    token is observed.
    """
    import torch

    mask = torch.tensor(
        [[1, 1, 1, 1, 0], [1, 1, 0, 1, 1], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    )  # [B, R]
    turn = mask - 1  # [B, R]
    turn[1, 3:] = 1
    rewards = torch.zeros(4, 5)  # [B, R]
    rewards[0, 3] = 0.5
    rewards[1, 4] = 1.0
    rewards[2, 4] = 0.25
    settings = recipe.algorithm
    has_weights = settings.rollout_correction.rollout_is
    return {
        "token_level_rewards": rewards,
        "token_level_scores": rewards.clone(),
        "response_mask": mask,
        "turn": turn,
        "values": 0.5 * mask,
        "sum_pi_squared": 0.5 * mask,
        "reward_baselines": torch.full((4,), 0.5),  # [B]
        "old_log_probs": -1.0 * mask,
        "ref_log_prob": -1.0 * mask,
        "rollout_log_probs": -1.0 * mask,
        "rollout_is_weights": 1.0 * mask if has_weights else None,
        "gamma": settings.gamma,
        "lam": settings.lam,
        "config": settings,
        "index": np.array(["0/0", "0/0", "0/1", "0/1"], dtype=object),  # [B]
    }
