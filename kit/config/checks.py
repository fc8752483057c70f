"""What of a recipe goes together: sizes, sampling, the algorithm, a reward model, a format of tool calls.

A check yields what is wrong, so that all of it can be told at once. What verl knows is asked of verl, which takes 7 s
to import, so check_names comes after those that take no time.
"""

from __future__ import annotations

import difflib
import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from env import Task
from kit.config.load import ACTOR, MODEL, ROLLOUT, base_configs, sampling_gpus
from kit.config.user_functions import (
    ADVANTAGE,
    LOSS_MODE,
    TEACHER,
    asks_for,
    is_own,
    load,
    needs_reference,
    teacher,
)
from kit.errors import ConfigError
from kit.extras import parallelism
from kit.extras.preflight import memory

# Servers of nemo-gym 0.4 whose app.py runs what the policy writes, in a process beside it or under a filter of imports
RUNS_CODE = (
    *(
        "bigcodebench",
        "code_fim",
        "code_gen",
        "evalplus",
        "math_with_code",
        "newton_bench",
        "ns_tools",
        "nvarc",
    ),
    *("openenv", "scicode"),
)
SAMPLERS = {"vllm": "vLLM", "hf": "transformers", "sglang": "SGLang"}
TRTLLM = "; TensorRT-LLM's must share the trainer's placement group, in which each process takes its GPU whole"
# keys of rollout that verl's SGLang server does not read
NOT_SGLANG = [
    "ignore_eos",
    "repetition_penalty",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "logprobs_mode",
    "max_num_batched_tokens",
    "scheduling_policy",
    "cudagraph_capture_sizes",
    "seed",
]
CHOICES: dict[str, Sequence[Any]] = {f"{ROLLOUT}.pipeline_model_parallel_size": [1]}
ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size"
CHOICES["trainer.one_step_off"] = [0, 1]


def check_sizes(config: DictConfig, command: str) -> Iterator[str]:
    """Batches, groups and GPUs go into one another."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    for key in (
        "data.train_batch_size",
        f"{ACTOR}.ppo_mini_batch_size",
        f"{ROLLOUT}.n",
        "trainer.n_gpus_per_node",
    ):
        if (value := OmegaConf.select(config, key)) < 1:
            yield f"{key}={value}: wants 1 or more"
            return
    sleeps = rollout.free_cache_engine and not rollout.nnodes
    if config.trainer.one_step_off and (sleeps or rollout.full_determinism):
        why = "sleeps during an update" if sleeps else "cannot know where new weights cut an answer"
        key = "free_cache_engine" if sleeps else "full_determinism"
        yield f"trainer.one_step_off=1: with {ROLLOUT}.{key} the sampler {why}; set one of the two to false"
    if (kept := config.env.keep_rollouts) is not None and kept < 1:
        yield f"env.keep_rollouts={kept}: wants 1 or more, or null for all"
    limits = (
        config.gym.concurrency
        if OmegaConf.is_dict(config.gym.concurrency)
        else {"": config.gym.concurrency}
    )
    for name, limit in limits.items():
        if limit != "auto" and not (isinstance(limit, int) and limit >= 1):
            yield f"gym.concurrency{'.' * bool(name)}{name}={limit}: wants auto, or 1 or more calls"
    epochs = config.trainer.total_epochs
    if config.trainer.total_training_steps is None and not (
        isinstance(epochs, int) and epochs >= 1
    ):
        yield f"trainer.total_epochs={epochs}: wants 1 or more, where trainer.total_training_steps is null"
    for role, count in config.trainer.resource_pools.items():
        if count is not None and count < 1:
            yield f"trainer.resource_pools.{role}={count}: wants 1 or more GPUs, or null for the actor's"
    world, servers = config.trainer.n_gpus_per_node * config.trainer.nnodes, sampling_gpus(config)
    prompts, n, mini = config.data.train_batch_size, rollout.n, actor.ppo_mini_batch_size
    for count in sorted(
        {servers, world}
    ):  # verl's actor wants as much where the servers are not on its GPUs
        if count % (infer := rollout.tensor_model_parallel_size * rollout.data_parallel_size):
            key = f"{ROLLOUT}.tensor_model_parallel_size * data_parallel_size"
            yield f"{count} GPUs do not divide by {key} = {infer}; lower these, or raise trainer.n_gpus_per_node"
    if command not in ("train", "sft"):
        return
    if world % (split := parallelism.same_rows(config)):
        key = (
            f"{ACTOR}.{config.model_engine}'s parts of the model"
            if config.model_engine != "dp"
            else ULYSSES
        )
        yield f"{world} GPUs do not divide by {key}={split}; lower it"
    if config.trainer.device == "cpu" and split > 1:
        why = "kit/cpu/cpu_engine.py computes each prompt once, for whole sequences, and verl's Ulysses cuts them"
        yield f"{ULYSSES}={split} on a CPU: {why}; leave it out"
    tiles = [
        name
        for name in ("entropy_checkpointing", "entropy_from_logits_with_chunking")
        if actor.get(name)
    ]
    if config.trainer.device == "cpu" and tiles:
        yield f"{ACTOR}.{tiles[0]} on a CPU: kit/cpu/cpu_engine.py has the entropy in tiles anyway; leave it out"
    if prompts % mini:
        yield f"data.train_batch_size={prompts} does not divide by {ACTOR}.ppo_mini_batch_size={mini}; change one"
    if mini * n % world:
        episodes = f"{ACTOR}.ppo_mini_batch_size * rollout.n = {mini} * {n} episodes"
        yield f"{episodes} do not divide among {world} GPUs; change one of these"
    needed = (
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    )
    if not actor.use_dynamic_bsz and not all(OmegaConf.select(config, key) for key in needed):
        yield f"{ACTOR}.use_dynamic_bsz=false needs {' and '.join(needed)}"


def check_sampling(config: DictConfig, command: str) -> Iterator[str]:
    """Answers that should differ are sampled, and are not the likeliest one again and again."""
    rollout, val = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.val_kwargs
    greedy, greedy_val = (
        not sampling.do_sample or sampling.temperature <= 0 for sampling in (rollout, val)
    )
    way_out = "set {0}.do_sample=true and {0}.temperature=0.8"
    if greedy and (command == "train" or (command == "rollout" and rollout.n > 1)):
        why = f"do_sample={rollout.do_sample}, temperature={rollout.temperature}: all answers to a prompt are equal"
        why += ", and the trainer divides by the temperature" * (command == "train")
        yield f"{ROLLOUT}: {why}; {way_out.format(ROLLOUT)}"
    tested = command == "evaluate" or (command == "train" and config.env.val_files)
    if tested and greedy_val and (val.n > 1 or val.do_sample or val.temperature > 0):
        key, why = (
            f"{ROLLOUT}.val_kwargs",
            f"do_sample={val.do_sample}, temperature={val.temperature}",
        )
        why += f" take the likeliest token each time, so n={val.n} answers to a row are equal"
        yield f"{key}: {why}; {way_out.format(key)}, or leave all three out"


def check_choices(
    config: DictConfig, choices: Mapping[str, Sequence[Any]] = CHOICES
) -> Iterator[str]:
    """These keys have values that there are."""
    for key, allowed in choices.items():
        if (value := OmegaConf.select(config, key)) not in allowed:
            options = ["null" if option is None else str(option) for option in allowed]
            yield f"{key}={value}: wants {'one of ' if len(options) > 1 else ''}{', '.join(options)}"


def check_algorithm(config: DictConfig) -> Iterator[str]:
    """What the advantage and the loss need is there, and goes together."""
    actor, settings = config.actor_rollout_ref.actor, config.algorithm
    loss_mode, estimator, correction = (
        actor.policy_loss.loss_mode,
        settings.adv_estimator,
        settings.rollout_correction,
    )
    corrects = "algorithm.rollout_correction"
    if correction.bypass_mode and loss_mode not in ("vanilla", "bypass_mode"):
        yield f"{corrects}.bypass_mode has a loss of its own, so leave out loss_mode={loss_mode}"
    if loss_mode == "bypass_mode" and not correction.bypass_mode:
        yield f"policy_loss.loss_mode=bypass_mode is set by {corrects}.bypass_mode=true; set that alone"
    if loss_mode == "dro" and not actor.policy_loss.dro_beta:
        yield f"policy_loss.loss_mode=dro needs {ACTOR}.policy_loss.dro_beta"
    weights, keys = (
        settings.get("gdpo_reward_weights") or [],
        settings.get("gdpo_reward_keys") or [],
    )
    if estimator == "gdpo" and not keys:
        yield "algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_keys, the rewards by name"
    if weights and len(weights) != len(keys):
        yield f"algorithm.gdpo_reward_weights are {len(weights)}, the keys {len(keys)}; give one weight for each key"
    n, refill = config.actor_rollout_ref.rollout.n, settings.filter_groups
    if refill.enable and refill.max_num_gen_batches < 1:
        yield "algorithm.filter_groups.enable needs max_num_gen_batches, the most batches for one step"
    if n < 2 and (refill.enable or "drop_uniform" in str(config.env.filters)):
        yield f"{ROLLOUT}.n={n}: drop_uniform would drop every group of one; raise it, or leave that out"
    if correction.rollout_rs and correction.rollout_rs_threshold is None:
        yield f"{corrects}.rollout_rs needs rollout_rs_threshold beside it"
    if correction.bypass_mode and str(estimator).endswith("optimal_token_baseline"):
        yield f"algorithm.adv_estimator={estimator} needs the pass that {corrects}.bypass_mode skips; leave that out"
    model, load_format = (
        config.actor_rollout_ref.model,
        config.actor_rollout_ref.rollout.load_format,
    )
    if (
        model.lora_rank
        and not model.lora.merge
        and load_format == "dummy"
        and config.trainer.device == "cpu"
    ):
        yield f"a LoRA adapter on a CPU needs {ROLLOUT}.load_format=auto (configs/algorithms/lora.yaml)"


def compared(function: Callable[..., Any], name: str) -> list[str]:
    """The words that a function of verl's compares its variable `name` with, read from its source."""
    tests = re.findall(
        rf"\b(?:el)?if {re.escape(name)} (?:==|in) (.*):", inspect.getsource(function)
    )
    return list(dict.fromkeys(re.findall(r'"([^"]+)"', " ".join(tests))))


def check_names(config: DictConfig, command: str) -> Iterator[str]:
    """verl has what the recipe names: the advantage, the loss, their variants. A group is large enough to compare."""
    from verl.trainer.ppo import core_algos as verl
    from verl.trainer.ppo import rollout_corr_helper as helper

    n, corrects = config.actor_rollout_ref.rollout.n, "algorithm.rollout_correction"
    for key, registry in (
        (ADVANTAGE, verl.ADV_ESTIMATOR_REGISTRY),
        (LOSS_MODE, verl.POLICY_LOSS_REGISTRY),
    ):
        name = OmegaConf.select(config, key)
        theirs = [
            known for known in registry if not is_own(known)
        ]  # one's own are there once they were used
        if not isinstance(name, str):
            yield f"{key}={name}: wants a name of verl's, or path.py:function, without settings"
        elif not is_own(name) and name not in theirs:
            close = ["gae"] if name == "ppo" else difflib.get_close_matches(name, theirs, n=1)
            hint = f"did you mean {close[0]}?" if close else "one of your own is path.py:function"
            yield f"{key}={name}: verl has {', '.join(theirs)}; {hint}"
        elif key == ADVANTAGE and command == "train" and n < 2:
            function = load(name, key) if is_own(name) else registry[name]
            if "index" in inspect.signature(function).parameters:
                yield f"{ROLLOUT}.n={n}: a group needs at least two answers to compare; raise it"
    if command == "train" and teacher(config) and not needs_reference(config):
        how = f"{ADVANTAGE}=templates/advantages.py:distill, or {ACTOR}.use_kl_loss=true"
        yield f"{TEACHER}={teacher(config)}: nothing asks this model for log-probs; set {how}, or leave it out"
    if OmegaConf.select(config, TEACHER) and not config.distillation.enabled:
        yield f"{TEACHER} is read where distillation.enabled=true; set that too, or leave it out"
    kinds = [
        kind for kind in compared(verl.kl_penalty_forward, "kl_penalty") if kind != "full"
    ]  # verl raises for that
    kl, modes = (
        [kind + plus for kind in kinds for plus in ("", "+")],
        compared(verl.agg_loss, "loss_agg_mode"),
    )
    choices: dict[str, Sequence[Any]] = {f"{ACTOR}.kl_loss_type": kl, "algorithm.kl_penalty": kl}
    choices |= {f"{ACTOR}.loss_agg_mode": modes, "critic.loss_agg_mode": modes}
    choices["algorithm.kl_ctrl.type"] = compared(verl.get_kl_controller, "kl_ctrl.type")
    choices[f"{corrects}.rollout_is"] = [
        None,
        *compared(helper.compute_rollout_correction_weights, "rollout_is"),
    ]
    choices[f"{corrects}.loss_type"] = compared(verl.compute_policy_loss_bypass_mode, "loss_type")
    yield from check_choices(config, choices)
    options, key = sorted(helper.SUPPORTED_ROLLOUT_RS_OPTIONS), f"{corrects}.rollout_rs"
    for option in str(OmegaConf.select(config, key) or options[0]).split(","):
        if option.strip() not in options:
            yield f"{key}={option}: wants one of {', '.join(options)}"


def check_servers(config: DictConfig) -> Iterator[str]:
    """Weights get to where vLLM's servers are."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    backend, key = rollout.checkpoint_engine.backend, f"{ROLLOUT}.checkpoint_engine"
    if not rollout.nnodes:
        if backend != "naive":
            yield f"{key}.backend={backend} is for servers on GPUs of their own; set {ROLLOUT}.nnodes, or leave it out"
        if rollout.n_gpus_per_node != config.trainer.n_gpus_per_node:
            yield f"{ROLLOUT}.n_gpus_per_node is of servers on GPUs of their own; set {ROLLOUT}.nnodes, or leave it out"
        return
    wanted = ["gloo"] if config.trainer.device == "cpu" else ["nccl", "gloo"]
    if backend not in wanted:
        yield f"{ROLLOUT}.nnodes={rollout.nnodes}: weights go there over {' or '.join(wanted)}; set {key}.backend"
    if model.lora_rank and not model.lora.merge:
        yield f"{ROLLOUT}.nnodes={rollout.nnodes}: verl sends no adapter there; set {MODEL}.lora.merge=true"


def drafts_of(config: DictConfig) -> dict[str, Any]:
    """vLLM's speculative_config, empty where there is none."""
    return dict(
        (config.actor_rollout_ref.rollout.engine_kwargs.get("vllm") or {}).get("speculative_config")
        or {}
    )


def check_backend(config: DictConfig) -> Iterator[str]:
    """What only vLLM does is asked of vLLM."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    if rollout.name not in SAMPLERS:
        yield f"{ROLLOUT}.name={rollout.name}: wants one of {', '.join(SAMPLERS)}{TRTLLM * (rollout.name == 'trtllm')}"
    if rollout.name == "sglang":
        usual = base_configs(config.model_engine)[1].actor_rollout_ref.rollout
        if config.trainer.device == "cpu":
            yield f"{ROLLOUT}.name=sglang needs GPUs: it has no build for a CPU in the registries; take vllm or hf"
        if rollout.full_determinism:
            yield f"{ROLLOUT}.full_determinism: verl gives SGLang's requests no seed of their own; leave it out"
        if rollout.nnodes and rollout.free_cache_engine:
            why = "servers on GPUs of their own would give their memory back twice"
            yield f"{ROLLOUT}.free_cache_engine: {why}; set it to false"
        for key in (key for key in NOT_SGLANG if rollout.get(key) != usual.get(key)):
            yield f"{ROLLOUT}.{key} is not read with {ROLLOUT}.name=sglang; leave it out"
    elif rollout.engine_kwargs.sglang:
        yield f"{ROLLOUT}.engine_kwargs.sglang is read with {ROLLOUT}.name=sglang; set that, or leave it out"
    if rollout.name == "hf" and rollout.tensor_model_parallel_size * rollout.data_parallel_size > 1:
        yield f"{ROLLOUT}.name=hf has the whole model on each GPU; leave {ROLLOUT}.tensor_model_parallel_size out"
    if model.override_config.get("quantization_config"):
        why = "verl's FSDP shards and sends plain weights, not those of QLoRA"
        yield f"{MODEL}.override_config.quantization_config: {why}; leave it out, and take lora_rank alone"
    if rollout.name == "hf" and model.lora_rank and not model.lora.merge:
        yield f"{ROLLOUT}.name=hf takes no adapter beside the model; set {MODEL}.lora.merge=true"
    if rollout.prometheus.enable and rollout.disable_log_stats:
        yield f"{ROLLOUT}.prometheus.enable needs {ROLLOUT}.disable_log_stats=false (configs/monitoring.yaml)"
    drafts, key = drafts_of(config), f"{ROLLOUT}.engine_kwargs.vllm.speculative_config"
    if drafts and rollout.name != "vllm":
        yield f"{key}: {ROLLOUT}.name={rollout.name} takes no draft tokens; leave it out"
    if drafts and drafts.get("method") != "ngram":
        why = "its draft is of a model that no sync reaches, and gets worse with every step"
        yield f"{key}.method={drafts.get('method')}: {why}; set ngram"
    if drafts and model.mtp.enable_rollout:
        yield f"{key} and {MODEL}.mtp.enable_rollout both draft tokens; set one"
    if drafts and rollout.full_determinism:
        yield f"{key}: with {ROLLOUT}.full_determinism vLLM draws by other numbers where a draft ends; set one"


def build(config: DictConfig) -> None:
    """verl's own classes take what the recipe says of engines and rollouts. Raises ConfigError."""
    from verl.utils.config import omega_conf_to_dataclass

    for section in (ACTOR, ROLLOUT, *["critic"] * asks_for(config, "values")):
        try:
            omega_conf_to_dataclass(OmegaConf.select(config, section))
        except Exception as error:  # Hydra's, OmegaConf's, and whatever their __post_init__ raises
            cause = error.__cause__ or error
            bare = traceback.extract_tb(cause.__traceback__)[-1].line  # an assert's
            why = str(cause).strip().partition("\n")[0] or bare
            raise ConfigError(
                f"{section}: verl does not take it: {why}; see its documentation of these keys"
            ) from None


def check_quantization(config: DictConfig, c: Any) -> Iterator[str]:
    """rollout.quantization: fp8 in blocks of 128 x 128, by verl. c: the Hugging Face config of the text model."""
    rollout, key = config.actor_rollout_ref.rollout, f"{ROLLOUT}.quantization"
    if not rollout.quantization:
        return
    if rollout.quantization != "fp8" or rollout.name == "hf":
        yield f"{key}={rollout.quantization}: there is fp8 alone, with vLLM and SGLang; set that, or leave it out"
    elif config.trainer.device == "cpu":
        cpuinfo = Path("/proc/cpuinfo")
        lacks = "amx_tile" not in (cpuinfo.read_text() if cpuinfo.is_file() else "")
        why = (
            "this one has no amx_tile, which vLLM's kernel wants"
            if lacks
            else "verl's sync would not quantise"
        )
        yield f"{key}=fp8 on a CPU: {why}; leave it out"
        return
    queries, keys, *_ = memory.widths(c)
    mlp = (
        getattr(c, "moe_intermediate_size", c.intermediate_size)
        if memory.experts_of(c)
        else c.intermediate_size
    )
    widths = {"hidden_size": c.hidden_size, "queries": queries, "keys": keys, "of the MLP": mlp}
    if odd := [f"{name} {width}" for name, width in widths.items() if width % 128]:
        yield f"{key}=fp8 goes by blocks of 128, and the model has {', '.join(odd)}; leave it out"


def check_pools(config: DictConfig) -> Iterator[str]:
    """GPUs of their own are for what the recipe has."""
    has = {"critic": asks_for(config, "values"), "ref": needs_reference(config)}
    has["reward_model"] = config.reward.reward_model.enable
    for role, count in config.trainer.resource_pools.items():
        if count and not has[role]:
            yield f"trainer.resource_pools.{role}={count}: this recipe has none; leave it out"


def pretrained(config: DictConfig, key: str, **settings: Any) -> tuple[Any, Any]:
    """(config, tokenizer) of the Hugging Face model that the recipe names as `key`. Raises ConfigError."""
    from transformers import AutoConfig, AutoTokenizer

    name = OmegaConf.select(config, key)
    try:
        return AutoConfig.from_pretrained(name, **settings), AutoTokenizer.from_pretrained(
            name, **settings
        )
    except (OSError, ValueError) as error:
        why = f"no model folder, and no model of the hub ({str(error).strip().splitlines()[0]}); give one of the two"
        raise ConfigError(f"{key}={name}: {why}") from None


def check_reward_model(config: DictConfig, tokenizer: Any) -> None:
    """The reward model has a scalar head and reads the policy's ids. Raises ConfigError."""
    head = check_vocabulary(config, key := "reward.reward_model.model_path", tokenizer)
    kinds = ("ForTokenClassification", "ForSequenceClassification")
    if not (head.architectures or [""])[0].endswith(kinds) or head.num_labels != 1:
        why = f"{head.architectures} has no scalar head; give a classifier with one label"
        raise ConfigError(f"{key}={OmegaConf.select(config, key)}: {why}")


def check_vocabulary(config: DictConfig, key: str, tokenizer: Any) -> Any:
    """The Hugging Face config of the model that the recipe names as `key`, which scores the policy's ids, so that each
    must be the same token to both. Raises ConfigError."""
    found, theirs = pretrained(
        config, key, trust_remote_code=config.actor_rollout_ref.model.trust_remote_code
    )
    if others := set(theirs.get_vocab().items()) ^ set(tokenizer.get_vocab().items()):
        why = f"its vocabulary is not the policy's, whose ids it would score ({min(others)[0]!r} is another)"
        raise ConfigError(f"{key}={OmegaConf.select(config, key)}: {why}; give one with that")
    return found


def check_tools(tasks: Iterable[Task]) -> None:
    """Each tool of a row that Gym gets has what its schema wants (OpenAI's FunctionToolParam). Raises ConfigError."""
    for task in tasks:
        for tool in task.row["responses_create_params"].get("tools") or ():
            if lacks := [key for key in ("name", "parameters", "strict") if key not in tool]:
                why = (
                    f"a tool has no {', '.join(lacks)}, and Gym's server would refuse each episode"
                )
                way_out = '{"type": "function", "name": ..., "description": ..., "parameters": {...}, "strict": true}'
                raise ConfigError(f"{task.row_id}: {why}; write it as {way_out}")


def check_tool_format(name: str) -> None:
    """The parser that reads the model's tool calls exists. Raises ConfigError."""
    try:
        from vllm.tool_parsers import ToolParserManager  # takes 7 s, and is needed anyway
    except ImportError:
        from verl.experimental.agent_loop.tool_parser import ToolParser

        whose, known = "verl", list(ToolParser._registry)
    else:
        whose, known = "vLLM", ToolParserManager.list_registered()
    if name not in known:
        why = f"{whose} has no such tool parser; it has {', '.join(known)}"
        raise ConfigError(f"{ROLLOUT}.multi_turn.format={name}: {why}")
