"""From a recipe to the inputs of a run: check it, load its model files and rows, derive values.

    check    the settings, the functions of users and the model files -> Draft
    finish   a Draft and facts about its rows -> Recipe

Between them, `prepare` loads the rows of a command with episodes, and extras/sft.py those of `sft`.

Protects: a recipe that cannot work ends before a worker starts.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import env
from gym_client import RUNS_EPISODES
from kit import optional
from kit.chat import template_trial, tool_calls
from kit.chat.processor import TextProcessor
from kit.chat.template import OUTPUTS, PARALLEL, TURNS, ChatTemplate
from kit.data import generated_rows
from kit.data.row_files import find_files, read_raw_rows
from kit.data.tasks import LongRow, TaskLoader, limit_rows
from kit.engine.inputs import RunInputs
from kit.errors import ConfigError, UserFunctionError
from kit.recipe import adapters, checks, model_files, parallel_sizes, user_functions
from kit.recipe.derive import Facts, ModelFacts, RowFacts
from kit.recipe.entries import Entry
from kit.recipe.fused_head import find_head_obstacle
from kit.recipe.keys import EPISODE_COMMANDS, MODEL, ROLLOUT, TRAIN, VAL
from kit.recipe.load import Source, raise_all
from kit.recipe.recipe import Recipe, build
from kit.recipe.settings import Settings, make_settings
from kit.recipe.training_effect import check_schedule
from kit.recipe.user_functions import RecipeFunctions
from kit.run.console import say
from kit.run.features import Features, find_missing, make_features
from kit.run.verifier_trial import check_verifiers
from kit.verify import network, process_specs
from kit.verify.python_verifiers.settings import (
    PythonVerifiers,
    VerifierSpec,
    find_replaced_servers,
    read_verifiers,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

OnFeatures = Callable[[Features, Settings], None]
# {command: the keys that it reads}; the first key must be set
FILES = {command: [TRAIN, VAL] for command in ("train", *optional.COMMANDS)}
FILES |= {"rollout": [TRAIN], "evaluate": [VAL]}
COMMANDS = (*EPISODE_COMMANDS, *optional.COMMANDS)  # without `show`, which reads no recipe


class Draft(NamedTuple):
    """A recipe that passed its checks but for those of its rows, and what was loaded for it."""

    source: Source
    settings: Settings
    features: Features
    functions: RecipeFunctions
    facts: Facts
    hf_config: PretrainedConfig
    inputs: RunInputs  # without rows


class Prepared(NamedTuple):
    """A recipe that passed every check, and what was loaded for it."""

    recipe: Recipe
    inputs: RunInputs
    features: Features


def ignore_features(features: Features, settings: Settings) -> None:
    """Do nothing: the default of `on_features`."""


def prepare(
    source: Source, command: str = "train", on_features: OnFeatures = ignore_features
) -> Prepared:
    """Check a recipe against its model, files and servers, and load its tasks.

    command: one with episodes. on_features: as of `check`. Raises ConfigError, UserFunctionError,
    env.DataError, gym_client.GymError or network.GymStartError, before any worker starts.
    """
    draft = check(source, command, on_features)
    settings = draft.settings
    inputs = draft.inputs
    servers: Mapping[str, str] = {}
    agents: Mapping[str, str] = {}
    if settings.gym.head_server:
        servers, agents = network.discover_servers(settings.gym.head_server)
    own = settings.gym.servers.keys() - draft.facts.replaced_servers
    aliases = {agent: server for agent, server in agents.items() if server in servers}
    aliases |= {name: name for name in (*servers, *own)}
    for each in draft.features.checks:
        inputs.tools += each.list_tools(settings)
    batches = load_rows(settings, inputs, aliases, draft.functions.sampler)
    custom = inputs.verifiers.specs
    check_code_execution(settings, inputs)
    check_turns(settings, inputs)
    tool_format = ""
    if any(task.tools for task in inputs.tasks):
        tool_format = find_tool_format(settings, inputs.template)
        checks.check_tools(task for task in inputs.tasks if task.server not in custom)
    used = {task.server for task in inputs.tasks}
    found = {name: servers[name] for name in sorted(used - {*own, *custom})}
    image_values = inputs.processor.derive(settings, inputs.tasks)
    recipe = finish(draft, RowFacts(batches, tool_format, found), image_values)
    check_running_servers(recipe)
    for each in draft.features.checks:
        each.check_inputs(recipe, inputs)
    inputs.trials = check_verifiers(custom, inputs.tasks, recipe, inputs.scales)
    return Prepared(recipe, inputs, draft.features)


def check(source: Source, command: str, on_features: OnFeatures = ignore_features) -> Draft:
    """Check what every command needs, cheap checks first.

    There are three groups of checks. The first takes no time. The second needs verl, which takes
    7 s to import. The third loads the model's files, maybe from the hub. on_features: called with
    the features that are on, before the checks. Raises the errors of `prepare`.
    """
    settings = make_settings(source, command)
    raise_all(find_missing(settings))
    active = make_features(settings)
    on_features(active, settings)
    template_text = model_files.read_chat_template(settings)
    adapter = adapters.read_adapter(settings.model)
    replaced = find_replaced_servers(settings.env, settings.gym.servers)
    verifiers = check_early(settings, active, replaced, adapters.check_lora(settings, adapter))
    import_external_library(settings)
    functions = user_functions.load_recipe_functions(settings)
    raise_all([*checks.check_names(settings)])
    raise_all([*checks.check_roles(settings)])
    files = model_files.load_model_files(settings, template_text)
    text_config = files.hf_config.get_text_config()
    processor = make_processor(settings, files.hf_config, files.tokenizer)
    template = make_template(settings, processor, files.stop_ids)
    models = {"policy": files.hf_config}
    models |= model_files.load_other_models(settings, files.tokenizer)
    raise_all([*parallel_sizes.check_models(settings, models)])
    facts = Facts(
        chat_template=template_text,
        adapter=adapter,
        replaced_servers=frozenset(replaced),
        model=make_model_facts(files.hf_config),
    )
    inputs: RunInputs = RunInputs(
        train=[],
        validation=[],
        dropped=[],
        tokenizer=files.tokenizer,
        processor=processor,
        template=template,
        stop_ids=files.stop_ids,
        source=generated_rows.RowSource([], None, settings.data.seed),  # load_rows sets it
        model=text_config,
        verifiers=verifiers,
    )
    return Draft(source, settings, active, functions, facts, files.hf_config, inputs)


def make_model_facts(hf_config: PretrainedConfig) -> ModelFacts:
    """Return what a recipe takes from the configuration of the policy's model."""
    text_config = hf_config.get_text_config()
    return ModelFacts(
        text_config.vocab_size,
        text_config.hidden_size,
        getattr(text_config, "max_position_embeddings", None),
        find_head_obstacle(hf_config),
    )


def finish(draft: Draft, rows: RowFacts, image_values: Mapping[str, object]) -> Recipe:
    """Derive the values that follow from the model and the rows, and check the whole recipe.

    image_values: values that follow from the rows' images. Raises ConfigError.
    """
    facts = draft.facts._replace(
        rows=rows,
        image_values=image_values,
        derivations=tuple(
            functools.partial(each.derive, hf_config=draft.hf_config)
            for each in draft.features.checks
        ),
    )
    recipe = build(draft.source, draft.settings.command, facts, draft.functions)
    checks.instantiate_verl_configs(recipe)
    check_schedule(recipe)
    problems = [each.check_model(recipe, draft.hf_config) for each in draft.features.checks]
    raise_all([*itertools.chain(*problems)])
    return recipe


def make_processor(
    settings: Settings, hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> TextProcessor:
    """Make the processor of a model: for text, or for images if the model reads them."""
    processor = None
    if getattr(hf_config, "vision_config", None) is not None:
        needed_by = f"the model {settings.model.path}, which reads images,"
        images = optional.load("images", needed_by)
        processor = images.make_processor(settings, hf_config, tokenizer)
    return processor or TextProcessor(tokenizer)


def make_template(settings: Settings, processor: TextProcessor, stop_ids: set[int]) -> ChatTemplate:
    """Make the chat template, and try it. Raises ConfigError if it has no prompts or answers."""
    if not processor.tokenizer.chat_template:
        raise ConfigError(
            f"{settings.model.path} has no chat template. Set {MODEL}.custom_chat_template."
        )
    arguments = settings.data.apply_chat_template_kwargs
    tool_format = settings.rollout.multi_turn.format
    template = ChatTemplate(processor, stop_ids, arguments, tool_format)
    template.failures = template_trial.try_template(template)
    for part in (template_trial.PROMPTS, template_trial.ANSWERS):
        if part in template.failures:
            raise ConfigError(template.describe_failure(part))
    return template


def check_early(
    settings: Settings,
    features: Features,
    replaced_servers: Sequence[str],
    problems: Iterator[str],
) -> PythonVerifiers:
    """Check what takes no time, and read the Python verifiers: none without episodes.

    problems: further ones. Raises ConfigError.
    """
    errors: list[Exception | str] = [
        *problems,
        *check_files(settings),
        *checks.check_run(settings),
        *parallel_sizes.check_gpus(settings),
        *(checks.check_training(settings) if settings.trains else ()),
        *checks.check_algorithm(settings),
        *checks.check_sampling(settings),
    ]
    if settings.command == "train":
        errors += checks.check_weight_sync(settings)
    for each in features.checks:
        errors += each.check_settings(settings)
    verifiers = PythonVerifiers({}, {})
    servers = settings.gym.servers.keys() - set(replaced_servers)
    try:
        if settings.has_episodes:
            verifiers = read_verifiers(settings.env, servers)
    except (UserFunctionError, ConfigError) as error:
        errors.append(error)
    has_server = servers or settings.gym.head_server or settings.env.verifier
    if settings.has_episodes and not (has_server or verifiers.specs):
        errors.append(
            "The recipe names no verifier, so nothing gives rewards. Set "
            "env.verifier=FILE.py:FUNCTION, or a Gym server as in configs/math_cpu.yaml."
        )
    raise_all(errors)
    return verifiers


def import_external_library(settings: Settings) -> None:
    """Import model.external_lib for its entries in verl's registries. Raises ConfigError.

    The workers import it themselves.
    """
    library = settings.model.external_lib
    if not library:
        return
    try:
        importlib.import_module(library)
    except ImportError as error:
        raise ConfigError(
            f"{MODEL}.external_lib={library} cannot be imported: {error}. Install it, or add its "
            "folder to PYTHONPATH."
        ) from None


# --- files and servers that the recipe names -----------------------------------------------------


def check_files(settings: Settings) -> Iterator[Exception | str]:
    """Row files, servers' interpreters and model folders exist. Hub names are not checked."""
    for key in FILES[settings.command]:
        yield from check_row_files(settings, key)
    if settings.has_episodes:
        yield from check_servers(settings)
    yield from model_files.check_paths(settings)


def check_row_files(settings: Settings, key: str) -> Iterator[Exception | str]:
    """Check that the files of env.train_files or env.val_files can be read or imported."""
    entries: list[Entry] = settings.get(key)
    if not entries and key == FILES[settings.command][0]:
        yield f"{key} is not set. Name a task, such as --config math_cpu, before other recipes."
    for entry in entries:
        try:
            if entry.function and not settings.has_episodes:
                yield (
                    f"{key}={entry.file}: `{settings.command}` reads files only. Write the "
                    "function's rows to one."
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


def check_servers(settings: Settings) -> Iterator[Exception | str]:
    """Check that each Gym server that the run starts can work on this machine."""
    endpoint = settings.gym.policy_endpoint
    for name, server in settings.gym.servers.items():
        if server.start:
            try:
                process_specs.check_server(name, server)
            except network.GymStartError as error:
                yield error
    try:
        network.check_address("gym.policy_endpoint", endpoint.host, endpoint.port)
    except network.GymStartError as error:
        yield error
    if endpoint.port and not os.environ.get("POLICY_API_KEY"):
        yield (
            "gym.policy_endpoint.port needs the environment variable POLICY_API_KEY, the key that "
            "agents send. Set it."
        )


def check_running_servers(recipe: Recipe) -> None:
    """Check that each server with a `url` answers. Raises ConfigError, GymStartError."""
    for name, server in recipe.gym.servers.items():
        if not server.url:
            continue
        process_specs.check_server(name, server)
        if server.kind in RUNS_EPISODES and not recipe.gym.policy_endpoint.port:
            raise ConfigError(
                f"gym.servers.{name} runs episodes and must know the address of the policy. Set "
                "gym.policy_endpoint.port, and give the port and POLICY_API_KEY to the agent."
            )


# --- rows ----------------------------------------------------------------------------------------


def load_rows(
    settings: Settings,
    inputs: RunInputs,
    aliases: Mapping[str, str],
    sampler: Callable[..., list[env.Task]] | None,
) -> int | None:
    """Load the tasks of a command into `inputs`, and count the whole batches of an epoch.

    aliases: {agent or server: server}. sampler: of the rows. Returns None if rows of functions have
    no epochs. Raises ConfigError, UserFunctionError, env.DataError.
    """
    command = settings.command
    data = settings.data
    loader = TaskLoader(
        template=inputs.template,
        aliases=aliases,
        max_prompt_length=data.max_prompt_length,
        only_servers=settings.env.only_servers,
        custom_verifiers=inputs.verifiers.specs,
        prompt_key=data.prompt_key,
        tools=inputs.tools,
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
            limit = settings.env.val_max_rows if key == VAL else settings.env.max_rows
            tasks[key] += generated_rows.generate_once(listed, key, loader, data.seed, limit)
    inputs.train = limit_rows(tasks[TRAIN], settings.env.max_rows)
    inputs.validation = limit_rows(tasks[VAL], settings.env.val_max_rows)
    inputs.source = generated_rows.RowSource(inputs.train, sampler, data.seed, data.shuffle)
    if command == "train":
        inputs.source.functions = generated_rows.load_functions(
            entries[TRAIN], TRAIN, loader, data.seed
        )
    share = inputs.source.file_share()
    check_enough_rows(settings, inputs, share)
    inputs.generated = inputs.source.generate_first(data.train_batch_size)
    if share:
        inputs.per_epoch = len(inputs.train) / share
    return None if share < 1 else len(inputs.train) // data.train_batch_size


def check_enough_rows(settings: Settings, inputs: RunInputs, share: float = 1.0) -> None:
    """Check that the files have rows, and those of a batch to train. Raises ConfigError.

    share: of the rows of a batch that come from files.
    """
    command = settings.command
    key = FILES[command][0]
    found = len(inputs.validation if command == "evaluate" else inputs.train)
    size = settings.data.train_batch_size
    entries = inputs.verifiers.entries.get(key, [Entry("a file")])
    needed = 0 if command == "train" and all(entry.function for entry in entries) else 1
    if settings.trains:
        needed = max(needed, math.ceil(share * size - 1e-9))  # without the rounding error
    lengths = [row.tokens for row in inputs.dropped if isinstance(row, LongRow)]
    if needed and not found and lengths and len(lengths) == len(inputs.dropped):
        raise ConfigError(
            f"All {len(lengths)} prompts are longer than data.max_prompt_length="
            f"{settings.data.max_prompt_length} tokens (the longest has {max(lengths)}). Set "
            f"data.max_prompt_length={max(lengths)}."
        )
    if found < needed:
        dropped = ", ".join(map(str, inputs.dropped[:3])) or "none"
        limits = f"data.max_prompt_length={settings.data.max_prompt_length}"
        if not settings.has_episodes:  # the rows have the responses
            limits += f" or data.max_response_length={settings.data.max_response_length}"
        raise ConfigError(
            f"{key} have {found} usable rows, fewer than {needed} (data.train_batch_size={size}); "
            f"dropped rows: {dropped}. Add rows, lower data.train_batch_size, or raise {limits}."
        )


# --- the chat template ---------------------------------------------------------------------------


def check_turns(settings: Settings, inputs: RunInputs) -> None:
    """Check that the chat template has the turns that the rows need. Raises ConfigError.

    A server whose rows have messages may also play turns. That is known when it runs, so
    inference.py checks it then.
    """
    turns = settings.rollout.multi_turn
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


def find_tool_format(settings: Settings, template: ChatTemplate) -> str:
    """Return the tool parser: multi_turn.format, or for `auto` the first that reads the template.

    Raises ConfigError.
    """
    tool_format = settings.rollout.multi_turn.format
    if tool_format == tool_calls.AUTO_FORMAT:
        template.tool_format = template_trial.choose_tool_format(template)
    else:
        tool_calls.check_tool_format(tool_format, tool_calls.list_tool_formats())
    return template.tool_format  # the summary may warn of it


# --- code of the policy --------------------------------------------------------------------------


def find_unsandboxed(settings: Settings, inputs: RunInputs) -> dict[str, bool]:
    """Find verifiers that run the policy's code without a sandbox: {name: whether on this machine}.

    settings: also a recipe.
    """
    unsandboxed: dict[str, bool] = {}
    for name in dict.fromkeys(task.server for task in inputs.tasks):
        server = settings.gym.servers.get(name)
        start = server.start if server else None
        if ((start and start.server) or name) in checks.CODE_EXECUTING_SERVERS:
            unsandboxed[name] = bool(start)  # without `start` it runs on another machine
    if not settings.env.verifier_pool.sandbox:
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


def check_code_execution(settings: Settings, inputs: RunInputs) -> None:
    """Refuse to run the policy's programs here unless the recipe allows it. Raises ConfigError."""
    for spec, source in list_code_sources(inputs):
        optional.load("programs", f"{spec.key}={spec.reference} with data_source={source}")
    if settings.env.allow_unsandboxed_code:
        return
    for name, is_here in find_unsandboxed(settings, inputs).items():
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
