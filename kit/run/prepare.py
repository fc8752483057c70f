"""From a recipe to the inputs of a run: check it, load its model files and rows, derive sizes."""

from __future__ import annotations

import importlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from omegaconf import DictConfig, OmegaConf

import env
from gym_client import RUNS_EPISODES
from kit import features
from kit.chat import template_trial, tool_calls
from kit.chat.processor import TextProcessor
from kit.chat.template import OUTPUTS, PARALLEL, TURNS, ChatTemplate
from kit.data import generated_rows
from kit.data.row_files import find_files, read_raw_rows
from kit.data.tasks import TaskLoader, limit_rows
from kit.engine.inputs import RunInputs
from kit.errors import ConfigError, UserFunctionError
from kit.features import Feature, OnFeatures, ignore_features
from kit.recipe import adapters, checks, model_files, user_functions
from kit.recipe.entries import Entry, parse_entry
from kit.recipe.keys import EPISODE_COMMANDS, SAMPLING_COMMANDS, make_command, to_plain
from kit.recipe.load import (
    ACTOR,
    COMMANDS,
    FSDP,
    MICRO_BATCH_TOKENS,
    MODEL,
    ROLLOUT,
    raise_all,
)
from kit.recipe.parallel_sizes import check_models
from kit.recipe.recipe import Recipe, find_parallelism, freeze
from kit.recipe.training_effect import check_schedule
from kit.run.console import say
from kit.run.verifier_trial import try_servers, try_verifiers
from kit.verify import network, process_specs
from kit.verify.python_verifiers.settings import (
    PythonVerifiers,
    VerifierSpec,
    read_verifiers,
    remove_unused_servers,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

CRITIC = "critic.model.path"
TRAIN = "env.train_files"
VAL = "env.val_files"
# {command: the keys that it reads}; the first key must be set
FILES = {command: [TRAIN, VAL] for command in COMMANDS} | {"rollout": [TRAIN], "evaluate": [VAL]}


class Prepared(NamedTuple):
    """A recipe that passed every check, and what was loaded for it."""

    recipe: Recipe
    inputs: RunInputs


def prepare(
    config: DictConfig,
    defaults: DictConfig,
    command: str = "train",
    on_features: OnFeatures = ignore_features,
) -> Prepared:
    """Check a configuration against its model, files and servers, and load its tasks.

    Fills in the values of `config` that follow from them, and makes a recipe of it. command: one
    with episodes. on_features: as of `check_recipe`. Raises ConfigError, UserFunctionError,
    env.DataError, gym_client.GymError or network.GymStartError, before any worker starts.
    """
    checked = check_recipe(config, defaults, command, on_features=on_features)
    inputs = checked.inputs
    servers: Mapping[str, str] = {}
    agents: Mapping[str, str] = {}
    if checked.recipe.gym.head_server:
        servers, agents = network.discover_servers(checked.recipe.gym.head_server)
    names = {name: name for name in (*servers, *config.gym.servers)}
    aliases = {agent: server for agent, server in agents.items() if server in servers}
    load_rows(config, command, inputs, aliases | names, checked.recipe.functions.sampler)
    custom = inputs.verifiers.specs
    check_code_execution(config, inputs)
    check_turns(config, inputs)
    if any(task.tools for task in inputs.tasks):
        set_tool_format(config, inputs.template)
        checks.check_tools(task for task in inputs.tasks if task.server not in custom)
    used = {task.server for task in inputs.tasks}
    for name in sorted(used - {*config.gym.servers, *custom}):
        config.gym.servers[name] = {"url": servers[name]}
    inputs.processor.check(config, inputs.tasks, command)
    recipe = checked.recipe.with_config(config)
    check_schedule(recipe)
    check_running_servers(recipe)
    for feature in recipe.features:
        feature.check_inputs(recipe, inputs)
    inputs.trials = try_verifiers(custom, inputs.tasks, recipe, inputs.scales)
    inputs.trials += try_servers(inputs.tasks, recipe, inputs.scales)
    return Prepared(recipe, inputs)


def check_recipe(
    config: DictConfig,
    defaults: DictConfig,
    command: str,
    on_features: OnFeatures = ignore_features,
) -> Prepared:
    """The checks of every command, cheap ones first -> a recipe and inputs without rows.

    There are three groups of checks. The first takes no time. The second needs verl, which takes
    7 s to import. The third loads the model's files, maybe from the hub. on_features: called with
    the features that are on, before the checks. Raises the errors of `prepare`.
    """
    remove_unused_servers(config)
    problems = [*adapters.check_lora(config), *model_files.take_chat_template(config)]
    raise_all(features.find_missing(config, command))
    active = features.make_features(config, command)
    on_features(active, config)
    verifiers = check_early(config, command, active, problems)
    import_external_library(config)
    functions = user_functions.load_recipe_functions(config)
    raise_all([ConfigError(problem) for problem in checks.check_names(config)])
    recipe = freeze(config, defaults, command, functions, active)
    check_late(recipe)
    checks.instantiate_verl_configs(recipe)
    files = model_files.load_model_files(config)
    processor = make_processor(config, files.hf_config, files.tokenizer)
    template = make_template(config, processor, files.stop_ids)
    models = {"policy": files.hf_config, **load_other_models(recipe, files.tokenizer)}
    raise_all([ConfigError(problem) for problem in check_models(recipe, models)])
    set_sizes(config, files.hf_config, command, active)
    recipe = recipe.with_config(config)
    model_problems = [feature.check_model(recipe, files.hf_config) for feature in active]
    raise_all([as_error(problem) for problem in itertools.chain(*model_problems)])
    inputs = RunInputs(
        train=[],
        validation=[],
        dropped=[],
        tokenizer=files.tokenizer,
        processor=processor,
        template=template,
        stop_ids=files.stop_ids,
        source=generated_rows.RowSource([], None, config.data.seed),  # load_rows sets it
        model=files.hf_config.get_text_config(),
        verifiers=verifiers,
    )
    return Prepared(recipe, inputs)


def make_processor(
    config: DictConfig, hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> TextProcessor:
    """The processor of a model: for text, or the one for images if the model reads them."""
    processor = None
    if getattr(hf_config, "vision_config", None) is not None:
        needed_by = f"the model {config.actor_rollout_ref.model.path}, which reads images,"
        images = features.load("images", needed_by)
        processor = images.make_processor(config, hf_config, tokenizer)
    return processor or TextProcessor(tokenizer)


def make_template(config: DictConfig, processor: TextProcessor, stop_ids: set[int]) -> ChatTemplate:
    """Make the chat template, and try it. Raises ConfigError if it has no prompts or answers."""
    if not processor.tokenizer.chat_template:
        path = config.actor_rollout_ref.model.path
        raise ConfigError(f"{path} has no chat template. Set {MODEL}.custom_chat_template.")
    arguments = to_plain(config.data.apply_chat_template_kwargs)
    tool_format = config.actor_rollout_ref.rollout.multi_turn.format
    template = ChatTemplate(processor, stop_ids, arguments, tool_format)
    template.failures = template_trial.try_template(template)
    for part in (template_trial.PROMPTS, template_trial.ANSWERS):
        if part in template.failures:
            raise ConfigError(template.describe_failure(part))
    return template


def check_early(
    config: DictConfig, command: str, active: Sequence[Feature], problems: Sequence[Exception]
) -> PythonVerifiers:
    """The checks that take no time -> the Python verifiers of the recipe, none without episodes."""
    errors: list[Exception | str] = [
        *problems,
        *check_files(config, command),
        *checks.check_choices(config),
        *checks.check_run(config),
        *checks.check_sizes(config, command, find_parallelism(config).model),
        *checks.check_algorithm(config),
        *checks.check_sampling(config, command),
    ]
    if command == "train":
        errors += checks.check_weight_sync(config)
    for feature in active:
        errors += feature.check_recipe(config)
    verifiers = PythonVerifiers({}, {})
    try:
        if command in EPISODE_COMMANDS:
            verifiers = read_verifiers(config)
    except (UserFunctionError, ConfigError) as error:
        errors.append(error)
    has_server = config.gym.servers or config.gym.head_server or config.env.verifier
    if command in EPISODE_COMMANDS and not (has_server or verifiers.specs):
        errors.append(
            "gym.servers is not set. Name the servers of the rows, as in configs/math.yaml, or set "
            "gym.head_server, or env.verifier to a function."
        )
    raise_all([as_error(error) for error in errors])
    return verifiers


def check_late(recipe: Recipe) -> None:
    """The checks that need verl, and the advantage and the loss that the recipe names."""
    errors: list[Exception | str] = []
    if recipe.command == "train":
        errors += checks.check_models(recipe)
    if recipe.verl.model_engine == FSDP:
        errors += checks.check_strategies(recipe)
    raise_all([as_error(error) for error in errors])


def as_error(problem: Exception | str) -> Exception:
    """A problem as an exception."""
    return problem if isinstance(problem, Exception) else ConfigError(problem)


def import_external_library(config: DictConfig) -> None:
    """Import model.external_lib for its entries in verl's registries. Raises ConfigError.

    The workers import it themselves.
    """
    library = config.actor_rollout_ref.model.external_lib
    if not library:
        return
    try:
        importlib.import_module(library)
    except ImportError as error:
        raise ConfigError(
            f"{MODEL}.external_lib={library} cannot be imported: {error}. Install it, or add its "
            "folder to PYTHONPATH."
        ) from None


def load_other_models(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> dict[str, PretrainedConfig]:
    """Check that other models read the policy's ids -> {name: its files}. Raises ConfigError."""
    models = {}
    if recipe.has_critic and recipe.get(CRITIC) != recipe.model.path:
        models["critic"] = model_files.check_vocabulary(recipe.verl, CRITIC, tokenizer)
    if recipe.has_reward_model:
        models["reward model"] = model_files.check_reward_model(recipe.verl, tokenizer)
    if recipe.teacher:
        key = user_functions.TEACHER
        models["teacher"] = model_files.check_vocabulary(recipe.verl, key, tokenizer)
    return models


# --- files and servers that the recipe names -----------------------------------------------------


def check_files(config: DictConfig, command: str) -> Iterator[Exception]:
    """Row files, servers' interpreters and model folders exist. Hub names are not checked."""
    for key in FILES[command]:
        yield from check_row_files(config, command, key)
    if command in EPISODE_COMMANDS:
        yield from check_servers(config)
    needed = [f"{MODEL}.path"]
    if config.reward.reward_model.enable:
        needed.append(model_files.REWARD_MODEL)
    if config.distillation.enabled:
        needed.append(user_functions.TEACHER)
    if OmegaConf.select(config, CRITIC) != config.actor_rollout_ref.model.path:
        needed.append(CRITIC)
    for key in needed:
        yield from check_model_path(config, key)


def check_row_files(config: DictConfig, command: str, key: str) -> Iterator[Exception]:
    """The files of env.train_files or env.val_files can be read, and functions imported."""
    entries = to_plain(OmegaConf.select(config, key))
    if not entries and key == FILES[command][0]:
        yield ConfigError(
            f"{key} is not set. Name a task, such as --config math_cpu, before other recipes."
        )
    has_episodes = command in EPISODE_COMMANDS
    for entry in map(parse_entry, entries or []):
        try:
            if entry.function and not has_episodes:
                yield ConfigError(
                    f"{key}={entry.file}: `{command}` reads files only. Write the function's rows "
                    "to one."
                )
            elif entry.function:
                user_functions.load_function(entry.function, key)
            else:
                read_first_rows(entry.file)
        except (env.DataError, UserFunctionError, ConfigError) as error:
            yield error


def read_first_rows(path: str) -> None:
    """Read the first row of each file of a path. Raises env.DataError."""
    for file in find_files(path):
        next(read_raw_rows(file), None)


def check_model_path(config: DictConfig, key: str) -> Iterator[Exception]:
    """A key names a model folder, or maybe a model of the hub. Makes a folder's path absolute."""
    name = str(OmegaConf.select(config, key) or "")
    if not name:
        yield ConfigError(f"This recipe needs {key}. Set it.")
        return
    folder = Path(name).expanduser()
    if folder.is_dir():
        OmegaConf.update(config, key, str(folder.resolve()))  # workers run in other folders
    elif folder.is_file():
        yield ConfigError(f"{key}={name} is a file. Give the model's folder, {folder.parent}.")
    elif model_files.is_missing_folder(name):
        yield ConfigError(
            f"{key}={name}: no such model folder. Give an existing one, or a name of the hub "
            f"(`{make_command('model')}` fetches the demo's model)."
        )


def check_servers(config: DictConfig) -> Iterator[Exception]:
    """Each Gym server that the run starts can work on this machine."""
    for name, server in to_plain(config.gym.servers).items():
        if server and server.get("start") is not None:
            try:
                process_specs.check_server(name, server)
            except network.GymStartError as error:
                yield error
    endpoint = config.gym.policy_endpoint
    try:
        network.check_address("gym.policy_endpoint", endpoint.host, endpoint.port)
    except network.GymStartError as error:
        yield error
    if endpoint.port and not os.environ.get("POLICY_API_KEY"):
        yield ConfigError(
            "gym.policy_endpoint.port needs the environment variable POLICY_API_KEY, the key that "
            "agents send. Set it."
        )


def check_running_servers(recipe: Recipe) -> None:
    """Check that each server with a `url` answers. Raises ConfigError, GymStartError."""
    for name, server in recipe.gym.servers.items():
        if not server.url:
            continue
        process_specs.check_server(name, server.model_dump())
        if server.kind in RUNS_EPISODES and not recipe.gym.policy_endpoint.port:
            raise ConfigError(
                f"gym.servers.{name} runs episodes and must know the address of the policy. Set "
                "gym.policy_endpoint.port, and give the port and POLICY_API_KEY to the agent."
            )


# --- rows ----------------------------------------------------------------------------------------


def load_rows(
    config: DictConfig,
    command: str,
    inputs: RunInputs,
    aliases: Mapping[str, str],
    sampler: Callable[..., list[env.Task]] | None,
) -> None:
    """Load the tasks of a command into `inputs`, and set the number of training steps.

    aliases: {agent or server: server}. sampler: of the rows. Raises ConfigError, UserFunctionError,
    env.DataError.
    """
    loader = TaskLoader(
        template=inputs.template,
        aliases=aliases,
        max_prompt_length=config.data.max_prompt_length,
        only_servers=to_plain(config.env.only_servers),
        custom_verifiers=inputs.verifiers.specs,
        prompt_key=config.data.prompt_key,
        report=say,
    )
    entries: dict[str, list[Entry]] = {TRAIN: [], VAL: []}
    for key in FILES[command]:
        entries[key] = list(inputs.verifiers.entries[key])
    tasks = {}
    for key, listed in entries.items():
        loaded = loader.load_files(listed)
        inputs.dropped += loaded.dropped
        tasks[key] = loaded.tasks
        if key == VAL or command == "rollout":
            tasks[key] += generated_rows.generate_once(config, listed, key, loader)
    inputs.train = limit_rows(tasks[TRAIN], config.env.max_rows)
    inputs.validation = limit_rows(tasks[VAL], config.env.val_max_rows)
    inputs.source = generated_rows.RowSource(
        inputs.train, sampler, config.data.seed, config.data.shuffle
    )
    if command == "train":
        inputs.source.functions = generated_rows.load_functions(
            entries[TRAIN], TRAIN, loader, config.data.seed
        )
    size = config.data.train_batch_size
    share = inputs.source.file_share()
    check_enough_rows(config, command, inputs, share)
    inputs.generated = inputs.source.generate_first(size)
    if share:
        inputs.per_epoch = len(inputs.train) / share
    set_steps(config, command, len(inputs.train) // size, is_endless=share < 1)


def check_enough_rows(
    config: DictConfig, command: str, inputs: RunInputs, share: float = 1.0
) -> None:
    """Check that the files have rows, and those of a batch to train. Raises ConfigError.

    share: of the rows of a batch that come from files.
    """
    key = FILES[command][0]
    found = len(inputs.validation if command == "evaluate" else inputs.train)
    size = config.data.train_batch_size
    entries = inputs.verifiers.entries.get(key, [Entry("a file")])
    needed = 0 if command == "train" and all(entry.function for entry in entries) else 1
    if command not in SAMPLING_COMMANDS:
        needed = max(needed, math.ceil(share * size - 1e-9))  # without the rounding error
    if found < needed:
        dropped = ", ".join(inputs.dropped[:3]) or "none"
        limits = f"data.max_prompt_length={config.data.max_prompt_length}"
        if command not in EPISODE_COMMANDS:  # the rows have the responses
            limits += f" or data.max_response_length={config.data.max_response_length}"
        raise ConfigError(
            f"{key} have {found} usable rows, fewer than {needed} (data.train_batch_size={size}); "
            f"dropped rows: {dropped}. Add rows, lower data.train_batch_size, or raise {limits}."
        )


# --- the chat template ---------------------------------------------------------------------------


def check_turns(config: DictConfig, inputs: RunInputs) -> None:
    """Check that the chat template has the turns that the rows need. Raises ConfigError.

    A server whose rows have messages may also play turns. That is known when it runs, so
    inference.py checks it then.
    """
    turns = config.actor_rollout_ref.rollout.multi_turn
    has_tools = any(task.tools for task in inputs.tasks) and turns.max_assistant_turns != 1
    needed = [OUTPUTS, PARALLEL] if has_tools else []
    if any(not task.messages for task in inputs.tasks):  # the environment writes the messages
        needed.append(TURNS)
    for part in needed:
        if part in inputs.template.failures:
            raise ConfigError(
                f"{inputs.template.describe_failure(part)} Set {ROLLOUT}.multi_turn."
                "max_assistant_turns=1 if the calls of tools are the answer."
            )


def set_tool_format(config: DictConfig, template: ChatTemplate) -> None:
    """Choose the tool parser if multi_turn.format=auto, else check it. Raises ConfigError."""
    turns = config.actor_rollout_ref.rollout.multi_turn
    if turns.format == tool_calls.AUTO_FORMAT:
        template.tool_format = template_trial.choose_tool_format(template)
        turns.format = template.tool_format  # the summary may warn of it
    else:
        tool_calls.check_tool_format(turns.format, tool_calls.list_tool_formats())


# --- code of the policy --------------------------------------------------------------------------


def find_unsandboxed(config: DictConfig, inputs: RunInputs) -> dict[str, bool]:
    """Verifiers that run the policy's code without a sandbox: {name: whether on this machine}."""
    unsandboxed: dict[str, bool] = {}
    for name in dict.fromkeys(task.server for task in inputs.tasks):
        start = (config.gym.servers.get(name) or {}).get("start") or {}
        if (start.get("server") or name) in checks.CODE_EXECUTING_SERVERS:
            unsandboxed[name] = bool(start)  # without `start` it runs on another machine
    if not config.env.verifier_pool.sandbox:
        for spec, source in list_code_sources(inputs):
            if spec.runs_response(source):
                unsandboxed[spec.name] = True
    return unsandboxed


def list_code_sources(inputs: RunInputs) -> list[tuple[VerifierSpec, str]]:
    """List the data sources whose responses are code, with their Python verifiers."""
    specs = inputs.verifiers.specs
    rows = [(task.server, str(task.row.get("data_source"))) for task in inputs.tasks]
    pairs = [(specs[name], source) for name, source in dict.fromkeys(rows) if name in specs]
    return [(spec, source) for spec, source in pairs if spec.scores_code(source)]


def check_code_execution(config: DictConfig, inputs: RunInputs) -> None:
    """Refuse to run the policy's programs here unless the recipe allows it. Raises ConfigError."""
    for spec, source in list_code_sources(inputs):
        features.load("programs", f"{spec.key}={spec.reference} with data_source={source}")
    if config.env.allow_unsandboxed_code:
        return
    for name, is_here in find_unsandboxed(config, inputs).items():
        if not is_here:
            continue
        hint = "Start it in a container and give its url"
        if name in inputs.verifiers.specs:
            hint = (
                "Set env.verifier_pool.sandbox=bwrap, give it a sandbox_fusion_url (programs only)"
            )
        raise ConfigError(
            f"{name} runs the policy's code on this machine, as your user, without a sandbox. "
            f"{hint}, or accept that with env.allow_unsandboxed_code=true. "
            'See docs/environments.md, "Code of the policy".'
        )


# --- sizes that follow ---------------------------------------------------------------------------


def set_sizes(
    config: DictConfig,
    hf_config: PretrainedConfig,
    command: str = "train",
    active: Sequence[Feature] = (),
) -> None:
    """Fill in the values that follow from the model and the recipe. Raises ConfigError.

    active: the features that are on.
    """
    for feature in active:
        feature.set_sizes(config, hf_config)
    rollout = config.actor_rollout_ref.rollout
    longest = config.data.max_prompt_length + config.data.max_response_length
    rollout.max_model_len = rollout.max_model_len or longest
    # workers resolve this section again, and do not know the resolvers of kit/recipe/resources.py
    rollout.max_num_seqs = rollout.max_num_seqs
    # a Ray process writes this file, and runs in another folder
    rollout.prometheus.file = os.path.abspath(rollout.prometheus.file)
    check_context_length(config, hf_config, longest, command)
    # verl packs whole episodes, in parts on the GPUs that share the tokens of one
    share = math.ceil(longest / find_parallelism(config).sequence)
    for key in MICRO_BATCH_TOKENS:
        OmegaConf.update(config, key, max(OmegaConf.select(config, key), share))
    set_loss_settings(config)
    if config.trainer.device == "cpu" and rollout.tensor_model_parallel_size > 1:
        # verl's default for this key starts a process for each part of the model
        rollout.engine_kwargs.vllm.pop("distributed_executor_backend", None)
    set_sync_settings(config, hf_config, command)


def check_context_length(
    config: DictConfig, hf_config: PretrainedConfig, longest: int, command: str
) -> None:
    """Check that the model has positions for the longest episode. Raises ConfigError."""
    text_config = hf_config.get_text_config()
    max_model_len = config.actor_rollout_ref.rollout.max_model_len
    positions = getattr(text_config, "max_position_embeddings", None) or max_model_len
    if command in EPISODE_COMMANDS and max_model_len > positions:
        raise ConfigError(
            f"data.max_prompt_length + max_response_length = {longest}, rollout.max_model_len="
            f"{max_model_len}: the model has only {positions} positions. Lower these."
        )


def set_loss_settings(config: DictConfig) -> None:
    """Fill in settings of the loss that follow from other settings."""
    actor = config.actor_rollout_ref.actor
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and not actor.loss_scale_factor:
        # verl would divide by the width of each micro-batch
        actor.loss_scale_factor = config.data.max_response_length
    if config.algorithm.rollout_correction.bypass_mode:  # as verl's apply_bypass_mode
        actor.policy_loss.loss_mode = "bypass_mode"
        actor.policy_loss.rollout_correction = config.algorithm.rollout_correction


def set_sync_settings(config: DictConfig, hf_config: PretrainedConfig, command: str) -> None:
    """Raise the bucket of the weight sync to the largest tensor, the embedding in fp32."""
    text_config = hf_config.get_text_config()
    embedding_bytes = text_config.vocab_size * text_config.hidden_size * 4
    sync = config.actor_rollout_ref.rollout.checkpoint_engine
    if command != "train":
        sync.backend = "naive"  # verl creates the engine of this name even if no weights are sent
    bucket = max(sync.update_weights_bucket_megabytes, math.ceil(embedding_bytes / 2**20) + 1)
    sync.update_weights_bucket_megabytes = bucket


def set_steps(config: DictConfig, command: str, batches: int, is_endless: bool = False) -> None:
    """Turn trainer.total_epochs into steps if total_training_steps is null, as verl counts them.

    batches: whole batches of an epoch. The number of steps is also set for the learning-rate
    schedules of the workers.
    Raises ConfigError.
    """
    trainer = config.trainer
    if trainer.total_training_steps is None and command not in SAMPLING_COMMANDS:
        if is_endless:
            raise ConfigError(
                f"trainer.total_training_steps=null: rows of a function in {TRAIN} have no epochs. "
                "Set it."
            )
        trainer.total_training_steps = trainer.total_epochs * batches
    for section in (ACTOR, "critic"):
        steps = trainer.total_training_steps or -1
        OmegaConf.update(config, f"{section}.optim.total_training_steps", steps)
