"""What a recipe comes to, before anything starts: prepared, summed up, shown."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import os
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

import env
from kit.config import checks, user_functions
from kit.config.load import (
    MICRO_BATCH_TOKENS,
    MODEL,
    ROLLOUT,
    changed,
    public,
    raise_all,
    sampling_gpus,
    to_plain,
)
from kit.data import verl_rows
from kit.errors import ConfigError
from kit.extras import images, parallelism
from kit.extras.judges import judge_proxy
from kit.extras.preflight import memory, node
from kit.extras.python_verifiers import verifier_pool
from kit.gym import servers as gym_servers

TRAIN, VAL = "env.train_files", "env.val_files"
FILES = {
    "train": [TRAIN, VAL],
    "sft": [TRAIN, VAL],
    "rollout": [TRAIN],
    "evaluate": [VAL],
}  # the first must be given


@dataclasses.dataclass
class Data:
    """What the checks loaded: tasks, the tokenizer, and the ids that end a response."""

    train: list[Any]  # env.Task; for sft, sft.Example
    validation: list[Any]
    dropped: list[str]  # rows whose prompt is over data.max_prompt_length
    tokenizer: Any
    stop_ids: set[int]
    reward: Callable[[Any], float]  # what an episode is worth: the verifier's word, or env.reward
    filters: list[
        Callable[[list[Any]], list[Any]]
    ]  # env.filters, and verl's algorithm.filter_groups
    sampler: Callable[..., list[env.Task]]  # (tasks, size, batch, seed, pass_rates) -> tasks
    model: Any  # the Hugging Face config of the model's text part
    made: list[env.Task] = dataclasses.field(
        default_factory=list
    )  # of batch 1, what functions of env.train_files make
    per_epoch: float = math.inf  # prompts of an epoch of the files' rows; infinite without files


def prepare(config: DictConfig, command: str = "train") -> Data:
    """Check the recipe against its model, files and servers, fill in what follows from them, and load its tasks.

    command: train, rollout or evaluate; sft.py prepares its own. Raises ConfigError, PluginError, env.DataError,
    gym_client.GymError or gym_servers.GymStartError, before any worker starts.
    """
    tokenizer, stop_ids, ideas = check_recipe(config, command)
    found, agents = (
        gym_servers.discover(config.gym.head_server) if config.gym.head_server else ({}, {})
    )
    aliases = {name: name for name in (*found, *config.gym.servers)}
    aliases = {agent: server for agent, server in agents.items() if server in found} | aliases
    own = verifier_pool.of_recipe(config)
    data = Data([], [], [], tokenizer, stop_ids, *ideas)
    load_rows(config, command, data, aliases, own)
    check_sandbox(config, data)
    tasks = [*data.train, *data.made, *data.validation]
    if vision := getattr(tokenizer, "vision", None):
        images.check(config, vision, tasks, command)
    if any(task.tools for task in tasks):
        checks.check_tool_format(config.actor_rollout_ref.rollout.multi_turn.format)
        checks.check_tools(task for task in tasks if task.server not in own)
    for name in sorted({task.server for task in tasks} - {*config.gym.servers, *own}):
        config.gym.servers[name] = {"url": found[name]}
    for name, server in to_plain(config.gym.servers).items():
        if server.get("url"):
            gym_servers.check_server(name, server)
    for judge in judge_proxy.judges(to_plain(config.gym.judges), config.gym.timeout_s).values():
        if judge.url and not judge.start:
            judge_proxy.reach(judge)
    if own:
        verifier_pool.try_out(own, tasks, config, tokenizer)
    return data


def load_rows(
    config: DictConfig,
    command: str,
    data: Data,
    aliases: Mapping[str, str],
    own: Mapping[str, verifier_pool.Function],
) -> None:
    """Fill in the tasks of `data`, and the steps that they make. Rows of a file that one of `own` verifies are its,
    whatever server they name. Raises ConfigError, PluginError, env.DataError."""
    limit, size, seed = (
        config.data.max_prompt_length,
        config.data.train_batch_size,
        config.data.seed,
    )
    only, of = to_plain(config.env.only_servers), data.tokenizer

    def load(entries: Sequence[Any], read: Any) -> tuple[list[env.Task], list[str]]:
        tasks, dropped = list[env.Task](), list[str]()
        for entry in entries:
            name = entry.get("server") if isinstance(entry, Mapping) else None
            known = {name: name} if name in own else aliases
            some, over = env.load_tasks([entry], of, known, limit, only, read)
            tasks, dropped = [*tasks, *some], [*dropped, *over]
        return tasks, dropped

    read = functools.partial(verl_rows.read, prompt_key=config.data.prompt_key)
    tasks_of = functools.partial(verl_rows.make, load=load, key=config.data.prompt_key)
    given = {
        key: [entry for entry, _ in verifier_pool.of_files(config, key)] for key in FILES[command]
    }
    (files, made), (val_files, val_made) = (
        verl_rows.split(given.get(key, []), key) for key in (TRAIN, VAL)
    )
    (train, dropped), (validation, over) = load(files, read=read), load(val_files, read=read)
    most, val_most = config.env.max_rows, config.env.val_max_rows
    validation += verl_rows.once(val_made, val_most, "env.val_max_rows", seed, tasks_of)
    if command == "rollout":
        train, made = train + verl_rows.once(made, most, "env.max_rows", seed, tasks_of), []
    data.train, data.validation, data.dropped = (
        train[:most],
        validation[:val_most],
        [*dropped, *over],
    )
    held, lost = len(data.train), f"dropped: {', '.join(data.dropped[:3]) or 'none'}"
    if not (data.validation if command == "evaluate" else data.train) and (files or not made):
        way_out = f"add some, or raise data.max_prompt_length={limit}"
        raise ConfigError(f"{FILES[command][0]} hold 0 usable rows; {way_out}; {lost}")
    counts = verl_rows.shares(made, data.train, size) if made else {}
    share = size - sum(counts[source.file] for source in made)  # of the files
    if command == "train" and held < share:
        theirs = f"their {share} of " if share < size else ""
        few = f"{TRAIN} hold {held} usable rows, fewer than {theirs}data.train_batch_size={size}"
        raise ConfigError(f"{few}; add some, or lower it; {lost}")
    if made:
        if config.env.sampler and not files:
            raise ConfigError(
                f"env.sampler picks rows of files, and {TRAIN} has functions only; leave it out"
            )
        data.made = verl_rows.first(made, counts, seed, tasks_of)
        data.sampler = functools.partial(
            verl_rows.draw, made=made, sampler=data.sampler, tasks_of=tasks_of
        )
    data.per_epoch = held * size / share if share else math.inf
    set_steps(config, command, held // size, endless=bool(made))


def set_steps(config: DictConfig, command: str, batches: int, endless: bool = False) -> None:
    """Where trainer.total_training_steps is null: trainer.total_epochs of so many whole batches, as verl counts them.
    The workers' schedules get it. Raises ConfigError."""
    trainer, optims = config.trainer, (config.actor_rollout_ref.actor.optim, config.critic.optim)
    if trainer.total_training_steps is None and command in ("train", "sft"):
        if endless:
            why = f"rows of a function in {TRAIN} have no epochs to count"
            raise ConfigError(f"trainer.total_training_steps=null: {why}; set it")
        trainer.total_training_steps = trainer.total_epochs * batches
    for optim in optims:
        optim.total_training_steps = trainer.total_training_steps or -1


def check_recipe(
    config: DictConfig, command: str, problems: Sequence[Exception] = ()
) -> tuple[Any, set[int], Any]:
    """What every command checks and fills in -> (tokenizer, stop ids, the last four of Data).

    What takes no time is checked first, and all that is wrong there is told at once, with `problems`: what load_config
    found. Then what takes 7 s to import; then the model, which may be on the hub. Raises as `prepare`.
    """
    verifier_pool.leave_out_servers(config)
    texts = [
        *checks.check_choices(config),
        *checks.check_sizes(config, command),
        *checks.check_algorithm(config),
    ]
    texts += [*checks.check_sampling(config, command), *checks.check_backend(config)]
    texts += checks.check_servers(config) if command == "train" else ()
    raise_all([*problems, *check_files(config, command), *map(ConfigError, texts)])
    if library := config.actor_rollout_ref.model.external_lib:
        try:
            importlib.import_module(
                library
            )  # for its names in verl's registries; the workers import it by themselves
        except ImportError as error:
            way_out = "install it, or add its folder to PYTHONPATH"
            raise ConfigError(
                f"{MODEL}.external_lib={library} cannot be imported: {error}; {way_out}"
            ) from None
    ideas = user_functions.functions(config)
    raise_all([ConfigError(text) for text in checks.check_names(config, command)])
    texts = [*checks.check_pools(config)] if command == "train" else []
    texts += parallelism.problems(
        config, critic=command == "train" and user_functions.asks_for(config, "values")
    )
    raise_all([ConfigError(text) for text in texts])
    checks.build(config)
    tokenizer, hf_config, stop_ids = load_model_files(config)
    if config.reward.reward_model.enable:
        checks.check_reward_model(config, tokenizer)
    if command == "train" and user_functions.teacher(config):
        checks.check_vocabulary(config, user_functions.TEACHER, tokenizer)
    fill_in(config, hf_config, command)
    raise_all(
        [
            ConfigError(text)
            for text in checks.check_quantization(config, hf_config.get_text_config())
        ]
    )
    return tokenizer, stop_ids, (*ideas, hf_config.get_text_config())


def check_files(config: DictConfig, command: str) -> Iterator[Exception]:
    """The rows, the servers' interpreters and the models' folders are there, or named; without the network."""
    for key in FILES[command]:
        given = to_plain(OmegaConf.select(config, key))
        if isinstance(given, str):
            yield ConfigError(f"{key}={given}: wants a list, '{key}=[{given}]'")
        elif not given and key == FILES[command][0]:
            yield ConfigError(
                f"{key} is not set: name a task, like --config math_cpu, before other overlays"
            )
        for entry in given if isinstance(given, list) else ():
            path = str(entry.get("path", entry) if isinstance(entry, Mapping) else entry)
            columns = [config.data.prompt_key, *["messages"] * (command == "sft")]
            try:
                if not verl_rows.split([entry], key)[1]:
                    next(env.raw_rows(path, *columns), None)
                elif command == "sft":
                    yield ConfigError(
                        f"{key}={path}: `sft` takes files; write the function's rows to one"
                    )
            except (env.DataError, user_functions.PluginError) as error:
                yield error
    if command != "sft":
        yield from verifier_pool.check(config)
        yield from check_servers(config)
    paths = {
        f"{MODEL}.path": True,
        "reward.reward_model.model_path": config.reward.reward_model.enable,
    }
    paths[user_functions.TEACHER] = config.distillation.enabled
    for key in [key for key, wanted in paths.items() if wanted]:
        name = str(OmegaConf.select(config, key) or "")
        if not name:
            yield ConfigError(f"this recipe needs {key}")
        elif (folder := Path(name).expanduser()).is_dir():
            OmegaConf.update(config, key, str(folder.resolve()))  # for workers elsewhere
        elif (
            name.startswith((".", "/", "~"))
            or ("/" in name and folder.parent.is_dir())
            or len(folder.parts) > 2
        ):
            where = "give one that is there, or a name of the hub (`make model` fetches the demo's)"
            yield ConfigError(f"{key}={name}: no model folder; {where}")


def check_servers(config: DictConfig) -> Iterator[Exception]:
    """Each server has an address or what it takes to start it, and agents that others start have a key."""
    entries = [
        entry for key in (TRAIN, VAL) for entry in to_plain(OmegaConf.select(config, key)) or ()
    ]
    own = config.env.verifier or any(
        isinstance(entry, Mapping) and entry.get("verifier") for entry in entries
    )
    if not (config.gym.servers or config.gym.head_server or own):
        why = "name those of the rows (as in configs/math.yaml), or set gym.head_server, or env.verifier to a function"
        yield ConfigError(f"gym.servers is not set; {why}")
    asked, judges, trust = (
        set[str](),
        to_plain(config.gym.judges) or {},
        to_plain(config.gym.unchecked_judges) or [],
    )
    for name, server in to_plain(config.gym.servers).items():
        given = [key for key, value in (server or {}).items() if value is not None]
        if given not in (["url"], ["start"]):
            how = "either url: http://host:port or start: {python, server, port, config}"
            yield ConfigError(f"gym.servers.{name} takes {how}")
        elif given == ["start"]:
            try:
                gym_servers.check_server(name, server)
                asked |= set(gym_servers.asked_models(name, server["start"]).values())
                gym_servers.check_asked(name, server["start"], judges, trust)
            except gym_servers.GymStartError as error:
                yield error
    yield from map(
        ConfigError, judge_proxy.problems(judges, config.gym.timeout_s, config.trainer.device)
    )
    if idle := [name for name in judges if name not in asked]:
        way_out = f"they ask {', '.join(sorted(asked)) or 'none'}"
        yield ConfigError(
            f"gym.judges.{idle[0]}: no server that the kit starts asks it; {way_out}; leave it out"
        )
    if unknown := [name for name in trust if name not in config.gym.servers]:
        yield ConfigError(
            f"gym.unchecked_judges: {unknown[0]} is none of gym.servers; leave it out"
        )
    if config.gym.policy_endpoint.port and not gym_servers.is_port(config.gym.policy_endpoint.port):
        yield ConfigError(
            f"gym.policy_endpoint.port is {config.gym.policy_endpoint.port!r}; it takes a port up to 65535, or nothing"
        )
    if config.gym.policy_endpoint.port and not os.environ.get("POLICY_API_KEY"):
        yield ConfigError(
            "gym.policy_endpoint.port: the environment variable POLICY_API_KEY must hold the key that agents give"
        )


def fill_in(config: DictConfig, hf_config: Any, command: str = "train") -> None:
    """What follows from the model and the recipe, unless the recipe says it. Raises ConfigError."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    longest = config.data.max_prompt_length + config.data.max_response_length
    # verl's SGLang server leaves one token free
    rollout.max_model_len = rollout.max_model_len or longest + (rollout.name == "sglang")
    rollout.prometheus.file = os.path.abspath(
        rollout.prometheus.file
    )  # verl writes it in a process of Ray's
    if checks.drafts_of(config):
        rollout.disable_log_stats = False  # for rollout/drafts_accepted_frac
    text_config = hf_config.get_text_config()
    # verl sends each expert by itself, transformers has them as one
    if rollout.name == "hf" and memory.experts_of(text_config):
        raise ConfigError(
            f"{ROLLOUT}.name=hf takes no mixture of experts from verl; leave it out, for vLLM"
        )
    most = getattr(text_config, "max_position_embeddings", None) or rollout.max_model_len
    if command != "sft" and rollout.max_model_len > most:
        key = f"data.max_prompt_length + max_response_length = {longest}, rollout.max_model_len={rollout.max_model_len}"
        raise ConfigError(f"{key}: the model has no more than {most} positions; lower these")
    share = math.ceil(longest / parallelism.row_parts(config))
    for key in (
        MICRO_BATCH_TOKENS
    ):  # verl packs whole episodes, so the longest must fit, each GPU holding its share
        OmegaConf.update(config, key, max(OmegaConf.select(config, key), share))
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and not actor.loss_scale_factor:
        actor.loss_scale_factor = (
            config.data.max_response_length
        )  # else verl divides by each micro-batch's own width
    if (
        config.algorithm.rollout_correction.bypass_mode
    ):  # verl's apply_bypass_mode, before the workers start
        actor.policy_loss.loss_mode = "bypass_mode"
        actor.policy_loss.rollout_correction = config.algorithm.rollout_correction
    if config.trainer.device == "cpu" and rollout.tensor_model_parallel_size > 1:
        rollout.engine_kwargs.vllm.pop(
            "distributed_executor_backend", None
        )  # verl's: a process of each part
    largest_mb = (
        math.ceil(text_config.vocab_size * text_config.hidden_size * 4 / 2**20) + 1
    )  # the embedding, fp32
    sync = rollout.checkpoint_engine
    if (
        command != "train"
    ):  # nobody sends weights, and verl makes an engine of that name all the same
        sync.backend = "naive"
    sync.update_weights_bucket_megabytes = max(sync.update_weights_bucket_megabytes, largest_mb)


def stop_token_ids(tokenizer: Any, generation_config: Any) -> set[int]:
    """Every id that ends a response: the tokenizer's EOS and those of generation_config.json."""
    eos = getattr(generation_config, "eos_token_id", None)
    return {tokenizer.eos_token_id, *(eos if isinstance(eos, (list, tuple)) else [eos])} - {None}


def load_model_files(config: DictConfig) -> tuple[Any, Any, set[int]]:
    """(tokenizer, Hugging Face config, ids that end a response) of the model. Raises ConfigError."""
    from transformers import GenerationConfig

    model = config.actor_rollout_ref.model
    hf_config, tokenizer = checks.pretrained(
        config, f"{MODEL}.path", trust_remote_code=model.trust_remote_code
    )
    try:
        generation = GenerationConfig.from_pretrained(model.path)
    except OSError:
        generation = None  # a model without generation_config.json stops at the tokenizer's EOS
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = (
            tokenizer.eos_token
        )  # padding is known by the attention mask, so any id will do
    if model.custom_chat_template:
        tokenizer.chat_template = model.custom_chat_template
    if vision := images.vision_of(config, hf_config, tokenizer):
        tokenizer.vision = vision
    if not tokenizer.chat_template:
        raise ConfigError(f"{model.path} has no chat template; set {MODEL}.custom_chat_template")
    return tokenizer, hf_config, stop_token_ids(tokenizer, generation)


# --- what it comes to ----------------------------------------------------------------------------


def summary(config: DictConfig, data: Data, command: str) -> str:
    """The sizes that follow from the recipe, and its warnings, one a line."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    prompts, steps = config.data.train_batch_size, config.trainer.total_training_steps
    world = config.trainer.n_gpus_per_node * config.trainer.nnodes
    replicas = sampling_gpus(config) // (
        rollout.tensor_model_parallel_size * rollout.data_parallel_size
    )
    longest = f"{config.data.max_prompt_length} + {config.data.max_response_length} tokens"
    apart = {
        role: count * config.trainer.nnodes
        for role, count in config.trainer.resource_pools.items()
        if count
    }
    apart |= {"sampler": sampling_gpus(config)} if rollout.nnodes else {}
    pools = "".join(f" + {count} for the {role.replace('_', ' ')}" for role, count in apart.items())
    over = (
        f"over {longest}"
        if command == "sft"
        else f"prompt over {config.data.max_prompt_length} tokens"
    )
    dropped = f"{len(data.dropped)} dropped ({over})"
    lacking = [
        *memory.report(config, data.model, command)[1],
        *node.lacks(config, data.model, command),
    ]
    made = Counter(task.file for task in data.made)
    lines = [
        f"model       {config.actor_rollout_ref.model.path}",
        f"rows        {len(data.train)} to train on, {len(data.validation)} held out, {dropped}",
        *(f"            made by {name}: {count} of each batch" for name, count in made.items()),
        *(f"            dropped {row}" for row in data.dropped[:5]),
    ]
    epochs = (
        f" = {steps * prompts / data.per_epoch:.2f} epochs"
        if data.train and command in ("train", "sft")
        else ""
    )
    if command == "sft":
        size = f"{prompts} conversations of at most {longest}, one optimiser step"
        lines += [
            f"step        {size}",
            f"training    {steps} steps{epochs}; lr {actor.optim.lr:g}",
        ]
        return "\n".join([*lines, *(f"WARNING     {text}" for text in lacking)])
    by_server = Counter(task.server for task in [*data.train, *data.made, *data.validation])
    lines.append(
        f"servers     {', '.join(f'{name} ({rows} rows)' for name, rows in by_server.items())}"
    )
    if own := verifier_pool.of_recipe(config):
        lines.append(f"verifier    {verifier_pool.told(config, list(own.values()))}")
    lines += judge_proxy.told(judge_proxy.judges(to_plain(config.gym.judges), config.gym.timeout_s))
    buckets = ""
    if command == "train":
        updates = prompts // actor.ppo_mini_batch_size * actor.ppo_epochs
        lines += [
            *filter(None, [named(config)]),
            f"step        {prompts} prompts x {rollout.n} answers = {prompts * rollout.n} episodes "
            f"of at most {longest}; {updates} optimiser step{'s' * (updates > 1)}",
            f"training    {steps} steps{epochs}; lr {actor.optim.lr:g}; "
            f"{config.algorithm.adv_estimator}, {actor.policy_loss.loss_mode} loss; "
            f"micro-batches of {actor.ppo_max_token_len_per_gpu} tokens",
        ]
        buckets = (
            f", sync buckets of {rollout.checkpoint_engine.update_weights_bucket_megabytes} MB"
        )
    else:
        tasks, n = (
            (data.train, rollout.n)
            if command == "rollout"
            else (data.validation, rollout.val_kwargs.n)
        )
        lines.append(f"{command:11} {len(tasks)} rows x {n} episodes of at most {longest}")
    parts = ", ".join(
        f"{name} {count}" for name, count in parallelism.sizes(config).items() if count > 1
    )
    cut = f" of {config.model_engine} ({parts or 'each with the whole model'})" * (
        config.model_engine != "dp"
    )
    engine = checks.SAMPLERS[rollout.name] + f" replica{'s' * (replicas > 1)}"
    lines += [
        f"devices     {world} {config.trainer.device}{cut}{pools}, {replicas} {engine}{buckets}",
        f"stop ids    {sorted(data.stop_ids)}, pad id {data.tokenizer.pad_token_id}",
    ]
    return "\n".join(
        [*lines, *(f"WARNING     {text}" for text in [*lacking, *cautions(config, data)])]
    )


def named(config: DictConfig) -> str:
    """The functions of one's own that make the batch, with their settings."""
    parts: list[str] = []
    for key in ("reward", "filters", "sampler"):
        given, texts = to_plain(config.env[key]) or [], []
        for spec in given if isinstance(given, list) else [given]:
            settings = dict(spec) if isinstance(spec, Mapping) else {"function": spec}
            texts.append(settings.pop("function"))
            texts[-1] += (
                f" {yaml.safe_dump(settings, default_flow_style=True, width=1000).strip()}"
                * bool(settings)
            )
        parts += [f"{key if parts else f'{key:11}'} {', '.join(texts)}"] if texts else []
    return "; ".join(parts)


def unsandboxed(config: DictConfig, data: Data) -> dict[str, bool]:
    """The verifiers of these rows that run code of the policy without a sandbox: {name: whether on this machine}."""
    tasks, own = [*data.train, *data.made, *data.validation], verifier_pool.of_recipe(config)
    found = {}
    for name in dict.fromkeys(task.server for task in tasks):
        if name in own:
            sources = {str(task.row.get("data_source")) for task in tasks if task.server == name}
            if verifier_pool.runs_code(own[name], sources) and not config.env.verifier_pool.sandbox:
                found[name] = True
        else:
            start = (config.gym.servers.get(name) or {}).get("start")
            if ((start or {}).get("server") or name) in checks.RUNS_CODE:
                found[name] = bool(start)  # else somebody else started it, elsewhere
    return found


def check_sandbox(config: DictConfig, data: Data) -> None:
    """Raise ConfigError if programs of the policy would run on this machine, and the recipe does not allow it."""
    if config.env.allow_unsandboxed_code:
        return
    own = verifier_pool.of_recipe(config)
    for name in (name for name, is_here in unsandboxed(config, data).items() if is_here):
        way_out = "start it in a container and give its url"
        if name in own:
            way_out = (
                "set env.verifier_pool.sandbox=bwrap, give it a sandbox_fusion_url (programs only)"
            )
        raise ConfigError(
            f"{name} runs the policy's code on this machine, as you, without a sandbox: {way_out}, or accept "
            "that by env.allow_unsandboxed_code=true"
        )


def cautions(config: DictConfig, data: Data) -> Iterator[str]:
    """What will work, and may not be what one wants."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.top_p < 1 or rollout.top_k > 0:
        why = "the sampler's log-probs are of what these leave, the trainer's of all tokens, so training/rollout_probs_"
        why += "diff_* grows and algorithm.rollout_correction is biased; leave them out unless you want that"
        yield f"rollout.top_p={rollout.top_p:g}, top_k={rollout.top_k}: {why}"
    tasks, own = [*data.train, *data.made, *data.validation], verifier_pool.of_recipe(config)
    for name, is_here in unsandboxed(config, data).items():
        where = "on this machine, as you" if is_here else "where it was started"
        why = "it may read keys and delete your files. Run all of this in a container without them"
        yield f"{name} RUNS THE MODEL'S CODE {where}, WITHOUT A SANDBOX: {why}"
    for name in dict.fromkeys(
        task.server for task in tasks if task.server not in own and "reward_model" in task.row
    ):
        why = "its verifier must read reward_model as it is; verl's own reward functions are for `verifier:` of a file"
        yield f"rows of verl's go to the server {name}: {why}"
    seen = {json.dumps(task.messages) for task in [*data.train, *data.made] if task.messages}
    if shared := sum(json.dumps(task.messages) in seen for task in data.validation):
        why = "take them out of one, or the score is of what was trained on"
        yield f"{shared} of the held-out prompts are also in env.train_files; {why}"


def shown(config: DictConfig, defaults: DictConfig, data: Data, command: str) -> str:
    """For a dry run: what memory the stages need, what the recipe changes of verl's defaults, the first prompt as the
    model sees it."""
    lines = [*memory.report(config, data.model, command)[0], "changed from verl's defaults:"]
    for key, (value, default) in changed(public(config), defaults).items():
        if not key.startswith(("gym.", "env.")):
            lines.append(f"    {key}: {value} (was {default})")
    for section in ("gym", "env"):
        lines.append(
            f"{section}:\n{textwrap.indent(OmegaConf.to_yaml(public(config)[section]).strip(), '    ')}"
        )
    tasks = [*data.train, *data.made, *data.validation]
    for task in {getattr(t, "server", "sft"): t for t in reversed(tasks)}.values():
        lines.append(f"first prompt ({task.row_id}, {len(task.prompt_ids)} tokens):")
        lines.append(
            data.tokenizer.decode(task.prompt_ids)
            if task.prompt_ids
            else "(the environment writes it)"
        )
    return "\n".join(
        [*lines, "dry run: model, files, sizes and servers are in order; nothing was started"]
    )
