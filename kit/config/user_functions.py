"""Functions of one's own, which a recipe names as `path.py:function`: loaded, checked, and tried out before a run.

    key                                              called as
    env.reward                                       function(episode) -> float
    env.filters, a list, applied in order            function(episodes) -> the episodes to train on
    env.sampler                                      function(tasks, size, batch, seed, pass_rates) -> tasks
    env.train_files, one of them                     function(batch, size, seed, pass_rates) -> rows (verl_rows.py)
    algorithm.adv_estimator                          function(of ESTIMATOR what it names) -> (advantages, returns)
    actor_rollout_ref.actor.policy_loss.loss_mode    function(LOSS) -> (loss, metrics)

The path is relative to the folder one stands in, else to the kit's. The first four may have settings, which become
keyword arguments: `{function: templates/filters.py:drop_ended, reasons: [length]}`. The last two land in verl's
registries under the very words of the recipe; the loss runs in the workers, to which it travels by value. templates/
has what the kit's own recipes name, to be copied.

An episode (kit.data.episodes.Episode) has `response`, the policy's last words, and `transcript`, all of it; `row`, the
task's row, verbatim; `reward`, `reward_components` and `verdict`, all that the verifier said; `ended` (stop, length,
turns, terminated, truncated), `turns`, `turn_rewards`, `response_ids`, `response_mask`, `group_id`, `row_id`,
`timings`. pass_rates: row_id -> fraction of answers with a reward of 1 or more, each group counting twice the one
before.

What a function raises, or returns by mistake, ends the run with its key, its name and the line.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

import env
import gym_client
from kit.data.episodes import Episode, append
from kit.errors import ConfigError, PluginError, RunError
from kit.extras.python_verifiers.verifier_process import module_at

TEACHER = "distillation.teacher_models.teacher_model.model_path"
ROOT = Path(__file__).resolve().parents[2]
ADVANTAGE, LOSS_MODE = (
    "algorithm.adv_estimator",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
)  # the keys
# What an advantage estimator may ask for, by name. Tensors are [B, R]; index [B] is the group of each episode. Asking
# for `values` starts a critic, for `ref_log_prob` the reference; `reward_baselines` [B] are the rewards of greedy
# answers to the same prompts, sampled for it; `index` says that it compares the answers of a group. `turn` counts the
# policy's turns from 0, -1 on observed tokens.
ESTIMATOR = (
    *(
        "token_level_rewards",
        "token_level_scores",
        "response_mask",
        "turn",
        "index",
        "values",
        "old_log_probs",
    ),
    *(
        "ref_log_prob",
        "rollout_log_probs",
        "rollout_is_weights",
        "sum_pi_squared",
        "reward_baselines",
    ),
    *("gamma", "lam", "config"),
)
LOSS = (
    "old_log_prob",
    "log_prob",
    "advantages",
    "response_mask",
    "loss_agg_mode",
    "config",
    "rollout_is_weights",
)
CALLS = {
    "env.reward": ("episode",),
    "env.filters": ("episodes",),
    "env.sampler": ("tasks", "size", "batch", "seed", "pass_rates"),
    "env.train_files": ("batch", "size", "seed", "pass_rates"),
    "env.val_files": ("batch", "size", "seed", "pass_rates"),
    "--map": ("entry",),  # of `python env.py from`
    LOSS_MODE: LOSS,  # verl's PolicyLossFn
}


def is_own(name: str) -> bool:
    """Whether a name of the recipe is a function of one's own rather than one that verl knows."""
    return ".py:" in name


def find(name: str, key: str) -> Path:
    """The file of `path.py:function`, from the folder one stands in or the kit's. Raises PluginError."""
    file, _, function = name.rpartition(":")
    found = [p for p in (Path(file), ROOT / file) if p.is_file()]
    if not found:
        ours = [
            p for p in (ROOT / "templates").glob("*.py") if f"\ndef {function}(" in p.read_text()
        ]
        same = f"templates/{ours[0].name}" if ours else ""
        hint = (
            f"{function} is in {same}: write {same}:{function}"
            if ours
            else "give its path from either"
        )
        raise PluginError(
            f"{key}={name}: no file {file} here ({Path.cwd()}), nor in the kit's folder; {hint}"
        )
    return found[0]


def _file_of(name: str, key: str) -> ModuleType:
    path = find(name, key)
    try:
        return module_at(path.resolve())
    except Exception as error:  # whatever a file does when it is imported
        why = f"{path} cannot be imported: {error!r}; run `python {path}` to see where"
        raise PluginError(f"{key}={name}: {why}") from error


def load(spec: str | Mapping[str, Any], key: str) -> Callable[..., Any]:
    """What `spec` names for `key` of the recipe, with its settings. Raises PluginError, and so does each call of it."""
    settings = dict(spec) if isinstance(spec, Mapping) else {"function": spec}
    name = str(settings.pop("function", ""))
    if not is_own(name):
        raise PluginError(
            f"{key}={spec}: wants path.py:function, or {{function: path.py:function, its settings}}"
        )
    module, attribute = _file_of(name, key), name.rpartition(":")[2]
    function = getattr(module, attribute, None)
    if not callable(function):
        named = [
            n
            for n, f in vars(module).items()
            if inspect.isfunction(f) and f.__module__ == module.__name__
        ]
        has = f"has no function {attribute}; it has {', '.join(named) or 'none'}"
        raise PluginError(f"{key}={name}: {module.__file__} {has}")
    signature = inspect.signature(function)
    if key == ADVANTAGE:
        wanted = [
            p.name
            for p in signature.parameters.values()
            if p.default is p.empty and p.kind is not p.VAR_KEYWORD
        ]
        if unknown := [p for p in wanted if p not in ESTIMATOR]:
            raise PluginError(
                f"{key}={name} asks for {', '.join(unknown)}; there is {', '.join(ESTIMATOR)}"
            )
        return _guarded(function, key, name, str(module.__file__), settings)
    positional, by_name = ((), dict.fromkeys(LOSS)) if key == LOSS_MODE else (CALLS[key], settings)
    try:
        signature.bind(*positional, **by_name)
    except TypeError as error:
        why = f"cannot be called with ({', '.join(CALLS[key])}) and its settings: {error}"
        raise PluginError(
            f"{key}={name} {why}; see kit/config/user_functions.py for how it is called"
        ) from None
    return _guarded(function, key, name, str(module.__file__), settings)


def asks_for(config: DictConfig, name: str) -> bool:
    """Whether the advantage, verl's or one's own, is computed from `name`, one of ESTIMATOR. Raises PluginError."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    estimator = config.algorithm.adv_estimator
    function = load(estimator, ADVANTAGE) if is_own(estimator) else get_adv_estimator_fn(estimator)
    return name in inspect.signature(function).parameters


def needs_reference(config: DictConfig) -> bool:
    """Whether anything compares the policy with the model it started from."""
    kl = config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    return bool(kl or asks_for(config, "ref_log_prob"))


def teacher(config: DictConfig) -> str:
    """The path of the model that is the reference, where that is not the policy's first; empty where it is."""
    return str(OmegaConf.select(config, TEACHER) or "") if config.distillation.enabled else ""


def arguments(estimator: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """What of `known` an estimator asks for, by name; all of it where it takes **kwargs, as verl's own do."""
    asked = inspect.signature(estimator).parameters
    everything = any(p.kind is p.VAR_KEYWORD for p in asked.values())
    return {name: value for name, value in known.items() if everything or name in asked}


def functions(config: DictConfig) -> tuple[Any, Any, Any]:
    """(reward, filters, sampler) of a recipe, the kit's where it names none. Raises PluginError for all that it names.

    verl's algorithm.filter_groups is a filter, too: the last.
    """
    given: Any = OmegaConf.to_container(config.env, resolve=True)
    specs, refill = given["filters"], config.algorithm.filter_groups
    if not isinstance(specs, list):
        raise PluginError(
            f"env.filters={specs}: wants a list, [templates/filters.py:drop_uniform, ...]"
        )
    if refill.enable:
        specs = [
            *specs,
            {"function": f"{ROOT}/templates/filters.py:drop_uniform", "metric": refill.metric},
        ]
    for key in (ADVANTAGE, LOSS_MODE):
        if is_own(name := OmegaConf.select(config, key)):
            load(name, key)
    in_turn = lambda tasks, size, batch, seed, _: env.batch(
        tasks, size, batch, seed, config.data.shuffle
    )  # noqa: E731
    return (
        load(given["reward"], "env.reward")
        if given["reward"]
        else lambda episode: float(episode.reward),
        [load(spec, "env.filters") for spec in specs],
        load(given["sampler"], "env.sampler") if given["sampler"] else in_turn,
    )


def register(names: Sequence[str]) -> None:
    """Put an advantage estimator and a policy loss of one's own, given in that order, into verl's registries here."""
    import ray
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    registries = {ADVANTAGE: ADV_ESTIMATOR_REGISTRY, LOSS_MODE: POLICY_LOSS_REGISTRY}
    for name, (key, registry) in zip(names, registries.items(), strict=True):
        if is_own(name):
            registry[name] = load(name, key)
            ray.cloudpickle.register_pickle_by_value(
                _file_of(name, key)
            )  # workers cannot import it


# --- a call, and what comes back -----------------------------------------------------------------


def _guarded(
    function: Callable[..., Any], key: str, name: str, file: str, settings: Mapping[str, Any]
) -> Any:
    """`function` with its settings. What it raises, or returns by mistake, is a PluginError; the kit's own errors pass.

    It travels to the workers with the loss: what it calls here they import.
    """

    @functools.wraps(function)  # its name, for metrics, and its signature
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs, **settings)
        except (ConfigError, PluginError, RunError, env.DataError, gym_client.GymError):
            raise
        except Exception as error:  # whatever it does
            lines = [
                line
                for frame, line in walk_tb(error.__traceback__)
                if frame.f_code.co_filename == file
            ]
            where = f"{file}:{lines[-1]}" if lines else file
            why = f"failed at {where}: {type(error).__name__}: {error}"
            raise PluginError(f"{key}={name} {why}; mend it there") from error
        if wanted := _wanted(key, result, [*args, *kwargs.values()]):
            raise PluginError(f"{key}={name} returned {_told(result)}; it must return {wanted}")
        return float(result) if key == "env.reward" else result

    return call


def _told(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_told, value))})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} of shape {list(value.shape)}"
    return f"a list of {len(value)}" if isinstance(value, list) else reprlib.repr(value)


def _names(things: Sequence[Any]) -> set[Any]:
    return {(getattr(thing, "row_id", None), getattr(thing, "group_id", None)) for thing in things}


def _wanted(key: str, result: Any, given: Sequence[Any]) -> str:
    """What a function that was given these should have returned; empty where it did."""
    if key == "env.reward":
        wanted = "a finite number"
        number = isinstance(result, numbers.Real) and not isinstance(result, bool)
        fine = number and abs(result) <= sys.float_info.max
    elif key == "env.filters":
        wanted = "a list of some of the episodes that it was given, or of copies of them"
        fine = isinstance(result, list) and _names(result) <= _names(given[0])
    elif key == "env.sampler":
        wanted = f"a list of {given[1]} (its argument `size`) of the tasks that it was given"
        fine = (
            isinstance(result, list)
            and len(result) == given[1]
            and _names(result) <= _names(given[0])
        )
    elif key in ("env.train_files", "env.val_files"):
        wanted = (
            f"a list of {given[1]} (its argument `size`) rows; one that yields is to be made a list"
        )
        fine = isinstance(result, list) and len(result) == given[1]
    elif key == "--map":
        wanted, fine = "a row, as a dict", isinstance(result, Mapping)
    else:
        import torch

        first, second = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
        shapes = [
            list(t.shape) if torch.is_tensor(t) and t.is_floating_point() else None
            for t in (first, second)
        ]
        wanted = "(loss, metrics), a floating tensor of shape [] and a dict"
        fine = shapes[0] == [] and isinstance(second, dict)
        if key == ADVANTAGE:
            shape = next(
                (list(t.shape) for t in (*given, first) if torch.is_tensor(t) and t.dim() == 2),
                None,
            )
            wanted = f"(advantages, returns), floating tensors of shape [B, R] = {shape}"
            fine = shape is not None and shapes == [shape, shape]
    return "" if fine else wanted


# --- tried out -----------------------------------------------------------------------------------


class _Unknown(dict[str, Any]):
    """What a verifier says beside the reward, of a made-up episode: whatever it is asked for is there, and is 0.5. It
    holds what it was asked for."""

    def __contains__(self, name: object) -> bool:
        return True

    def __getitem__(self, name: str) -> Any:
        return self.setdefault(name, 0.5)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]


def try_out(config: DictConfig, data: Any) -> None:
    """Call all that a recipe names once: a mistake should not wait for the workers. Raises PluginError.

    data: preparation.Data; without training tasks (evaluate, sft) there is nothing to call. What is not of the recipe
    is made up: of reward_components and verdict all that is asked for is 0.5, and a function that fails after it looked
    into the verdict, whose words may be anything, is not judged. One that counts its calls counts this one.
    """
    tasks = [*data.train, *data.made]
    if not tasks or not isinstance(tasks[0], env.Task):
        return
    estimator, loss_mode = (OmegaConf.select(config, key) for key in (ADVANTAGE, LOSS_MODE))
    try:
        for function in (lambda episodes: data.reward(episodes[-1]), *data.filters):
            episodes = _made_up(data, min(max(config.actor_rollout_ref.rollout.n, 2), 4))
            try:
                function(episodes)
            except PluginError:
                if not any(e.verdict for e in episodes):
                    raise
        data.sampler(list(data.train), config.data.train_batch_size, 1, config.data.seed, {})
        if is_own(estimator):
            function = load(estimator, ADVANTAGE)
            function(**arguments(function, _tensors(config)))
        if is_own(loss_mode):
            _learn(load(loss_mode, LOSS_MODE), loss_mode, _tensors(config), config)
    except PluginError as error:
        raise PluginError(f"{error} (tried on made-up episodes; nothing was started)") from error


def _made_up(data: Any, n: int) -> list[Any]:
    """n answers to each of the first two rows: worth 0 to 1, ever longer, the first cut by `length`; in two turns where
    the row has tools or its environment writes the prompt."""
    text, episodes = "So the answer is 7.", []
    words = data.tokenizer.encode(text, add_special_tokens=False)
    for group, task in enumerate([*data.train, *data.made][:2]):
        for k in range(n):
            e = Episode(
                task.row_id, f"0/{group}", task.server, task.prompt_ids or words, row=task.row
            )
            e.reward, e.baseline, e.ended = k / (n - 1), 0.5, "stop" if k else "length"
            e.reward_components, e.verdict = _Unknown(), _Unknown()
            e.timings = dict.fromkeys(("generate", "tools", "verify", "verify_call"), 1.0)
            for turn in range(1 + bool(task.tools or not task.messages)):
                if turn:
                    e.output.append({"role": "user", "type": "message", "content": text})
                    append(e, words)
                e.output.append(gym_client.message(" ".join([text] * (k + 1))))
                append(e, words * (k + 1), [-1.0] * len(words) * (k + 1))
            episodes.append(e)
    return episodes


def _tensors(config: DictConfig) -> dict[str, Any]:
    """All of ESTIMATOR, as training.advantages hands it over: two groups of two, one of the answers in two turns."""
    import torch

    mask = torch.tensor(
        [[1, 1, 1, 1, 0], [1, 1, 0, 1, 1], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    )  # [B, R]
    turn, rewards = mask - 1, torch.zeros(4, 5)  # [B, R]
    turn[1, 3:], rewards[[0, 1, 2], [3, 4, 4]] = 1, torch.tensor([0.5, 1.0, 0.25])
    known = {
        "token_level_rewards": rewards,
        "token_level_scores": rewards.clone(),
        "response_mask": mask,
        "turn": turn,
    }
    known |= {
        "values": 0.5 * mask,
        "sum_pi_squared": 0.5 * mask,
        "reward_baselines": torch.full((4,), 0.5),
    }
    known |= {name: mask * -1.0 for name in ("old_log_probs", "ref_log_prob", "rollout_log_probs")}  # noqa: C420
    settings = config.algorithm
    weights = 1.0 * mask if settings.rollout_correction.rollout_is else None
    others = {
        "gamma": settings.gamma,
        "lam": settings.lam,
        "config": settings,
        "rollout_is_weights": weights,
    }
    return {**known, **others, "index": np.array(["0/0", "0/0", "0/1", "0/1"], dtype=object)}


def _learn(
    function: Callable[..., Any], name: str, known: Mapping[str, Any], config: DictConfig
) -> None:
    """A loss and its gradient, as a worker asks for them (verl 0.9.1, workers/utils/losses.py, ppo_loss)."""
    from verl.utils.config import omega_conf_to_dataclass

    actor, mask = omega_conf_to_dataclass(config.actor_rollout_ref.actor), known["response_mask"]
    sizes = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}
    actor.global_batch_info.update(sizes, loss_scale_factor=actor.loss_scale_factor)
    log_prob = known["old_log_probs"].clone().requires_grad_() + 0.1  # [B, R]
    tensors = (
        known["old_log_probs"],
        log_prob,
        known["token_level_rewards"] - 0.5,
        mask.bool(),
    )  # [B, R]
    settings = (actor.loss_agg_mode, actor, known["rollout_is_weights"])
    loss, _ = function(**dict(zip(LOSS, (*tensors, *settings), strict=True)))
    try:
        loss.backward()
    except RuntimeError as error:
        why = f"its loss has no gradient: {error}; compute it from log_prob, and change nothing in place"
        raise PluginError(f"{LOSS_MODE}={name}: {why}") from error
