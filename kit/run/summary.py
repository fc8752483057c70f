"""The summary of a checked recipe, which every command prints: sizes, servers, warnings.

Convenience: a person sees what a run will do before it starts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence

from env import Json
from kit.chat import template_trial
from kit.chat.template import TURNS, ChatTemplate, RenderError, find_opening
from kit.chat.tool_calls import list_tool_formats
from kit.data.ground_truths import find_marks, is_missing
from kit.engine import weight_proof
from kit.engine.inputs import RunInputs
from kit.recipe import adapters
from kit.recipe.fused_head import find_obstacle
from kit.recipe.keys import MODEL, is_below, is_kit_key, select_nested
from kit.recipe.neutral_sampling import find_distortions
from kit.recipe.recipe import Recipe, find_differences
from kit.recipe.resources import cores
from kit.recipe.training_effect import warn_of_lost_updates
from kit.run.features import RecipeCheck
from kit.run.prepare import find_unsandboxed

ENGINES = {"vllm": "vLLM", "hf": "transformers", "sglang": "SGLang"}
MAX_NAMED = 5  # files, and dropped rows, that the summary names


def summarize(
    recipe: Recipe,
    inputs: RunInputs,
    checks: Sequence[RecipeCheck] = (),
    notes: Sequence[str] = (),
    is_dry_run: bool = False,
) -> str:
    """Return what a person reads before a run, then its settings.

    checks: of features. notes: lines that follow the warnings.
    """
    lines = [*describe_rows(recipe, inputs), *describe_work(recipe, inputs)]
    lines += describe_verifiers(recipe, inputs)
    if is_dry_run:
        lines += [*describe_first_prompts(inputs), describe_thoughts(inputs.template)]
    lines += [f"WARNING     {text}" for text in list_warnings(recipe, inputs, checks)]
    lines += [*notes, *describe_settings(recipe, inputs, checks)]
    if is_dry_run:
        ids = f"{sorted(inputs.stop_ids)}, pad id {inputs.tokenizer.pad_token_id} (masked)"
        lines += [f"stop ids    {ids}", *describe_changes(recipe)]
        for check in checks:
            lines += check.dry_run_lines(recipe, inputs)
        lines.append("dry run: model, files, sizes and servers are valid; no run was started")
    return "\n".join(lines)


def describe_length(recipe: Recipe) -> str:
    """Return the longest episode."""
    return f"{recipe.data.max_prompt_length} + {recipe.data.max_response_length} tokens"


def describe_rows(recipe: Recipe, inputs: RunInputs) -> list[str]:
    """Return the rows and their files."""
    reason = f"prompt over {recipe.data.max_prompt_length} tokens"
    if not recipe.has_episodes:
        reason = f"over {describe_length(recipe)}"
    generated = Counter(task.file for task in inputs.generated)
    counts = [f"{count} of each batch from {name}" for name, count in generated.items()]
    if inputs.train or not generated:
        counts.insert(0, f"{len(inputs.train)} for training")
    files = Counter(task.file for task in [*inputs.train, *inputs.validation])
    lines = [
        f"rows        {', '.join(counts)}, {len(inputs.validation)} held out, "
        f"{len(inputs.dropped)} dropped ({reason})",
        *[f"            {count} of {name}" for name, count in list(files.items())[:MAX_NAMED]],
    ]
    return lines + [f"            dropped {row}" for row in inputs.dropped[:MAX_NAMED]]


def describe_work(recipe: Recipe, inputs: RunInputs) -> list[str]:
    """Return the work of one step, and the number of steps and the learning rate."""
    rollout = recipe.rollout
    longest = f"of at most {describe_length(recipe)}"
    if recipe.command == "rollout":
        return [f"rollout     {len(inputs.train)} rows x {rollout.n} episodes {longest}"]
    if recipe.command == "evaluate":
        rows = len(inputs.validation)
        return [f"evaluate    {rows} rows x {rollout.val_kwargs.n} episodes {longest}"]
    prompts = recipe.data.train_batch_size
    steps = recipe.last_step
    epochs = ""
    if inputs.train:
        epochs = f" = {steps * prompts / inputs.per_epoch:.2f} epochs"
    training = f"training    {steps} steps{epochs}; lr {recipe.actor.optim.lr:g}"
    if not recipe.has_episodes:
        return [f"step        {prompts} conversations {longest}, one optimizer step", training]
    updates = recipe.optimizer_steps
    plural = "" if updates == 1 else f"s of {recipe.actor.ppo_mini_batch_size} prompts"
    return [
        f"step        {prompts} prompts x {rollout.n} responses = {prompts * rollout.n} episodes "
        f"{longest}; {updates} optimizer step{plural}",
        f"{training}; {recipe.algorithm.adv_estimator}, {recipe.actor.policy_loss.loss_mode} loss; "
        f"micro-batches of {recipe.actor.ppo_max_token_len_per_gpu} tokens",
    ]


def describe_other_models(recipe: Recipe) -> list[str]:
    """Return the models that the workers have besides the actor, on one line."""
    has_model = {
        "critic": recipe.has_critic,
        "teacher" if recipe.teacher else "reference model": recipe.has_reference,
        "reward model": recipe.has_reward_model,
    }
    names = [name for name, is_there in has_model.items() if is_there]
    return [f"with        {', '.join(names)}"] if names else []


def describe_functions(recipe: Recipe) -> list[str]:
    """Return the custom reward, filters and sampler with their settings."""
    section = recipe.env
    functions = {"reward": section.reward, "filters": section.filters, "sampler": section.sampler}
    return [f"{key.ljust(11)} {spec}" for key, spec in functions.items() if spec]


def describe_verifiers(recipe: Recipe, inputs: RunInputs) -> list[str]:
    """Return the servers of the rows, the Python verifiers with their trial, and the reward."""
    if not recipe.has_episodes:
        return []
    servers = Counter(task.server for task in inputs.tasks)
    lines = [f"servers     {', '.join(f'{name} ({n} rows)' for name, n in servers.items())}"]
    if inputs.verifiers.specs:
        names = ", ".join(map(str, inputs.verifiers.specs.values()))
        pool = recipe.env.verifier_pool
        processes = (
            f": {pool.processes or cores()} processes, {pool.timeout_s:g} s a call, "
            f"{pool.memory_gb:g} GiB each"
        )
        has_processes = any(spec.has_processes for spec in inputs.verifiers.specs.values())
        lines.append(f"verifier    {names}{processes if has_processes else ''}")
    else:
        lines.append("verifier    Gym servers, which start with the run (to try them: `probe`)")
    lines += [f"tried       {trial.result}" for trial in inputs.trials if trial.result]
    return lines + (describe_functions(recipe) if recipe.command == "train" else [])


def describe_settings(
    recipe: Recipe, inputs: RunInputs, checks: Sequence[RecipeCheck]
) -> list[str]:
    """Return the models, what features add to the verifiers, and the devices."""
    lines = [
        f"model       {recipe.model.path}",
        *adapters.describe_adapter(recipe.model, recipe.facts.adapter),
    ]
    if recipe.trains:
        lines += describe_logits(recipe)
    if recipe.command == "train":
        lines += describe_other_models(recipe)
    for check in checks:
        lines += check.summary_lines(recipe, inputs)
    if recipe.has_episodes:
        lines.append(describe_devices(recipe))
    return lines


def describe_logits(recipe: Recipe) -> list[str]:
    """Why all logits of a micro-batch are in memory, if the recipe does not choose that."""
    written = select_nested(recipe.source.resolved, f"{MODEL}.use_fused_kernels")
    if not written or recipe.model.use_fused_kernels or not recipe.facts.model:
        return []
    reason = find_obstacle(recipe, recipe.facts.model.head_obstacle)
    return [f"logits      all of a micro-batch are in memory: {reason}"]


def describe_devices(recipe: Recipe) -> str:
    """Return the devices, and how the models are laid out over them."""
    rollout = recipe.rollout
    world = recipe.world_size()
    engine = "" if recipe.engine.is_fsdp else f" of {recipe.model_engine}"
    separate = {
        role.replace("_", " "): recipe.world_size(role)
        for role in recipe.trainer.resource_pools.sizes()
    }
    if rollout.nnodes:
        separate["rollout engine"] = recipe.rollout_gpus
    pools = [f" + {count} for the {role}" for role, count in separate.items()]
    replicas = recipe.replicas
    plural = "" if replicas == 1 else "s"
    buckets = ""
    if recipe.command == "train":
        megabytes = rollout.checkpoint_engine.update_weights_bucket_megabytes
        buckets = f", sync buckets of {megabytes} MB"
    return (
        f"devices     {world} {recipe.trainer.device}{engine}{''.join(pools)}, {replicas} "
        f"{ENGINES[rollout.name]} replica{plural}{buckets}"
    )


# --- warnings ------------------------------------------------------------------------------------


def list_warnings(
    recipe: Recipe, inputs: RunInputs, checks: Sequence[RecipeCheck] = ()
) -> Iterator[str]:
    """Problems that do not stop the run."""
    for check in checks:
        yield from check.warnings(recipe, inputs)
    yield from warn_of_lost_updates(recipe)
    if not recipe.has_episodes:
        return
    yield from [trial.warning for trial in inputs.trials if trial.warning]
    distortions = find_distortions(recipe)
    if distortions and recipe.command == "train":
        settings = ", ".join(f"rollout.{key}={value}" for key, value in distortions.items())
        yield (
            f"{settings}: the rollout engine's log-probs are of the probabilities that this "
            "changes, the trainer's of the model's. So no step is checked for their difference, "
            "and algorithm.rollout_correction is biased. Remove this unless you want that."
        )
    obstacle = weight_proof.find_obstacle(recipe)
    if obstacle and recipe.command == "train":
        yield (
            f"{obstacle}, so no sync of the weights is checked, and {weight_proof.METRIC} is not "
            "logged. Compare training/rollout_probs_diff_mean instead."
        )
    yield from warn_of_template(recipe, inputs)
    for name, is_here in find_unsandboxed(recipe, inputs).items():
        place = "on this machine, as your user" if is_here else "on the machine of its server"
        yield (
            f"{name} RUNS THE MODEL'S CODE {place}, WITHOUT A SANDBOX: it may read keys and "
            "delete your files. Run all of this in a container without them."
        )
    custom = inputs.verifiers.specs
    rows = [task for task in inputs.tasks if "reward_model" in task.row]
    for name in dict.fromkeys(task.server for task in rows if task.server not in custom):
        yield (
            f"Rows in verl's format go to the server {name}, which must read "
            "`reward_model` itself. For verl's reward functions set `verifier: verl` on the file."
        )
    yield from warn_of_marks(inputs)
    yield from warn_of_overlap(inputs)


def warn_of_template(recipe: Recipe, inputs: RunInputs) -> Iterator[str]:
    """Warn of parts of the chat template that may be wrong for this recipe."""
    template = inputs.template
    if TURNS in template.failures:
        yield (
            f"{template.describe_failure(TURNS)} A server that plays turns (`step`) cannot be used "
            "without it."
        )
    yield from warn_of_answers(template)
    has_system = any(
        task.messages and task.messages[0]["role"] == "system" for task in inputs.tasks
    )
    for part in template_trial.list_changed_by_system(template) if has_system else []:
        yield (
            f"The chat template writes {part} in another way after a system message. The policy "
            "reads them as without one. Set another template, or no system message."
        )
    if template_trial.writes_date(template):
        yield (
            "The chat template writes today's date, so a run that is resumed tomorrow has other "
            "prompts. If the template has an argument for the date, set it in "
            "data.apply_chat_template_kwargs."
        )
    tool_format = recipe.rollout.multi_turn.format
    has_tools = any(task.tools for task in inputs.tasks)
    if has_tools and not list(template_trial.find_tool_formats(template, [tool_format])):
        others = list(template_trial.find_tool_formats(template, list_tool_formats()))
        advice = f"These do: {', '.join(others)}" if others else "No other parser does"
        yield (
            f"rollout.multi_turn.format={tool_format} does not read the calls that the chat "
            f"template writes, so a response in the template's form calls no tool. {advice}."
        )


def warn_of_answers(template: ChatTemplate) -> Iterator[str]:
    """Warn if the template does not show where an answer begins or ends."""
    end = ""
    try:
        end = template_trial.find_unknown_end(template)
    except RenderError as error:
        yield (
            f"The chat template writes no past answers ({error}), so it does not show which token "
            "ends an answer. Check that the model writes one of the stop ids."
        )
    if end:
        yield (
            f"The chat template ends an answer with {end!r}, which is no stop token of the model, "
            "so a response continues after it. Add its id to eos_token_id in the model's "
            "generation_config.json, or set another template."
        )
    opening = find_opening(template)
    if opening and not template.own_markers:
        yield (
            f"The generation prompt ends with {opening!r}, and the chat template shows no end of "
            "it. If it opens a thought, the thought counts as the answer. Set another template."
        )


def describe_thoughts(template: ChatTemplate) -> str:
    """Describe what is a thought, and not the answer."""
    start, end = template.markers
    if template.own_markers:
        return f"thoughts    between {start or 'the beginning'} and {end}, no part of the answer"
    return (
        "thoughts    the chat template shows no markers, so thoughts count as answers, except "
        f"between {start} and {end}"
    )


def warn_of_marks(inputs: RunInputs) -> Iterator[str]:
    """Warn of words that are the ground truth of many rows, and may stand for no answer."""
    masked = inputs.verifiers.specs  # a Python verifier's known marks are counted by its trial
    tasks = [task for task in inputs.tasks if task.server not in masked or not is_missing(task.row)]
    for word, count in find_marks([task.row for task in tasks]).items():
        yield (
            f"The ground truth of {count:,} of {len(inputs.tasks):,} rows is {word!r}, and that of "
            "most others is a value. If it means that there is no answer, remove these rows."
        )


def warn_of_overlap(inputs: RunInputs) -> Iterator[str]:
    """Held-out prompts that are also trained on."""
    training = [*inputs.train, *inputs.generated]
    prompts = {json.dumps(task.messages) for task in training if task.messages}
    shared = sum(json.dumps(task.messages) in prompts for task in inputs.validation)
    if shared:
        yield (
            f"{shared} of the held-out prompts are also in env.train_files, so the score includes "
            "prompts that were trained on. Remove them from one of the two."
        )


# --- dry run -------------------------------------------------------------------------------------


def describe_changes(recipe: Recipe) -> list[str]:
    """Return the values that neither verl's defaults nor the recipe have.

    They follow from the model, the rows and the machine.
    """
    written = recipe.source.written
    lines = ["further changes to verl's defaults, in no recipe and not in configs/base.yaml:"]
    for key, (value, default) in find_differences(recipe).items():
        if is_kit_key(key):
            continue
        is_in_recipe = key in written and (written[key] == value or "${" in str(written[key]))
        if (recipe.has_critic or not is_below(key, "critic")) and not is_in_recipe:
            lines.append(f"    {key}: {value} (verl: {default})")
    return lines


def describe_first_prompts(inputs: RunInputs) -> list[str]:
    """Return the first prompt of each server, as the model sees it."""
    first: Json = {}
    for task in inputs.tasks:
        first.setdefault(getattr(task, "server", ""), task)  # conversations have no server
    lines = []
    for task in first.values():
        lines.append(f"first prompt ({task.row_id}, {len(task.prompt_ids)} tokens):")
        prompt = "(the environment writes it)"
        if task.prompt_ids:
            prompt = str(inputs.tokenizer.decode(task.prompt_ids))
        lines.append(prompt)
    return lines
