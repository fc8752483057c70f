"""Functions of one's own, which a recipe names as `path.py:function`; loaded, and checked before anything starts.

    key                                              called as
    env.reward                                       function(episode) -> float
    env.filters, a list, applied in order            function(episodes) -> the episodes to train on
    env.sampler                                      function(tasks, size, batch, seed, pass_rates) -> tasks
    algorithm.adv_estimator                          function(of ESTIMATOR what it names) -> (advantages, returns)
    actor_rollout_ref.actor.policy_loss.loss_mode    function(LOSS) -> (loss, metrics)

The path is relative to the folder one stands in, else to the kit's. The first three may have settings, which become
keyword arguments: `{function: pieces.py:drop_ended, reasons: [length]}`. The last two land in verl's registries
(verl.trainer.ppo.core_algos.register_adv_est, register_policy_loss) under the very words of the recipe; the loss runs
in the workers, to which it travels by value. pieces.py has what the kit's own recipes name.

An episode (inference.Episode) has `response`, the policy's last words, and `transcript`, all of it; `row`, the task's
row, verbatim; `reward`, `reward_components` and `verdict`, all that the verifier said; `ended` (stop, length, turns,
terminated, truncated), `turns`, `turn_rewards`, `response_ids`, `response_mask`, `group_id`, `row_id`, `timings`.
pass_rates: row_id -> fraction of answers with a reward of 1 or more, each group counting twice the one before.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf

import env

# What an advantage estimator may ask for, by name. Tensors are [B, R]; index [B] is the group of each episode. Asking
# for `values` starts a critic, for `ref_log_prob` the reference; `reward_baselines` [B] are the rewards of greedy
# answers to the same prompts, sampled for it; `index` says that it compares the answers of a group. `turn` counts the
# policy's turns from 0, -1 on observed tokens.
ESTIMATOR = (
    *("token_level_rewards", "token_level_scores", "response_mask", "turn", "index", "values", "old_log_probs"),
    *("ref_log_prob", "rollout_log_probs", "rollout_is_weights", "sum_pi_squared", "reward_baselines"),
    *("gamma", "lam", "config"),
)
LOSS = (  # verl's PolicyLossFn
    *("old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config", "rollout_is_weights"),
)
CALLS = {
    "env.reward": ("episode",),
    "env.filters": ("episodes",),
    "env.sampler": ("tasks", "size", "batch", "seed", "pass_rates"),
}


class OwnError(ValueError):
    """A function of one's own that cannot be used; the message names the key, the file and what is wrong."""


def is_own(name: str) -> bool:
    """Whether a name of the recipe is a function of one's own rather than one that verl knows."""
    return ".py:" in name


@functools.cache
def _module(path: Path) -> ModuleType:
    name = f"{path.stem}_{zlib.crc32(bytes(path)):08x}"  # no other module's name
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[name] = module  # where dataclasses and pickle look it up
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def _file_of(name: str, key: str) -> ModuleType:
    file = name.rpartition(":")[0]
    found = [p for p in (Path(file), Path(__file__).parent / file) if p.is_file()]
    if not found:
        raise OwnError(
            f"{key}={name}: no file {file} here ({Path.cwd()}), nor in the kit's folder; give its path from either"
        )
    try:
        return _module(found[0].resolve())
    except Exception as error:  # whatever a file does when it is imported
        raise OwnError(
            f"{key}={name}: {found[0]} cannot be imported: {error!r}; run `python {found[0]}` to see where"
        ) from error


def load(spec: str | Mapping[str, Any], key: str) -> Callable[..., Any]:
    """The function that `spec` names for `key` of the recipe, its settings bound. Raises OwnError."""
    given = dict(spec) if isinstance(spec, Mapping) else {"function": spec}
    name = str(given.pop("function", ""))
    if not is_own(name):
        raise OwnError(f"{key}={spec}: wants path.py:function, or {{function: path.py:function, its settings}}")
    module, attribute = _file_of(name, key), name.rpartition(":")[2]
    function = getattr(module, attribute, None)
    if not callable(function):
        named = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
        has = ", ".join(named) or "none"
        raise OwnError(f"{key}={name}: {module.__file__} has no function {attribute}; it has {has}")
    _check(function, key, name, given)
    return functools.partial(function, **given) if given else function


def _check(function: Callable[..., Any], key: str, name: str, settings: Mapping[str, Any]) -> None:
    signature = inspect.signature(function)
    if key == "algorithm.adv_estimator":
        wanted = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        if unknown := [p for p in wanted if p not in ESTIMATOR]:
            raise OwnError(f"{key}={name} asks for {', '.join(unknown)}; there is {', '.join(ESTIMATOR)}")
        return
    try:
        if key in CALLS:
            signature.bind(*CALLS[key], **settings)
        else:
            signature.bind(**dict.fromkeys(LOSS))
    except TypeError as error:
        call = ", ".join(CALLS.get(key, LOSS))
        raise OwnError(
            f"{key}={name} cannot be called with ({call}) and its settings: {error}; see own.py for how it is called"
        ) from None


def asks(estimator: str, name: str) -> bool:
    """Whether an estimator of one's own is computed from `name`, one of ESTIMATOR. Raises OwnError."""
    return name in inspect.signature(load(estimator, "algorithm.adv_estimator")).parameters


def functions(config: DictConfig) -> tuple[Any, Any, Any]:
    """(reward, filters, sampler) of a recipe, the kit's where it names none; all it names is checked. Raises OwnError.

    verl's algorithm.filter_groups is a filter, too: the last.
    """
    env_of, refill = OmegaConf.to_container(config.env, resolve=True), config.algorithm.filter_groups
    specs = env_of["filters"]  # type: ignore[index, call-overload]
    if not isinstance(specs, list):
        raise OwnError(f"env.filters={specs}: wants a list, [pieces.py:drop_uniform, ...]")
    if refill.enable:
        specs = [*specs, {"function": f"{Path(__file__).parent}/pieces.py:drop_uniform", "metric": refill.metric}]
    filters = [load(spec, "env.filters") for spec in specs]
    for key in ("algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"):
        if is_own(name := OmegaConf.select(config, key)):
            load(name, key)
    reward, sampler = env_of["reward"], env_of["sampler"]  # type: ignore[index, call-overload]
    return (
        load(reward, "env.reward") if reward else lambda episode: float(episode.reward),
        filters,
        load(sampler, "env.sampler") if sampler else _in_turn(config.data.shuffle),
    )


def _in_turn(shuffle: bool) -> Callable[..., list[env.Task]]:
    return lambda tasks, size, batch, seed, pass_rates: env.batch(tasks, size, batch, seed, shuffle)


def register(names: Sequence[str]) -> None:
    """Put an advantage estimator and a policy loss of one's own, given in that order, into verl's registries here."""
    import ray
    from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

    keys = ("algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode")
    for name, key, registry in zip(names, keys, (register_adv_est, register_policy_loss), strict=True):
        if is_own(name):
            registry(name)(load(name, key))
            ray.cloudpickle.register_pickle_by_value(_file_of(name, key))  # workers cannot import it
