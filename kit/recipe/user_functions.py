"""Custom functions that a recipe names as `path.py:function`: load them and check their results.

    key                        called as
    env.reward                 function(episode) -> float
    env.filters, a list        function(episodes) -> the episodes to train on, in this order
    env.sampler                function(tasks, size, batch, seed, pass_rates) -> tasks
    env.train_files            function(batch, size, seed, pass_rates) -> rows
    algorithm.adv_estimator    function(some of AdvantageInputs) -> (advantages, returns)
    policy_loss.loss_mode      function(LossInputs) -> (loss, metrics)

The path is relative to the current folder, or to the kit's. The file imports the files next to it
(kit/recipe/python_files.py). The first four may have settings, which become keyword arguments:
`{function: templates/filters.py:drop_ended, reasons: [length]}`. The last two are entered into
verl's registries under the name in the recipe. The loss runs in the workers, which get it by pickle
and do not import its file: it imports the files next to it at the top, not in a function.
templates/ has functions to copy.

An episode is a kit.data.episode.Episode. pass_rates is {row_id: fraction of responses with the full
reward}. Each group counts twice as much as the group before. A function in env.train_files gets the
rates by batch (kit/data/generated_rows.py).

Protects: a run from rewards, advantages and losses of a wrong type, shape or size.
"""

from __future__ import annotations

import functools
import inspect
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import env
import gym_client
from kit.errors import ConfigError, RunError, UserFunctionError
from kit.recipe.keys import ROOT
from kit.recipe.python_files import (
    describe_place,
    find_user_file,
    import_callable,
    import_user_file,
    list_neighbors,
)
from kit.recipe.schema import SPEC, Values

if TYPE_CHECKING:
    import numpy as np
    from omegaconf import DictConfig
    from torch import Tensor
    from verl.workers.config import ActorConfig


ADVANTAGE = "algorithm.adv_estimator"
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"


@dataclass(frozen=True)
class AdvantageInputs:
    """The arguments that an advantage may have, by name. B episodes, R tokens of a response.

    A run computes what the function names: for `values` it starts a critic, for `ref_log_prob` a
    reference, and for `reward_baselines` it samples a greedy response to each prompt. If an agent's
    episode has several training rows, it is one line here, with the responses of all its rows.
    """

    token_level_rewards: Tensor  # float32 [B, R]: the scores minus the KL penalty
    token_level_scores: Tensor  # float32 [B, R]: the results of env.reward, at the ends of turns
    response_mask: Tensor  # int64 [B, R]: 1 for the tokens to train on
    turn: Tensor  # int64 [B, R]: the policy's turn, counted from 0; -1 for observed tokens
    index: np.ndarray  # [B] of str: the group of each episode. Groups then need two responses
    values: Tensor | None  # float32 [B, R], by the critic
    old_log_probs: Tensor | None  # float32 [B, R], by the trainer
    ref_log_prob: Tensor | None  # float32 [B, R], by the reference or the teacher
    rollout_log_probs: Tensor  # float32 [B, R], by the rollout engine
    rollout_is_weights: Tensor | None  # float32 [B, R]: None without a rollout correction
    sum_pi_squared: Tensor | None  # float32 [B, R]: the sum of p^2 over the vocabulary
    reward_baselines: Tensor | None  # float32 [B]: the rewards of the greedy responses
    gamma: float
    lam: float
    config: DictConfig  # the section `algorithm` of the recipe


@dataclass(frozen=True)
class LossInputs:
    """The arguments of a loss, by name: verl's PolicyLossFn. b rows of a micro-batch, R tokens."""

    old_log_prob: Tensor  # float32 [b, R]
    log_prob: Tensor  # float32 [b, R], with a gradient
    advantages: Tensor  # float32 [b, R]
    response_mask: Tensor  # bool [b, R]
    loss_agg_mode: str
    config: ActorConfig
    rollout_is_weights: Tensor | None  # float32 [b, R]: None without a rollout correction


ROWS = ("batch", "size", "seed", "pass_rates")
CALLS: dict[str, tuple[str, ...]] = {
    "env.reward": ("episode",),
    "env.filters": ("episodes",),
    "env.sampler": ("tasks", "size", "batch", "seed", "pass_rates"),
    "env.train_files": ROWS,
    "env.val_files": ROWS,
    "--map": ("entry",),  # of `python env.py from`
    ADVANTAGE: tuple(field.name for field in fields(AdvantageInputs)),
    LOSS_MODE: tuple(field.name for field in fields(LossInputs)),
}


class RecipeFunctions(NamedTuple):
    """The reward, filters and sampler of a recipe: custom functions, or the defaults."""

    reward: Callable[[Any], float]  # returns the reward to train on
    filters: list[Callable[[list[Any]], list[Any]]]
    # (tasks, size, batch, seed, pass_rates) -> tasks. None: each row once an epoch
    sampler: Callable[..., list[env.Task]] | None


# --- which functions a recipe needs --------------------------------------------------------------


def is_user_function(name: str) -> bool:
    """Return whether a name in the recipe is a custom function rather than one of verl's."""
    return ".py:" in name


def read_estimator_arguments(estimator: str) -> list[str]:
    """Return the names of the arguments of algorithm.adv_estimator. Raises UserFunctionError."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    is_custom = is_user_function(estimator)
    function = load_function(estimator, ADVANTAGE) if is_custom else get_adv_estimator_fn(estimator)
    return list(inspect.signature(function).parameters)


def select_arguments(
    estimator: Callable[..., object], available: Mapping[str, object]
) -> dict[str, object]:
    """Select by name the arguments that an estimator has: with **kwargs, all of them."""
    parameters = inspect.signature(estimator).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in available.items() if takes_all or name in parameters}


def make_loss_config(settings: DictConfig, response_mask: Tensor) -> ActorConfig:
    """Make the argument `config` of a policy loss, for a batch of one micro-batch.

    settings: actor_rollout_ref.actor. response_mask: [B, R]. Source: verl 0.9.1,
    workers/utils/losses.py, ppo_loss.
    """
    from verl.utils.config import omega_conf_to_dataclass

    actor = omega_conf_to_dataclass(settings)
    actor.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=int(response_mask.sum()),
        global_batch_size=len(response_mask),
        loss_scale_factor=actor.loss_scale_factor,
    )
    return actor


# --- loading -------------------------------------------------------------------------------------


def load_recipe_functions(values: Values) -> RecipeFunctions:
    """Load every function that a recipe names. Raises UserFunctionError.

    The last filter is verl's algorithm.filter_groups, if it is enabled.
    """
    env_section = values.env
    specs = list(env_section.filters)
    filter_groups = values.algorithm.filter_groups
    if filter_groups.enable:
        function = f"{ROOT}/templates/filters.py:drop_uniform"
        specs = [*specs, {"function": function, "metric": filter_groups.metric}]
    loss = values.actor_rollout_ref.actor.policy_loss.loss_mode
    for key, name in ((ADVANTAGE, values.algorithm.adv_estimator), (LOSS_MODE, loss)):
        if is_user_function(name):
            load_function(name, key)
    reward = env_section.reward
    sampler = env_section.sampler
    return RecipeFunctions(
        load_function(reward, "env.reward") if reward else reward_of_verifier,
        [load_function(spec, "env.filters") for spec in specs],
        load_function(sampler, "env.sampler") if sampler else None,
    )


def reward_of_verifier(episode: Any) -> float:
    """Return the verifier's reward: the default of env.reward."""
    assert episode.reward is not None, f"{episode.row_id} was not verified"
    return float(episode.reward)


def load_function(
    spec: str | Mapping[str, object], key: str
) -> Callable[..., Any]:  # the key decides what it returns
    """Load the function that `spec` names for a key of the recipe, with its settings.

    Raises UserFunctionError. A call of the loaded function raises it, too, if the call fails.
    """
    settings = dict(spec) if isinstance(spec, Mapping) else {"function": spec}
    name = str(settings.pop("function", ""))
    if not is_user_function(name):
        raise UserFunctionError(f"{key}={spec} is not a function. Write {SPEC}.")
    function = import_callable(name, key)
    check_signature(function, key, name, settings)
    return guard(function, key, name, settings)


def check_signature(
    function: Callable[..., object], key: str, name: str, settings: Mapping[str, object]
) -> None:
    """Check that a function takes the arguments that its key passes. Raises UserFunctionError."""
    names = CALLS[key]
    arguments: Mapping[str, object] = dict.fromkeys(names)
    try:
        if key == ADVANTAGE:
            arguments = select_arguments(function, arguments)
        if key in (ADVANTAGE, LOSS_MODE):
            inspect.signature(function).bind(**arguments)
        else:
            inspect.signature(function).bind(*names, **settings)
    except TypeError as error:
        raise UserFunctionError(
            f"{key}={name} cannot be called with ({', '.join(names)}) and its settings: {error}. "
            "See kit/recipe/user_functions.py for the call."
        ) from None


def register_in_verl(adv_estimator: str, loss_mode: str) -> None:
    """Enter a recipe's custom advantage and loss into verl's registries in this process."""
    import ray
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    if is_user_function(adv_estimator):
        ADV_ESTIMATOR_REGISTRY[adv_estimator] = load_function(adv_estimator, ADVANTAGE)
    if is_user_function(loss_mode):
        POLICY_LOSS_REGISTRY[loss_mode] = load_function(loss_mode, LOSS_MODE)
        # the workers cannot import the file or the files next to it
        module = import_user_file(loss_mode, LOSS_MODE)
        for each in (module, *list_neighbors(module)):
            ray.cloudpickle.register_pickle_by_value(each)


# --- a call and its result -----------------------------------------------------------------------


def guard(
    function: Callable[..., object], key: str, name: str, settings: Mapping[str, object]
) -> Callable[..., object]:
    """Return the function with its settings. Its mistakes become UserFunctionErrors.

    These are exceptions and invalid results. Errors of the kit pass unchanged. A loss is sent to
    the workers in this wrapper, so they import this module.
    """
    file = str(find_user_file(name).resolve())

    @functools.wraps(function)  # keeps its name, for metrics, and its signature
    def call(*args: object, **kwargs: object) -> object:
        try:
            result = function(*args, **kwargs, **settings)
        except (ConfigError, UserFunctionError, RunError, env.DataError, gym_client.GymError):
            raise
        except Exception as error:  # whatever the function raises
            place = describe_place(error, file) or f" failed at {file}:"
            raise UserFunctionError(
                f"{key}={name}{place} {type(error).__name__}: {error}. Correct it."
            ) from error
        expected = describe_expected(key, result, [*args, *kwargs.values()])
        if expected:
            raise UserFunctionError(f"{key}={name} returned {describe(result)}. Return {expected}.")
        return float(result) if isinstance(result, Real) else result

    return call


def describe(value: object) -> str:
    """Describe a value in a few words: its type and shape, or the beginning of its text."""
    if isinstance(value, tuple):
        return f"({', '.join(map(describe, value))})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} of shape {list(value.shape)}"
    return f"a list of {len(value)}" if isinstance(value, list) else reprlib.repr(value)


def describe_expected(
    key: str,
    result: Any,  # of any type
    arguments: Sequence[Any],  # as the key passes them
) -> str:
    """Describe the result that a function should have returned. Empty if `result` is valid."""
    parts = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
    is_list = isinstance(result, list)
    if key == "env.reward":
        is_number = isinstance(result, Real) and not isinstance(result, bool)
        is_valid = is_number and abs(result) <= sys.float_info.max
        expected = "a finite number"
    elif key == "--map":
        is_valid = isinstance(result, Mapping)
        expected = "a row, as a dict"
    elif key == "env.filters":
        is_valid = is_list
        expected = "a list of some of the episodes that it got, or of copies of them"
    elif key == LOSS_MODE:
        is_valid = is_floating(parts[0], ()) and isinstance(parts[1], dict)
        expected = "(loss, metrics), a floating tensor of shape [] and a dict"
    elif key == ADVANTAGE:
        shape = next((tuple(t.shape) for t in arguments if getattr(t, "ndim", 0) == 2), ())
        is_valid = all(is_floating(tensor, shape) for tensor in parts)
        expected = f"(advantages, returns), floating tensors of shape [B, R] = {list(shape)}"
    else:
        is_valid = is_list and len(result) == arguments[1]
        kind = "the tasks that it got" if key == "env.sampler" else "new rows"
        expected = f"a list of {arguments[1]} (its argument `size`) of {kind}"
    return "" if is_valid else expected


def is_floating(value: Any, shape: tuple[int, ...]) -> bool:  # of any type
    """Return whether a value is a floating tensor of this shape."""
    import torch

    return torch.is_tensor(value) and value.is_floating_point() and value.shape == shape
