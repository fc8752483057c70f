"""Recipes: YAML files over verl's own configuration, merged strictly.

A key that nothing reads is an error: one that verl does not know, and one of verl's that neither this loop nor verl's
workers read. tests/config/test_verl_keys.py looks every key of verl's up in the source of both.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kit.errors import ConfigError
from kit.gym.servers import SECRET as VARIABLE  # in the name of an environment variable

ROOT = Path(__file__).resolve().parents[2]
VERL = Path(importlib.util.find_spec("verl").origin).parent / "trainer" / "config"  # type: ignore[union-attr, arg-type]
ACTOR, REF, ROLLOUT, MODEL = (
    f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout", "model")
)
KIT_KEYS = {  # the kit's own, in verl's sections
    "trainer": ("resource_pools", "one_step_off", "print_samples_every", "stage_timeout_s"),
    "algorithm": ("recompute_old_log_probs",),
}
ENGINES = (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp")
MODEL_ENGINES = ("dp", "megatron", "veomni")  # verl's, which it composes its configuration for
REFUSED = {
    "torchtitan": "verl's torchtitan has no critic, and saves where no actor's folder is",
    "automodel": "verl has automodel for fine-tuning alone",
}
# What this loop and verl's workers read. Where READ and UNREAD both have a part of a key, the longer part decides.
_READ = {
    "": "actor_rollout_ref critic gym env ray_kwargs.ray_init model_engine",
    REF: "strategy fsdp_config megatron veomni pad_to_length log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu"
    " log_prob_micro_batch_size_per_gpu",
    f"{ROLLOUT}.agent": "num_workers",
    f"{ROLLOUT}.multi_turn": "format max_assistant_turns max_tool_response_length",
    MODEL: "lora.merge mtp.enable mtp.enable_rollout mtp.method mtp.num_speculative_tokens",
    "data": "prompt_key train_batch_size max_prompt_length max_response_length seed shuffle",
    "algorithm": "adv_estimator gamma lam norm_adv_by_std_in_grpo kl_ctrl kl_penalty use_kl_in_reward"
    " rollout_correction filter_groups.enable filter_groups.metric filter_groups.max_num_gen_batches",
    "reward.reward_model": "enable model_path",
    "distillation": "enabled teacher_models.teacher_model.model_path",
    "trainer": "project_name experiment_name default_local_dir logger device nnodes n_gpus_per_node critic_warmup"
    " total_epochs total_training_steps save_freq test_freq val_before_train resume_mode resume_from_path"
    " max_actor_ckpt_to_keep log_val_generations ray_wait_register_center_timeout",
}
FIELDS = [  # which verl's YAML lacks, but its dataclasses have
    *("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights", f"{MODEL}.target_parameters"),
    *(f"{ROLLOUT}.{key}" for key in ("repetition_penalty", "limit_images", "enable_sleep_mode")),
    *(f"{engine}.mixed_precision" for engine in ENGINES),
    *(f"{ACTOR}.checkpoint.save_lora_only", "critic.checkpoint.save_lora_only"),
]
READ = FIELDS + [
    f"{place}.{key}".strip(".") for place, keys in _READ.items() for key in keys.split()
]
READ += [f"{section}.{key}" for section, keys in KIT_KEYS.items() for key in keys]
_ROWS: list[
    tuple[Sequence[str], str, str]
] = [  # places, keys below them, what to set instead: * is the key's own name
    (["data"], "train_files val_files", "env.*"),
    (
        ["reward"],
        "reward_model.enable_resource_pool reward_model.n_gpus_per_node",
        "trainer.resource_pools.reward_model",
    ),
    (["", "reward"], "custom_reward_function", "env.verifier=path.py:name"),
    (["reward", "reward_model"], "reward_manager", "env.verifier=path.py:name"),
    (["reward"], "sandbox_fusion", "env.verifier={function: verl, sandbox_fusion_url: ...}"),
    (
        ["distillation"],
        "distillation_loss",
        "algorithm.adv_estimator (configs/algorithms/distill.yaml)",
    ),
    ([ACTOR, "critic"], "rollout_n", f"{ROLLOUT}.n"),
    ([ACTOR, "critic"], "grad_clip", "optim.clip_grad beside it"),
    ([ACTOR], "clip_ratio", "clip_ratio_low and clip_ratio_high beside it"),
    ([ACTOR], "use_torch_compile qat", "fsdp_config.* beside it"),
    (
        ["actor_rollout_ref"],
        "actor.ppo_micro_batch_size rollout.log_prob_micro_batch_size",
        "*_per_gpu",
    ),
    (
        ["critic"],
        "enable",
        "algorithm.adv_estimator: the advantage decides whether there is a critic",
    ),
    (
        ["critic"],
        "use_dynamic_bsz ppo_micro_batch_size ppo_micro_batch_size_per_gpu",
        "ppo_max_token_len_per_gpu",
    ),
    (["critic", *ENGINES], "ulysses_sequence_parallel_size", f"{ACTOR}.*"),
    (ENGINES, "dtype", "mixed_precision.param_dtype beside it"),
    (
        ["actor_rollout_ref"],
        "ref",
        "the actor's; the reference reads its own fsdp_config and log_prob_...",
    ),
    ([ROLLOUT], "prompt_length response_length", "data.max_*"),
    ([ROLLOUT], "agent multi_turn", "gym.servers: they have the tools and the turns"),
    ([MODEL], "tokenizer_path", f"{MODEL}.path, to a folder that holds the tokenizer, too"),
    ([MODEL, "critic.model"], "lora", "lora_rank, lora_alpha and target_modules beside it"),
    ([MODEL, "critic.model"], "tiled_mlp mtp", ""),
    ([ACTOR, "critic"], "checkpoint.async_save profiler optim.total_training_steps", ""),
    (
        [ACTOR],
        "checkpoint.strict freeze_vision_tower use_prefix_grouper calculate_sum_pi_squared",
        "",
    ),
    (["critic"], "forward_micro_batch_size forward_micro_batch_size_per_gpu", ""),
    (ENGINES, "strategy forward_only turbo_config", ""),
    (
        [ROLLOUT],
        "mode calculate_log_probs skip_tokenizer_init over_sample_rate multi_stage_wake_up profiler trace",
        "",
    ),
    ([ROLLOUT], "moe_load_balance_metrics_interval router_config_path", ""),
    (
        [ROLLOUT],
        "enable_rollout_routing_replay",
        "leave it out: verl replays routers with Megatron and VeOmni alone",
    ),
    ([ROLLOUT], "disaggregation.bootstrap_port disaggregation.ib_device engine_kwargs.trtllm", ""),
    (
        ["actor_rollout_ref"],
        "hybrid_engine nccl_timeout actor.use_fused_kernels actor.use_remove_padding",
        "",
    ),
]
UNREAD = {
    f"{place}.{key}".strip("."): to.replace("*", key)
    for places, keys, to in _ROWS
    for place in places
    for key in keys.split()
}
MICRO_BATCH_TOKENS = [f"{place}.ppo_max_token_len_per_gpu" for place in (ACTOR, "critic")]
MICRO_BATCH_TOKENS += [f"{place}.log_prob_max_token_len_per_gpu" for place in (ROLLOUT, REF)]
HIDDEN = "<hidden>"  # written instead of a secret
SECRET = re.compile(  # names of keys; not verl's prompt_key, reward_fn_key, ...
    r"(?:^|[_-])(?:(?:api|access|auth|secret|private|signing|encryption|account|judge|policy|openai|model|server)"
    r"[_-]?keys?|(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)(?<!image_)(?<!stop_)token|secret|password|passwd|passphrase"
    r"|credentials?|authorization)$|^key$",
    re.IGNORECASE,
)
DEFAULT = re.compile(r"\$\{oc\.env:(\w+),[^{}]*\}")  # ${oc.env:NAME,what to take without it}
URL_PASSWORD = re.compile(
    r"(\b[a-z][\w+.-]*://(?:[^\s/:@]*:(?=[^\s/@])|(?=[^\s/:@]+@)))(?!\$\{)[^\s/]+@", re.I
)
URL_QUERY = re.compile(
    r"([?&](?:api_?key|key|token|access_token|secret|password)=)(?!\$\{)[^&\s#]+", re.I
)
FREE = (
    "ray_kwargs.ray_init",
    "gym.servers",
    "gym.judges",
    "gym.concurrency",
)  # what is below is not ours to list


def gpus(config: DictConfig, role: str = "actor") -> int:
    """GPUs of each node that actor, critic, ref or reward_model work on: the actor's, or those of a pool of its own."""
    return int(config.trainer.resource_pools.get(role) or config.trainer.n_gpus_per_node)


def sampling_gpus(config: DictConfig) -> int:
    """GPUs that vLLM's servers are on, of all nodes: the actor's, or their own (rollout.nnodes)."""
    rollout = config.actor_rollout_ref.rollout
    return int((rollout.nnodes or config.trainer.nnodes) * rollout.n_gpus_per_node)


def all_gpus(config: DictConfig, command: str = "train") -> int:
    """GPUs that a command takes, of all nodes."""
    if command in ("rollout", "evaluate"):
        return sampling_gpus(config)
    settings, train = config.trainer, command == "train"
    own = sum(count or 0 for count in settings.resource_pools.values()) * train
    apart = sampling_gpus(config) if train and config.actor_rollout_ref.rollout.nnodes else 0
    return int((settings.n_gpus_per_node + own) * settings.nnodes + apart)


def cores(processes: Any = 1) -> int:
    """${cores:N} of a recipe, in ray_kwargs alone: of those that this process may use, the share of each of N."""
    return max(
        1,
        len(os.sched_getaffinity(0))
        // (processes if isinstance(processes, int) and processes > 0 else 1),
    )


OmegaConf.register_new_resolver("cores", cores, replace=True)
OmegaConf.register_new_resolver("all_gpus", lambda _root_: all_gpus(_root_), replace=True)


def to_plain(config: Any) -> Any:
    """An OmegaConf node -> plain dicts and lists, resolved."""
    return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config


def raise_all(problems: Sequence[Exception]) -> None:
    """One problem as it is, several as one ConfigError that lists them."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        told = "".join(f"\n  {number}. {problem}" for number, problem in enumerate(problems, 1))
        raise ConfigError(f"{len(problems)} problems with this recipe:{told}")


@functools.cache
def base_configs(engine: str = "dp") -> tuple[DictConfig, DictConfig]:
    """What every recipe starts from: (verl's ppo_trainer.yaml and the kit's own keys, these and the rest of
    configs/base.yaml), for an engine of verl's. Neither is to be changed."""
    with initialize_config_dir(str(VERL), version_base=None):
        verl = compose("ppo_trainer", overrides=[f"model_engine={engine}"])
    OmegaConf.set_struct(verl, False)
    verl.model_engine = engine
    base = read_yaml(str(ROOT / "configs" / "base.yaml"))
    if engine != "dp":  # whose keys others do not have
        del base.actor_rollout_ref.actor.strategy, base.critic.strategy, base.critic.fsdp
    own = {
        section: {name: base[section][name] for name in keys} for section, keys in KIT_KEYS.items()
    }
    own |= {"gym": base.gym, "env": base.env}
    merged = (OmegaConf.merge(verl, part) for part in (own, base))
    return cast(tuple[DictConfig, DictConfig], tuple(merged))


def load_config(
    files: Sequence[str], overrides: Sequence[str], problems: list[Exception] | None = None
) -> tuple[DictConfig, DictConfig]:
    """verl's ppo_trainer.yaml + configs/base.yaml + files + key=value -> (config, the defaults it started from).

    files: paths, or names of the kit's recipes (`dapo`). problems: a list that takes what is wrong, for check_recipe to
    tell beside the rest; without one it is raised, as ConfigError. Sets the environment variables of
    ray_kwargs.ray_init.runtime_env.env_vars in this process, so call it before verl is imported.
    """
    overlays = [(file, read_yaml(file)) for file in files]
    overlays += [
        (text, OmegaConf.from_dotlist([text.lstrip("+")])) for text in overrides if "=" in text
    ]
    engine = next(
        (name for _, overlay in reversed(overlays) if (name := overlay.get("model_engine"))), "dp"
    )
    if engine not in MODEL_ENGINES:
        raise ConfigError(
            f"model_engine={engine}: wants one of {', '.join(MODEL_ENGINES)}; {REFUSED.get(engine, 'no other')}"
        )
    if engine != "dp" and any(
        OmegaConf.select(overlay, "trainer.device") == "cpu" for _, overlay in overlays
    ):
        raise ConfigError(
            f"model_engine={engine} needs GPUs: verl has it for CUDA alone; leave it out on a CPU"
        )
    defaults, usual = base_configs(engine)
    wrong = [
        f"{t!r} is not key=value, nor one of train, rollout, evaluate, sft"
        for t in overrides
        if "=" not in t
    ]
    parts: list[Any] = []
    by_hand = {text.lstrip("+").partition("=")[0] for text in overrides}
    for (
        source,
        overlay,
    ) in overlays:  # another function does not inherit the settings of the one before
        length, steps = OmegaConf.select(overlay, "trainer") or {}, "total_training_steps"
        if (
            "total_epochs" in length
            and steps not in length
            and (source in files or f"trainer.{steps}" not in by_hand)
        ):
            parts.append(
                {"trainer": {steps: None}}
            )  # nor epochs the steps of another recipe, which would go first
        given = {
            name: OmegaConf.select(overlay, f"env.{name}") or "" for name in ("reward", "sampler")
        }
        parts += [
            {"env": {name: None for name, spec in given.items() if "function" in spec}},
            overlay,
        ]
    config = cast(DictConfig, OmegaConf.merge(usual, *parts))
    config.gym.servers = config.gym.servers or {}
    known = config.gym.servers if OmegaConf.is_dict(config.gym.servers) else {}
    for name in [
        name for name, spec in known.items() if spec is None
    ]:  # a recipe's, which a later one leaves out
        del known[name]
    apply_environment(config)
    theirs, unknown = OmegaConf.to_container(defaults), []
    known = [key for key in leaves(theirs) if unread(key) is None]
    for source, overlay in overlays:
        for key in unknown_keys(OmegaConf.to_container(overlay), theirs):
            meant = [f"actor_rollout_ref.{leaf}" for leaf in leaves(overlay) if _within(leaf, key)]
            close = [leaf for leaf in meant if leaf in known] or difflib.get_close_matches(
                key, known, n=1
            )
            hint = (
                f"; did you mean {close[0]}?"
                if close
                else f"; see configs/base.yaml, and {VERL} for verl's"
            )
            others = (
                e
                for e in MODEL_ENGINES
                if any(_within(leaf, key) for leaf in leaves(base_configs(e)[0]))
            )
            if other := next(others, None):
                hint = (
                    f": it is of model_engine={other}, and this recipe has {engine}; leave it out"
                )
            wrong.append(f"{source}: unknown key {key}{hint}")
            unknown.append(key)
    wrong += useless(config, usual, unknown)
    if problems is None:
        raise_all([ConfigError(text) for text in wrong])
    else:
        problems += map(ConfigError, wrong)
    return config, defaults


def useless(config: DictConfig, usual: DictConfig, unknown: Sequence[str]) -> Iterator[str]:
    """What is wrong with keys that verl knows: nothing reads them, or their value is of another kind. The usual value
    takes its place, so that other checks can go on."""
    expected = leaves(usual)
    found = {
        key: value
        for key, (value, _) in changed(config, expected).items()
        if not _within(key, *unknown)
    }
    idle = {
        key: to_plain(OmegaConf.select(config, key)) for key in found if unread(key) is not None
    }
    for key in idle.keys() & expected.keys():
        OmegaConf.update(config, key, expected[key], merge=False)
    for key, value in found.items():
        was = expected.get(key)
        number = isinstance(was, (int, float)) and not key.endswith(
            "rollout_is_threshold"
        )  # which takes "0.8_1.5"
        text = isinstance(value, (str, list)) and not str(value).startswith("${")
        if key in idle:  # and is not what it would be anyway
            if key not in expected or idle[key] != to_plain(OmegaConf.select(config, key)):
                way_out = unread(key) or "leave it out"
                way_out = way_out if way_out.startswith("leave it out") else f"set {way_out}"
                yield f"{key} is verl's, but this loop does not read it, so setting it would do nothing; {way_out}"
        elif key == "trainer.total_training_steps" and value is None:
            continue  # trainer.total_epochs says it
        elif number and (text or (value is None and _within(key, "data", "trainer", "gym", "env"))):
            OmegaConf.update(config, key, was)
            yield f"{key}={value}: wants a value like {was}"


def is_kit_key(key: str) -> bool:
    """Whether a dotted key is the kit's own rather than verl's."""
    section, _, rest = key.partition(".")
    return section in ("gym", "env") or _within(rest, *KIT_KEYS.get(section, ()))


@functools.cache
def unread(key: str) -> str | None:
    """What to set instead of a key that nothing reads, empty where that is nothing; None for a key that is read."""
    name = max((name for name in (*READ, *UNREAD) if _within(key, name)), key=len, default="")
    return None if name in READ else UNREAD.get(name, "")


def _within(key: str, *parts: str) -> bool:
    return f"{key}.".startswith(tuple(f"{part}." for part in parts))


def read_yaml(file: str) -> DictConfig:
    """A recipe: a path, or the name of one in configs/ and its folders. Raises ConfigError naming the file.

    ${matmul_dtype:} in it is the type in which this machine's cores multiply fastest: bfloat16 where they have
    instructions for it (Linux tells), else float32.
    """
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.is_file() else set()
    dtype = "bfloat16" if flags & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"
    ours = {path.stem: path for path in sorted((ROOT / "configs").rglob("*.yaml"))}
    path = Path(file) if Path(file).is_file() else ours.get(file, Path(file))
    try:
        text = (
            path.read_text().replace('"${matmul_dtype:}"', dtype).replace("${matmul_dtype:}", dtype)
        )
        loaded = OmegaConf.create(text)
    except (FileNotFoundError, IsADirectoryError):
        close = [
            ours[name].relative_to(ROOT) for name in difflib.get_close_matches(path.stem, ours, n=1)
        ]
        hint = (
            f"there is {close[0]}, or just {close[0].stem}"
            if close
            else "see configs/ for the kit's"
        )
        raise ConfigError(f"--config {file}: no such file; {hint}") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"--config {file}: not valid YAML; look where it says: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"--config {file}: a recipe is a YAML mapping; write it as key: value")
    return loaded


def apply_environment(config: DictConfig) -> None:
    """Give this process, and through it every worker, the recipe's environment variables and the kit's modules."""
    start = config.ray_kwargs.ray_init
    variables = (
        {} if start.get("address") else {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    )  # of one: all on loopback
    variables |= OmegaConf.select(start, "runtime_env.env_vars") or {}
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    variables = {name: str(value) for name, value in variables.items()}
    os.environ.update(variables)
    OmegaConf.update(start, "runtime_env.env_vars", variables, force_add=True)


def public(config: DictConfig) -> DictConfig:
    """The recipe as it may be written down: resolved, except for what it has from the environment, without secrets.

    A secret is the value of a variable whose name has KEY, TOKEN, SECRET, PASSWORD or CREDENTIAL in it; a literal
    value of a key with such a name; the password of a URL. HIDDEN, or the variable's name, takes its place.
    """
    variables = {
        value: name
        for name, value in os.environ.items()
        if VARIABLE.search(name) and len(value) >= 8
    }
    known = sorted(
        variables.items(), key=lambda item: -len(item[0])
    )  # one may be a part of another

    def walk(raw: Any, resolved: Any, secret: bool) -> Any:
        if isinstance(resolved, dict):
            raws = raw if isinstance(raw, dict) else {}
            return {
                key: walk(raws.get(key, ""), value, secret or is_secret(str(key), value))
                for key, value in resolved.items()
            }
        if isinstance(resolved, list):
            items = raw if isinstance(raw, list) else [""] * len(resolved)
            return [walk(*pair, secret) for pair in zip(items, resolved, strict=True)]
        if isinstance(raw, str) and "${oc.env:" in raw:
            return without_passwords(DEFAULT.sub(r"${oc.env:\1}", raw) if secret else raw)
        if isinstance(resolved, str):
            for value, name in known:
                resolved = resolved.replace(value, f"${{oc.env:{name}}}")
            resolved = without_passwords(resolved)
        is_literal = resolved not in (None, "") and not isinstance(resolved, bool)
        return HIDDEN if secret and is_literal and "${oc.env:" not in str(resolved) else resolved

    raw, resolved = OmegaConf.to_container(config, resolve=False), to_plain(config)
    return cast(DictConfig, OmegaConf.create(walk(raw, resolved, False)))


def is_secret(name: str, value: Any) -> bool:
    """Whether a key's name says that its value is a secret. One in capitals is an environment variable's."""
    if name.isupper():
        return bool(VARIABLE.search(name)) and len(str(value)) >= 8
    return bool(SECRET.search(name))


def without_passwords(text: str) -> str:
    """A text with HIDDEN for the passwords and keys in the URLs of it; interpolations stay.

    >>> without_passwords("https://me:pass@host/v1?api_key=sk-1&n=2")
    'https://me:<hidden>@host/v1?api_key=<hidden>&n=2'
    """
    text = URL_PASSWORD.sub(rf"\g<1>{HIDDEN}@", text)
    return URL_QUERY.sub(rf"\g<1>{HIDDEN}", text)


def leaves(config: Any, prefix: str = "") -> dict[str, Any]:
    """{dotted key: value} of a configuration's leaves, interpolations as they were written."""
    node: Any = OmegaConf.to_container(config) if OmegaConf.is_config(config) else config
    found: dict[str, Any] = {}
    for name, value in node.items():
        below = value and isinstance(value, dict)
        found |= leaves(value, f"{prefix}{name}.") if below else {f"{prefix}{name}": value}
    return found


def changed(
    config: DictConfig, defaults: Mapping[str, Any] | DictConfig
) -> dict[str, tuple[Any, Any]]:
    """{dotted key: (value, default)} of the leaves in which two configurations differ."""
    now, was = leaves(config), leaves(defaults)
    return {
        key: (value, was.get(key))
        for key, value in now.items()
        if key not in was or value != was[key]
    }


def unknown_keys(overlay: Any, known: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys of `overlay` that `known` lacks, plain dicts both. An empty mapping in verl's defaults takes any."""
    for name, value in overlay.items():
        key, theirs = f"{prefix}{name}", known.get(name)
        if name not in known and key not in FIELDS and not _within(key, *FREE):
            yield key
        elif theirs and isinstance(theirs, dict) and isinstance(value, dict):
            yield from unknown_keys(value, theirs, f"{key}.")
