"""What a recipe comes to, before anything starts: its sizes, its warnings, what it changes of verl's defaults."""

from __future__ import annotations

import json
from collections import Counter

from omegaconf import DictConfig, OmegaConf

from checks import RUNS_CODE
from config import Data, changed, public
from run import console


def summary(config: DictConfig, data: Data, command: str) -> str:
    """The sizes that follow from the recipe, one a line."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    prompts, steps = config.data.train_batch_size, config.trainer.total_training_steps
    world = config.trainer.n_gpus_per_node * config.trainer.nnodes
    replicas = world // (rollout.tensor_model_parallel_size * rollout.data_parallel_size)
    longest = f"{config.data.max_prompt_length} + {config.data.max_response_length} tokens"
    over = f"prompt over {config.data.max_prompt_length} tokens" if command != "sft" else f"over {longest}"
    dropped = f"{len(data.dropped)} dropped ({over})"
    lines = [
        f"model       {config.actor_rollout_ref.model.path}",
        f"rows        {len(data.train)} to train on, {len(data.validation)} held out, {dropped}",
        *(f"            dropped {row}" for row in data.dropped[:5]),
    ]
    if command == "sft":
        size = f"{prompts} conversations of at most {longest}, one optimiser step"
        return "\n".join([*lines, f"step        {size}", f"training    {steps} steps; lr {actor.optim.lr:g}"])
    by_server = Counter(task.server for task in [*data.train, *data.validation])
    lines.append(f"servers     {', '.join(f'{name} ({rows} rows)' for name, rows in by_server.items())}")
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
    if rollout.top_p < 1 or rollout.top_k > 0:
        lines.append(
            f"WARNING     rollout.top_p={rollout.top_p:g}, top_k={rollout.top_k}: the sampler's log-probs are of what "
            "these leave, the trainer's of all tokens, so training/rollout_probs_diff_* grows and "
            "algorithm.rollout_correction is biased; leave them out unless you want that"
        )
    for name in by_server:
        start = (config.gym.servers.get(name) or {}).get("start")
        if ((start or {}).get("server") or name) in RUNS_CODE:
            where = "on this machine, as you" if start else "where it was started"
            lines.append(
                f"WARNING     {name} RUNS THE MODEL'S CODE {where}, WITHOUT A SANDBOX: it may read keys and delete "
                "your files. Run all of this in a container without them"
            )
    seen = {json.dumps(task.messages) for task in data.train if task.messages}
    if shared := sum(json.dumps(task.messages) in seen for task in data.validation):
        lines.append(
            f"WARNING     {shared} of the held-out prompts are also in env.train_files; take them out of one, or the "
            "score is of what was trained on"
        )
    return "\n".join(lines)


def dry_run(config: DictConfig, defaults: DictConfig, data: Data) -> None:
    """Print what the recipe changes of verl's defaults, and the first prompt as the model sees it."""
    console.print("changed from verl's defaults:", highlight=False)
    for key, (value, default) in changed(config, defaults).items():
        if not key.startswith(("gym.", "env.")):
            console.print(f"    {key}: {value} (was {default})", markup=False, highlight=False, soft_wrap=True)
    for section in ("gym", "env"):
        text = OmegaConf.to_yaml(public(config)[section]).strip().replace("\n", "\n    ")
        console.print(f"{section}:\n    {text}", markup=False, highlight=False)
    for task in {getattr(t, "server", "sft"): t for t in reversed([*data.train, *data.validation])}.values():
        console.print(f"first prompt ({task.row_id}, {len(task.prompt_ids)} tokens):", markup=False, highlight=False)
        prompt = data.tokenizer.decode(task.prompt_ids) if task.prompt_ids else "(the environment writes it)"
        console.print(prompt, markup=False, highlight=False, style="dim")
    console.print("dry run: model, files, sizes and servers are in order; nothing was started", highlight=False)
