"""Recipes: YAML files over verl's own configuration, merged strictly and checked before anything starts.

    load_config(files, overrides)   verl's ppo_trainer.yaml + configs/base.yaml + files + key=value
    prepare(config, command)        model, files, servers and sizes checked; tasks and tokenizer loaded
    summary(config, data)           the derived sizes, printed at every start
    dry_run(config, ...)            what --dry-run prints

A key that nothing reads is an error: one that verl does not know, and one of verl's that this loop
does not use. So a recipe never says more than what happens.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

import env
import gym_client
import gym_servers


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the key and the way out."""


class RunError(RuntimeError):
    """A run that must stop; the message says what failed, where, and what to do."""


# What this loop reads of verl's configuration. A key set elsewhere would do nothing, so it is an error.
READ = [
    *("actor_rollout_ref", "critic", "gym", "env", "ray_kwargs.ray_init", "trainer.critic_warmup"),
    *(f"data.{key}" for key in ("train_batch_size", "max_prompt_length", "max_response_length", "seed", "shuffle")),
    *(f"algorithm.{key}" for key in ("adv_estimator", "gamma", "lam", "norm_adv_by_std_in_grpo")),
    *(f"algorithm.{key}" for key in ("use_kl_in_reward", "kl_penalty", "kl_ctrl")),
    *(f"algorithm.{key}" for key in ("gdpo_reward_keys", "gdpo_reward_weights")),
    *(f"trainer.{key}" for key in ("project_name", "experiment_name", "default_local_dir", "logger", "device")),
    *(f"trainer.{key}" for key in ("total_training_steps", "save_freq", "test_freq", "val_before_train")),
    *(f"trainer.{key}" for key in ("resume_mode", "resume_from_path", "nnodes", "n_gpus_per_node")),
    "trainer.ray_wait_register_center_timeout",
]
MICRO_BATCH_TOKENS = [
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
]
ALONE = ("gae", "reinforce_plus_plus")  # estimators that look at each answer by itself; the others compare a group's
NOT_YET = ("remax", "optimal_token_baseline", "tir_optimal_token_baseline")  # need what this loop does not compute
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
            raise ConfigError(f"{text!r} is not key=value, nor train, rollout or evaluate")
        overlays.append((text, OmegaConf.from_dotlist([text.lstrip("+")])))
    config = cast(DictConfig, OmegaConf.merge(defaults, *[overlay for _, overlay in overlays]))
    apply_environment(config, here)
    for source, overlay in overlays:
        for key in unknown_keys(overlay, defaults):
            close = difflib.get_close_matches(key, leaves(defaults), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{source}: unknown key {key}{hint}")
    for key in changed(config, defaults):
        if not any(f"{key}.".startswith(f"{name}.") for name in READ):
            raise ConfigError(f"{key} is verl's, but this loop does not read it, so setting it would do nothing")
    return config, defaults


def read_yaml(file: str) -> DictConfig:
    """A recipe file. Raises ConfigError naming the file."""
    try:
        loaded = OmegaConf.load(file)
    except FileNotFoundError:
        raise ConfigError(f"--config {file}: no such file") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"--config {file}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"--config {file}: a recipe is a YAML mapping")
    return loaded


def apply_environment(config: DictConfig, here: Path) -> None:
    """Give this process, and through it every worker, the recipe's environment variables and this folder's modules."""
    variables = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    paths = [str(here), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    for name, value in {**variables, "PYTHONPATH": os.environ["PYTHONPATH"]}.items():
        os.environ[name] = str(value)
        OmegaConf.update(config, f"ray_kwargs.ray_init.runtime_env.env_vars.{name}", str(value), force_add=True)


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

    train: list[env.Task]
    validation: list[env.Task]
    dropped: list[str]  # rows whose prompt is over data.max_prompt_length
    tokenizer: Any
    stop_ids: set[int]


def stop_token_ids(tokenizer: Any, generation_config: Any) -> set[int]:
    """Every id that ends a response: the tokenizer's EOS and those of generation_config.json."""
    ids = {tokenizer.eos_token_id}
    eos = getattr(generation_config, "eos_token_id", None)
    ids |= set(eos) if isinstance(eos, (list, tuple)) else {eos}
    return ids - {None}


def prepare(config: DictConfig, command: str = "train") -> Data:
    """Check the recipe against its model, files and sizes, and fill in what follows from them.

    command: train, rollout (needs no val_files) or evaluate (needs no train_files). Raises ConfigError,
    env.DataError, gym_client.GymError or gym_servers.GymStartError, before any worker starts.
    """
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    files = "env.val_files" if command == "evaluate" else "env.train_files"
    if not OmegaConf.select(config, files):
        raise ConfigError(f"{files} is not set")
    if not config.gym.servers and not config.gym.head:
        raise ConfigError("gym.servers is not set")
    check_sizes(config, command)
    tokenizer, hf_config, stop_ids = load_model_files(config)

    servers, aliases = to_plain(config.gym.servers), {name: name for name in config.gym.servers}
    found: dict[str, str] = {}
    if config.gym.head:
        found, agents = gym_client.discover(config.gym.head)
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
            f"env.train_files hold {len(train_tasks)} usable rows, fewer than data.train_batch_size={size}"
        )
    if not tasks:
        raise ConfigError(f"{files} hold no usable row; the first dropped: {', '.join([*dropped, *val_dropped][:1])}")
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

    # what follows from the above, unless the recipe says it
    longest = limit + config.data.max_response_length
    rollout.max_model_len = rollout.max_model_len or longest
    for key in MICRO_BATCH_TOKENS:  # verl packs whole episodes, so the longest must fit
        OmegaConf.update(config, key, max(OmegaConf.select(config, key), longest))
    actor.optim.total_training_steps = config.trainer.total_training_steps
    text_config = hf_config.get_text_config()
    largest_mb = math.ceil(text_config.vocab_size * text_config.hidden_size * 4 / 2**20) + 1  # the embedding, fp32
    sync = rollout.checkpoint_engine
    sync.update_weights_bucket_megabytes = max(sync.update_weights_bucket_megabytes, largest_mb)
    return Data(train_tasks, val_tasks, dropped + val_dropped, tokenizer, stop_ids)


def check_sizes(config: DictConfig, command: str) -> None:
    """Batches, groups and GPUs go into one another. Raises ConfigError."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    world = config.trainer.n_gpus_per_node * config.trainer.nnodes
    prompts, n, mini = config.data.train_batch_size, rollout.n, actor.ppo_mini_batch_size
    infer = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    if world % infer:
        raise ConfigError(
            f"{world} GPUs do not divide by rollout.tensor_model_parallel_size * data_parallel_size = {infer}"
        )
    if command != "train":
        return
    if prompts % mini:
        raise ConfigError(
            f"data.train_batch_size={prompts} does not divide by actor_rollout_ref.actor.ppo_mini_batch_size={mini}"
        )
    if mini * n % world:
        raise ConfigError(f"ppo_mini_batch_size * rollout.n = {mini} * {n} episodes do not divide among {world} GPUs")
    if config.algorithm.adv_estimator in NOT_YET:
        raise ConfigError(f"algorithm.adv_estimator={config.algorithm.adv_estimator} is not supported by this loop")
    if n < 2 and config.algorithm.adv_estimator not in ALONE:
        raise ConfigError(f"actor_rollout_ref.rollout.n={n}: a group needs at least two answers to compare")


def load_model_files(config: DictConfig) -> tuple[Any, Any, set[int]]:
    """(tokenizer, Hugging Face config, stop ids) of the model; its path is made absolute. Raises ConfigError."""
    model = config.actor_rollout_ref.model
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        if model.external_lib:
            importlib.import_module(model.external_lib)  # a module of one's own; the workers import it by themselves
    except ImportError as error:
        raise ConfigError(f"actor_rollout_ref.model.external_lib={model.external_lib}: {error}") from None

    if (path := Path(model.path).expanduser()).is_dir():
        model.path = str(path.resolve())
    elif model.path.startswith((".", "/", "~")) or model.path.count("/") > 1:
        raise ConfigError(f"actor_rollout_ref.model.path={model.path}: no such folder")
    try:
        hf_config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"actor_rollout_ref.model.path={model.path}: no model folder, and no model of the hub: {why}"
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


def check_tool_format(name: str) -> None:
    """The parser that reads the model's tool calls exists. Raises ConfigError."""
    from vllm.tool_parsers import ToolParserManager  # takes 7 s, and is needed anyway

    known = ToolParserManager.list_registered()
    if name not in known:
        key = f"actor_rollout_ref.rollout.multi_turn.format={name}"
        raise ConfigError(f"{key}: vLLM has no such tool parser; it has {', '.join(known)}")


def resume_point(config: DictConfig) -> Path | None:
    """The checkpoint to go on from, by verl's keys: trainer.resume_mode = auto | disable | resume_path.

    Raises ConfigError if nothing would be left to train.
    """
    folder, total = Path(config.trainer.default_local_dir), config.trainer.total_training_steps
    pointer = folder / "latest_checkpointed_iteration.txt"
    if config.trainer.resume_mode == "resume_path":
        checkpoint = Path(config.trainer.resume_from_path)
    elif config.trainer.resume_mode == "auto" and pointer.is_file():
        checkpoint = folder / f"global_step_{pointer.read_text()}"
    else:
        return None
    if not (checkpoint / "data.pt").is_file():
        raise ConfigError(f"trainer.resume_mode={config.trainer.resume_mode}: no checkpoint in {checkpoint}")
    if int(checkpoint.name.removeprefix("global_step_")) >= total:
        more = "raise trainer.total_training_steps, or give the run another trainer.experiment_name"
        raise ConfigError(f"nothing left to train: {checkpoint} is the last of {total} steps; {more}")
    return checkpoint


def summary(config: DictConfig, data: Data, command: str) -> str:
    """The sizes that follow from the recipe, one a line."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    prompts, steps = config.data.train_batch_size, config.trainer.total_training_steps
    world = config.trainer.n_gpus_per_node * config.trainer.nnodes
    replicas = world // (rollout.tensor_model_parallel_size * rollout.data_parallel_size)
    by_server = Counter(task.server for task in [*data.train, *data.validation])
    longest = f"{config.data.max_prompt_length} + {config.data.max_response_length} tokens"
    dropped = f"{len(data.dropped)} dropped (prompt over {config.data.max_prompt_length} tokens)"
    lines = [
        f"model       {config.actor_rollout_ref.model.path}",
        f"rows        {len(data.train)} to train on, {len(data.validation)} held out, {dropped}",
        *(f"            dropped {row}" for row in data.dropped[:5]),
        f"servers     {', '.join(f'{name} ({rows} rows)' for name, rows in by_server.items())}",
    ]
    if command == "train":
        updates = prompts // actor.ppo_mini_batch_size * actor.ppo_epochs
        lines += [
            f"step        {prompts} prompts x {rollout.n} answers = {prompts * rollout.n} episodes "
            f"of at most {longest}; {updates} optimiser step{'s' * (updates > 1)}",
            f"training    {steps} steps = {steps * prompts / len(data.train):.2f} epochs; lr {actor.optim.lr:g}; "
            f"{config.algorithm.adv_estimator}, {actor.policy_loss.loss_mode} loss; "
            f"micro-batches of {actor.ppo_max_token_len_per_gpu} tokens",
        ]
    else:
        tasks, n = (data.train, rollout.n) if command == "rollout" else (data.validation, rollout.val_kwargs.n)
        lines.append(f"{command:11} {len(tasks)} rows x {n} episodes of at most {longest}")
    buckets = f", sync buckets of {rollout.checkpoint_engine.update_weights_bucket_megabytes} MB"
    lines += [
        f"devices     {world} {config.trainer.device}, {replicas} vLLM replica{'s' * (replicas > 1)}"
        + buckets * (command == "train"),
        f"stop ids    {sorted(data.stop_ids)}, pad id {data.tokenizer.pad_token_id}",
    ]
    seen = {json.dumps(task.messages) for task in data.train if task.messages}
    if shared := sum(json.dumps(task.messages) in seen for task in data.validation):
        lines.append(f"WARNING     {shared} of the held-out prompts are also in env.train_files")
    return "\n".join(lines)


def dry_run(config: DictConfig, defaults: DictConfig, data: Data, console: Console) -> None:
    """Print what the recipe changes of verl's defaults, and the first prompt as the model sees it."""
    console.print("changed from verl's defaults:", highlight=False)
    for key, (value, default) in changed(config, defaults).items():
        if not key.startswith(("gym.", "env.")):
            console.print(f"    {key}: {value} (was {default})", markup=False, highlight=False, soft_wrap=True)
    for section in ("gym", "env"):
        text = OmegaConf.to_yaml(config[section], resolve=True).strip().replace("\n", "\n    ")
        console.print(f"{section}:\n    {text}", markup=False, highlight=False)
    for task in {task.server: task for task in reversed([*data.train, *data.validation])}.values():
        console.print(
            f"first prompt for {task.server} ({task.row_id}, {len(task.prompt_ids)} tokens):", highlight=False
        )
        prompt = data.tokenizer.decode(task.prompt_ids) if task.prompt_ids else "(the environment writes it)"
        console.print(prompt, markup=False, highlight=False, style="dim")
    console.print("dry run: model, files, sizes and servers are in order; nothing was started", highlight=False)
