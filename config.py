"""Recipes: YAML files over verl's own configuration, merged strictly and checked before anything starts.

    load_config(files, overrides)   verl's ppo_trainer.yaml + configs/base.yaml + files + key=value
    prepare(config, command)        model, files, servers and sizes checked; tasks and tokenizer loaded

A key that nothing reads is an error: one that verl does not know, and one of verl's trainer, data, algorithm or reward
that this loop does not use. (Below actor_rollout_ref and critic verl's workers read; INSTEAD has what they do not.)
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import env
import gym_servers
import own
from checks import ConfigError, check_algorithm, check_reward_model, check_sizes, check_tool_format


class RunError(RuntimeError):
    """A run that must stop; the message says what failed, where, and what to do."""


# What this loop reads of verl's configuration. A key set elsewhere would do nothing, so it is an error.
READ = [
    *("actor_rollout_ref", "critic", "gym", "env", "ray_kwargs.ray_init", "trainer.critic_warmup"),
    *(f"data.{key}" for key in ("train_batch_size", "max_prompt_length", "max_response_length", "seed", "shuffle")),
    *(f"algorithm.{key}" for key in ("adv_estimator", "gamma", "lam", "norm_adv_by_std_in_grpo")),
    *(f"algorithm.{key}" for key in ("use_kl_in_reward", "kl_penalty", "kl_ctrl")),
    *(f"algorithm.{key}" for key in ("gdpo_reward_keys", "gdpo_reward_weights", "rollout_correction")),
    *(f"algorithm.filter_groups.{key}" for key in ("enable", "metric", "max_num_gen_batches")),
    *(f"reward.reward_model.{key}" for key in ("enable", "model_path")),
    *(f"trainer.{key}" for key in ("project_name", "experiment_name", "default_local_dir", "logger", "device")),
    *(f"trainer.{key}" for key in ("total_training_steps", "save_freq", "test_freq", "val_before_train")),
    *(f"trainer.{key}" for key in ("resume_mode", "resume_from_path", "nnodes", "n_gpus_per_node")),
    "trainer.max_actor_ckpt_to_keep",
    "trainer.ray_wait_register_center_timeout",
]
INSTEAD = {  # keys of verl's that would do nothing, and what does
    "data.train_files": "env.train_files",
    "data.val_files": "env.val_files",
    "data.sampler": "env.sampler",
    "trainer.total_epochs": "trainer.total_training_steps",
    "reward.custom_reward_function": "env.reward",
    "trainer.max_critic_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep: actor and critic are one checkpoint",
    "actor_rollout_ref.actor.clip_ratio": "clip_ratio_low and clip_ratio_high beside it",
    "actor_rollout_ref.rollout.agent": "gym.servers: they have the tools and the turns",
    **{
        f"actor_rollout_ref.rollout.multi_turn.{name}": "gym.servers: they have the tools and the turns"
        for name in ("enable", "tool_config_path", "interaction_config_path", "max_user_turns")
    },
}
MICRO_BATCH_TOKENS = [
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
]
FREE = ("ray_kwargs.ray_init", "gym.servers", "gym.concurrency")  # keys below are not ours or verl's to list


def to_plain(config: Any) -> Any:
    """An OmegaConf node -> plain dicts and lists, resolved."""
    return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config


def load_config(files: Sequence[str], overrides: Sequence[str]) -> tuple[DictConfig, DictConfig]:
    """verl's ppo_trainer.yaml + configs/base.yaml + files + key=value -> (config, the defaults it started from).

    Sets the environment variables of ray_kwargs.ray_init.runtime_env.env_vars in this process, so call it
    before verl is imported. Raises ConfigError for a key that nothing reads.
    """
    from hydra import compose, initialize_config_dir

    OmegaConf.register_new_resolver("cores", lambda: len(os.sched_getaffinity(0)), replace=True)
    here = Path(__file__).resolve().parent
    verl = Path(importlib.util.find_spec("verl").origin).parent  # type: ignore[union-attr, arg-type]
    with initialize_config_dir(str(verl / "trainer" / "config"), version_base=None):
        defaults = compose("ppo_trainer")
    OmegaConf.set_struct(defaults, False)
    base = OmegaConf.load(here / "configs" / "base.yaml")
    defaults = cast(DictConfig, OmegaConf.merge(defaults, {"gym": base.gym, "env": base.env}))

    overlays = [("configs/base.yaml", base)] + [(file, read_yaml(file)) for file in files]
    for text in overrides:
        if "=" not in text:
            raise ConfigError(f"{text!r} is not key=value, nor one of train, rollout, evaluate, sft")
        overlays.append((text, OmegaConf.from_dotlist([text.lstrip("+")])))
    config = defaults
    for _, overlay in overlays:
        for key in ("env.reward", "env.sampler"):  # another function does not inherit the settings of the one before
            if "function" in (OmegaConf.select(overlay, key) or ""):
                config = cast(DictConfig, OmegaConf.merge(config, OmegaConf.from_dotlist([f"{key}=null"])))
        config = cast(DictConfig, OmegaConf.merge(config, overlay))
    apply_environment(config, here)
    for source, overlay in overlays:
        for key in unknown_keys(overlay, defaults):
            known = leaves(defaults)
            short = [
                f"actor_rollout_ref.{leaf}"
                for leaf in leaves(cast(DictConfig, overlay))
                if f"{leaf}.".startswith(f"{key}.")
            ]
            close = [leaf for leaf in short if leaf in known] or difflib.get_close_matches(key, known, n=1)
            look = f"; see configs/base.yaml, and {verl}/trainer/config for verl's"
            hint = f"; did you mean {close[0]}?" if close else look
            raise ConfigError(f"{source}: unknown key {key}{hint}")
    usual = leaves(cast(DictConfig, OmegaConf.merge(defaults, base)))
    for key, (value, _) in changed(config, defaults).items():
        instead = [ours for theirs, ours in INSTEAD.items() if f"{key}.".startswith(f"{theirs}.")]
        if instead or not any(f"{key}.".startswith(f"{name}.") for name in READ):
            why = "this loop does not read it, so setting it would do nothing"
            raise ConfigError(f"{key} is verl's, but {why}; {f'set {instead[0]}' if instead else 'leave it out'}")
        number = isinstance(usual.get(key), (int, float)) and not key.endswith("rollout_is_threshold")  # or "0.8_1.5"
        if number and isinstance(value, str) and not value.startswith("${"):
            raise ConfigError(f"{key}={value}: wants a value like {usual[key]}")
    return config, defaults


def read_yaml(file: str) -> DictConfig:
    """A recipe file. Raises ConfigError naming the file."""
    try:
        loaded = OmegaConf.load(file)
    except FileNotFoundError:
        raise ConfigError(f"--config {file}: no such file; see configs/ for the kit's") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"--config {file}: not valid YAML; look where it says: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"--config {file}: a recipe is a YAML mapping; write it as key: value")
    return loaded


def apply_environment(config: DictConfig, here: Path) -> None:
    """Give this process, and through it every worker, the recipe's environment variables and this folder's modules."""
    variables = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    if not OmegaConf.select(
        config, "ray_kwargs.ray_init.address"
    ):  # Ray's switch for a cluster of one: all on loopback
        variables = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", **variables}
    paths = [str(here), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    for name, value in {**variables, "PYTHONPATH": os.environ["PYTHONPATH"]}.items():
        os.environ[name] = str(value)
        OmegaConf.update(config, f"ray_kwargs.ray_init.runtime_env.env_vars.{name}", str(value), force_add=True)


def public(config: DictConfig) -> DictConfig:
    """The recipe as it may be written down: resolved, but for what it has from the environment, and without the value
    of any variable that is called a key, token, secret or password."""
    secret = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
    hidden = {value: name for name, value in os.environ.items() if secret.search(name) and len(value) >= 8}

    def walk(raw: Any, resolved: Any) -> Any:
        if isinstance(resolved, dict):
            return {key: walk(raw[key] if isinstance(raw, dict) else "", value) for key, value in resolved.items()}
        if isinstance(resolved, list):
            return [walk(raw[i] if isinstance(raw, list) else "", value) for i, value in enumerate(resolved)]
        if isinstance(raw, str) and "${oc.env:" in raw:
            return raw
        for value, name in hidden.items() if isinstance(resolved, str) else ():
            resolved = resolved.replace(value, f"${{oc.env:{name}}}")
        return resolved

    return cast(DictConfig, OmegaConf.create(walk(OmegaConf.to_container(config, resolve=False), to_plain(config))))


def leaves(config: DictConfig) -> dict[str, Any]:
    """{dotted key: value} of a configuration's leaves, interpolations as they were written."""

    def walk(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in node.items():
            if isinstance(value, dict) and value:
                yield from walk(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value

    return dict(walk(OmegaConf.to_container(config, resolve=False), ""))


def changed(config: DictConfig, defaults: DictConfig) -> dict[str, tuple[Any, Any]]:
    """{dotted key: (value, default)} of the leaves in which two configurations differ."""
    now, was = leaves(config), leaves(defaults)
    return {key: (value, was.get(key)) for key, value in now.items() if key not in was or value != was[key]}


def unknown_keys(overlay: Any, known: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys of `overlay` that `known` lacks. An empty mapping in verl's defaults takes any key, and a
    mapping with `_target_` also takes the fields of that dataclass."""
    for name in overlay:
        key = f"{prefix}{name}"
        node = overlay._get_node(name)
        if key in FREE or key.startswith(tuple(f + "." for f in FREE)):
            continue
        if known._get_node(name) is None:  # `in` would not see a key whose default is ???
            target = known.get("_target_")
            if target:
                from hydra.utils import get_class

                if name in {f.name for f in dataclasses.fields(get_class(target))}:
                    continue
            yield key
        elif isinstance(node, DictConfig) and isinstance(known._get_node(name), DictConfig) and len(known[name]) > 0:
            yield from unknown_keys(node, known[name], f"{key}.")


# --- checks, before anything starts --------------------------------------------------------------


@dataclasses.dataclass
class Data:
    """What the checks loaded: tasks, the tokenizer, and the ids that end a response."""

    train: list[Any]  # env.Task; for sft, sft.Example
    validation: list[Any]
    dropped: list[str]  # rows whose prompt is over data.max_prompt_length
    tokenizer: Any
    stop_ids: set[int]
    reward: Callable[[Any], float]  # what an episode is worth: the verifier's word, or env.reward
    filters: list[Callable[[list[Any]], list[Any]]]  # env.filters, and verl's algorithm.filter_groups
    sampler: Callable[..., list[env.Task]]  # (tasks, size, batch, seed, pass_rates) -> tasks


def stop_token_ids(tokenizer: Any, generation_config: Any) -> set[int]:
    """Every id that ends a response: the tokenizer's EOS and those of generation_config.json."""
    ids = {tokenizer.eos_token_id}
    eos = getattr(generation_config, "eos_token_id", None)
    ids |= set(eos) if isinstance(eos, (list, tuple)) else {eos}
    return ids - {None}


def prepare(config: DictConfig, command: str = "train") -> Data:
    """Check the recipe against its model, files and sizes, and fill in what follows from them.

    command: train, rollout (needs no val_files), evaluate (needs no train_files) or sft (whose rows sft.py reads).
    Raises ConfigError, own.OwnError, env.DataError, gym_client.GymError or gym_servers.GymStartError, before any
    worker starts.
    """
    rollout = config.actor_rollout_ref.rollout
    files = "env.val_files" if command == "evaluate" else "env.train_files"
    for name in ("env.train_files", "env.val_files"):
        if isinstance(given := OmegaConf.select(config, name), str):
            raise ConfigError(f"{name}={given}: wants a list, '{name}=[{given}]'")
    if not OmegaConf.select(config, files):
        raise ConfigError(
            f"{files} is not set: name a task, like --config configs/math_cpu.yaml, before other overlays"
        )
    if not config.gym.servers and not config.gym.head and command != "sft":
        raise ConfigError(
            "gym.servers is not set; name the servers of the rows (as in configs/math.yaml), or set gym.head"
        )
    check_algorithm(config)
    check_sizes(config, command)
    functions = own.functions(config)
    tokenizer, hf_config, stop_ids = load_model_files(config)
    if config.reward.reward_model.enable:
        check_reward_model(config, tokenizer)
    fill_in(config, hf_config)
    if command == "sft":
        import sft

        return Data(*sft.load_files(config, tokenizer, stop_ids), tokenizer, stop_ids, *functions)

    servers, aliases = to_plain(config.gym.servers), {name: name for name in config.gym.servers}
    found: dict[str, str] = {}
    if config.gym.head:
        found, agents = gym_servers.discover(config.gym.head)
        aliases = {name: name for name in found} | {a: s for a, s in agents.items() if s in found} | aliases
    only, limit = to_plain(config.env.servers), config.data.max_prompt_length
    train_files = to_plain(config.env.train_files) if command != "evaluate" else []
    val_files = to_plain(config.env.val_files) if command != "rollout" else []
    train_tasks, dropped = env.load_tasks(train_files, tokenizer, aliases, limit, only)
    val_tasks, val_dropped = env.load_tasks(val_files, tokenizer, aliases, limit, only)
    val_tasks = val_tasks[: config.env.val_max_rows]
    tasks = [*train_tasks, *val_tasks]
    if command == "train" and len(train_tasks) < config.data.train_batch_size:
        size = config.data.train_batch_size
        raise ConfigError(
            f"env.train_files hold {len(train_tasks)} usable rows, fewer than data.train_batch_size={size}; add some, "
            f"or lower it; dropped: {', '.join(dropped[:3]) or 'none'}"
        )
    if not tasks:
        raise ConfigError(
            f"{files} hold no usable row; add some, or raise data.max_prompt_length={limit}; dropped: "
            f"{', '.join([*dropped, *val_dropped][:3]) or 'none'}"
        )
    if any(task.tools for task in tasks):
        check_tool_format(rollout.multi_turn.format)

    for name in sorted({task.server for task in tasks} - set(servers)):
        config.gym.servers[name] = {"url": found[name]}
    for name, server in to_plain(config.gym.servers).items():
        given = {key for key, value in (server or {}).items() if value is not None}
        if len({"url", "start"} & given) != 1 or given - {"url", "start"}:
            raise ConfigError(
                f"gym.servers.{name} takes either url: http://host:port or start: {{python, server, port, config}}"
            )
        gym_servers.check_server(name, server)
    if config.gym.door.port and not os.environ.get("POLICY_API_KEY"):
        raise ConfigError("gym.door.port is set, so the environment variable POLICY_API_KEY must hold the door's key")

    return Data(train_tasks, val_tasks, dropped + val_dropped, tokenizer, stop_ids, *functions)


def fill_in(config: DictConfig, hf_config: Any) -> None:
    """What follows from the model and the recipe, unless the recipe says it."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    longest = config.data.max_prompt_length + config.data.max_response_length
    rollout.max_model_len = rollout.max_model_len or longest
    for key in MICRO_BATCH_TOKENS:  # verl packs whole episodes, so the longest must fit
        OmegaConf.update(config, key, max(OmegaConf.select(config, key), longest))
    actor.optim.total_training_steps = config.critic.optim.total_training_steps = config.trainer.total_training_steps
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and not actor.loss_scale_factor:
        actor.loss_scale_factor = config.data.max_response_length  # else verl divides by each micro-batch's own width
    if config.algorithm.rollout_correction.bypass_mode:  # verl's apply_bypass_mode, before the workers start
        actor.policy_loss.loss_mode = "bypass_mode"
        actor.policy_loss.rollout_correction = config.algorithm.rollout_correction
    text_config = hf_config.get_text_config()
    largest_mb = math.ceil(text_config.vocab_size * text_config.hidden_size * 4 / 2**20) + 1  # the embedding, fp32
    sync = rollout.checkpoint_engine
    sync.update_weights_bucket_megabytes = max(sync.update_weights_bucket_megabytes, largest_mb)


def load_model_files(config: DictConfig) -> tuple[Any, Any, set[int]]:
    """(tokenizer, Hugging Face config, stop ids) of the model; its path is made absolute. Raises ConfigError."""
    model = config.actor_rollout_ref.model
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        if model.external_lib:
            importlib.import_module(model.external_lib)  # a module of one's own; the workers import it by themselves
    except ImportError as error:
        raise ConfigError(
            f"actor_rollout_ref.model.external_lib={model.external_lib} cannot be imported: {error}; install it, or "
            "add its folder to PYTHONPATH"
        ) from None

    if (path := Path(model.path).expanduser()).is_dir():
        model.path = str(path.resolve())
    elif model.path.startswith((".", "/", "~")) or ("/" in model.path and path.parent.is_dir()) or len(path.parts) > 2:
        raise ConfigError(
            f"actor_rollout_ref.model.path={model.path}: no such folder; give one that is there, or a name of the hub "
            "(`make model` fetches the demo's)"
        )
    try:
        hf_config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"actor_rollout_ref.model.path={model.path}: no model folder, and no model of the hub ({why}); give one of "
            "the two"
        ) from None
    try:
        generation = GenerationConfig.from_pretrained(model.path)
    except OSError:
        generation = None  # a model without generation_config.json stops at the tokenizer's EOS
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is known by the attention mask, so any id will do
    if model.custom_chat_template:
        tokenizer.chat_template = model.custom_chat_template
    if not tokenizer.chat_template:
        raise ConfigError(f"{model.path} has no chat template; set actor_rollout_ref.model.custom_chat_template")
    return tokenizer, hf_config, stop_token_ids(tokenizer, generation)
