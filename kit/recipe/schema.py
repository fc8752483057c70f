"""A recipe as types: the kit's sections `gym:` and `env:`, and the keys of verl that the kit reads.

configs/base.yaml explains the kit's keys, verl's configuration files explain verl's. A section of
verl has more keys than its class here: verl's own classes check those (checks.py), and the kit only
passes them on. `find_problems` describes each invalid value.

Protects: a value of a wrong kind ends the run before a worker starts.
"""

from __future__ import annotations

import difflib
import itertools
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from env import Json
from gym_client import KINDS
from kit.recipe.entries import Entry, parse_entry
from kit.recipe.numbers import (
    LIMIT,
    Concurrency,
    Count,
    CountOrAll,
    CountOrNull,
    CountOrZero,
    Finite,
    Fraction,
    NotNegative,
    Number,
    Port,
    Positive,
    Seconds,
    Seed,
    Share,
    Temperature,
    by,
    count,
    follow,
    show,
)

SPEC = "path.py:function, or {function: path.py:function, its settings}"
PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
# verl's suffix "+" selects straight-through gradients
KL_TYPES = (*PENALTIES, *[f"{penalty}+" for penalty in PENALTIES])
PRECISIONS = (None, "fp32", "float32", "32", "bf16", "bfloat16", "fp16", "float16", "16")


class Section(BaseModel):
    """A section of the kit, which never changes."""

    # a text may come from a reference to a number
    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)


class VerlSection(BaseModel):
    """A section of verl, with the keys that the kit reads."""

    model_config = ConfigDict(
        frozen=True, extra="allow", coerce_numbers_to_str=True, protected_namespaces=()
    )


# --- kinds of values -----------------------------------------------------------------------------


def check_switch(value: object) -> bool:
    """Return true or false, also for 1 and 0. Raises ValueError."""
    if isinstance(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise ValueError("must be true or false. Change it.")


def check_text(value: str) -> str:
    """Return a text that is not empty. Raises ValueError."""
    if not value:
        raise ValueError("is empty. Give a value.")
    return value


def choose_from(*options: str | None) -> BeforeValidator:
    """Make the validator of a field with a fixed set of values."""

    def check(value: object) -> object:
        if value in options:
            return value
        names = ["null" if option is None else option for option in options]
        raise ValueError(f"is not supported. Use one of: {', '.join(names)}.")

    return BeforeValidator(check)


def check_spec(value: object) -> object:
    """Return the name of a function, or its name and settings. Raises ValueError."""
    if isinstance(value, str) or (isinstance(value, dict) and "function" in value):
        return value
    raise ValueError(f"is not a function. Write {SPEC}.")


def read_entry(value: object) -> Entry:
    """Return the entry of a list of files. Raises ValueError."""
    if isinstance(value, Entry):
        return value
    if isinstance(value, (str, dict)):
        return parse_entry(value)
    raise ValueError("is no file. Write a path, or {path: ..., ...}.")


def read_limits(value: object) -> object:
    """Return {server: limit} of gym.concurrency, which may be one limit. Raises ValueError."""
    return value if isinstance(value, dict) else {"default": follow(LIMIT, value)}


def listed(value: object) -> object:
    """Return a list: verl also takes one name for trainer.logger."""
    return [value] if isinstance(value, str) else value


Switch = Annotated[bool, BeforeValidator(check_switch)]
Text = Annotated[str, AfterValidator(check_text)]
Url = Annotated[str, Field(pattern="^https?://")]
KlType = Annotated[str, choose_from(*KL_TYPES)]
Precision = Annotated[str | None, choose_from(*PRECISIONS)]
Processes = Annotated[int | None, count(null="one per CPU core")]
PoolSize = Annotated[int | None, count(null="the actor's GPUs")]
Limits = Annotated[dict[str, Concurrency], BeforeValidator(read_limits)]
FunctionSpec = Annotated[str | Json, BeforeValidator(check_spec)]
FileEntry = Annotated[Entry, BeforeValidator(read_entry)]
Names = str | list[str]


# --- gym -----------------------------------------------------------------------------------------


class ServerStart(Section):
    """A Gym server that the run starts. kit/verify/process_specs.py checks the machine."""

    python: str | None = None
    install: bool | None = None
    server: str | None = None
    path: str | None = None
    config: Json | None = None
    global_config: Json | None = None
    host: str | None = None
    port: Port = None
    agent: str | None = None
    agent_config: Json | None = None
    environment: str | None = None
    env: list[str] | None = None

    @field_validator("agent_config", "environment")
    @classmethod
    def check_agent(cls, value: object, info: ValidationInfo) -> object:
        """Return a setting of an agent. Raises ValueError if there is no agent."""
        if value and not info.data.get("agent"):
            raise ValueError("is set without an agent. Add agent: simple_agent.")
        return value


def check_kind(kind: object, info: ValidationInfo) -> str:
    """Return the kind of a server, by default that of its `start`. Raises ValueError."""
    start = info.data.get("start")
    default = "verify"
    if start and start.agent:
        default = "environment" if start.environment else "agent"
    if kind and kind not in KINDS:
        raise ValueError(f"must be {', '.join(KINDS)}. Choose one.")
    if kind and start and start.agent and kind != default:
        raise ValueError(f"differs from start, whose agent makes it {default}. Remove kind.")
    return str(kind or default)


class Server(Section):
    """A Gym server: one that runs at `url`, or one to start.

    kind: which of the server's routes the run calls. The server cannot choose it, since another
    kind may have other powers. If it is not set, it is that of `start`, or `verify`.
    """

    url: Url | None = None
    start: ServerStart | None = None
    kind: Annotated[str, BeforeValidator(check_kind), Field(validate_default=True)] = ""

    @model_validator(mode="after")
    def check_source(self) -> Server:
        """Raise ValueError unless the server has one source."""
        if (self.url is None) == (self.start is None):
            raise ValueError(
                "must have either url: http://host:port or start: {python, server, port, config}. "
                "Change it."
            )
        return self


class PolicyEndpointKeys(Section):
    """The OpenAI-compatible endpoint for agents."""

    host: Annotated[str, Field(min_length=1)]
    port: Port


class GymSection(Section):
    """The section `gym:`."""

    servers: dict[str, Server]
    judges: Json  # an optional feature parses it
    head_server: Url | None
    max_reward: Positive
    timeout_s: Seconds
    attempts: Count
    outage_budget_s: Annotated[float, by(Number(0, 10**9))]
    concurrency: Limits
    max_failed_frac: Fraction
    policy_endpoint: PolicyEndpointKeys


# --- env -----------------------------------------------------------------------------------------


class VerifierPool(Section):
    """The processes that run Python verifiers."""

    processes: Processes
    timeout_s: Seconds
    memory_gb: Positive
    sandbox: str | None
    readable: list[str]
    env: list[str]


class AgentSpec(Section):
    """An agent that runs the turns. extras/agents has the three kinds."""

    function: Text | None = None
    python: str | None = None
    command: Text | None = None
    files: dict[str, str] = {}
    url: Url | None = None
    env: list[str] = []

    @model_validator(mode="after")
    def check_kind(self) -> AgentSpec:
        """Raise ValueError unless the agent has one kind, and only keys of this kind."""
        kinds = [name for name in ("function", "command", "url") if getattr(self, name)]
        if len(kinds) != 1:
            raise ValueError("must have one of function, command and url. Change it.")
        keys = {"function": ["python", "env"], "command": ["files", "env"], "url": []}[kinds[0]]
        unused = [name for name in ("python", "files", "env") if getattr(self, name)]
        for name in set(unused) - set(keys):
            raise ValueError(f"has {name}, which an agent with {kinds[0]} does not use. Remove it.")
        return self


class EnvSection(Section):
    """The section `env:`."""

    train_files: list[FileEntry]
    val_files: list[FileEntry]
    only_servers: list[str] | None
    verifier: FunctionSpec | None
    agent: AgentSpec | None
    environment: Json | None  # an optional feature parses it
    shadow_verifier: FunctionSpec | None
    verifier_pool: VerifierPool
    allow_unsandboxed_code: Switch
    sampler: FunctionSpec | None
    filters: list[FunctionSpec]
    reward: FunctionSpec | None
    image_hosts: list[str]
    max_rows: CountOrAll
    val_max_rows: CountOrAll
    keep_rollouts: CountOrAll


class AgentsSection(Section):
    """The section `agents:`, the limits of an agent's episode."""

    max_calls: Count
    max_tokens: Annotated[int | None, count(null="max_rows times data.max_response_length")]
    max_rows: Count
    timeout_s: Seconds
    on_rewrite: Annotated[Literal["fork", "fail"], choose_from("fork", "fail")]
    branches: Annotated[Literal["all", "main"], choose_from("all", "main")]
    ignore_tool_choice: Switch
    exit_code: Annotated[str, choose_from("fail", "verify")]
    concurrency: Annotated[int | None, count(null="as many as the rollout engine runs")]


# --- data and algorithm --------------------------------------------------------------------------


class DataSection(VerlSection):
    """Batch size, lengths and seed of the rows."""

    train_batch_size: Count
    max_prompt_length: Count
    max_response_length: Count
    seed: Seed
    shuffle: Switch
    prompt_key: Text
    apply_chat_template_kwargs: Json


class FilterGroups(VerlSection):
    """The filter of DAPO, which replaces groups without a signal."""

    enable: Switch
    metric: Text
    max_num_gen_batches: CountOrZero


class RolloutCorrection(VerlSection):
    """Importance weights and rejection for the difference of sampler and trainer."""

    bypass_mode: Switch
    loss_type: Annotated[str, choose_from("reinforce", "ppo_clip")]
    rollout_is: Annotated[str | None, choose_from(None, "token", "sequence")]
    rollout_is_threshold: str | float | None
    rollout_rs: str | None
    rollout_rs_threshold: str | float | None


class KlControl(VerlSection):
    """The coefficient of the KL penalty in the reward."""

    type: Annotated[str, choose_from("fixed", "adaptive")]
    kl_coef: NotNegative


class AlgorithmSection(VerlSection):
    """The advantage, KL terms and corrections."""

    adv_estimator: Text
    gamma: Fraction
    lam: Fraction
    norm_adv_by_std_in_grpo: Switch
    use_kl_in_reward: Switch
    kl_penalty: KlType
    kl_ctrl: KlControl
    rollout_correction: RolloutCorrection
    filter_groups: FilterGroups
    recompute_old_log_probs: Switch
    gdpo_reward_keys: list[str] | None = None
    gdpo_reward_weights: list[float] | None = None


# --- models and engines --------------------------------------------------------------------------


class Lora(VerlSection):
    """Further settings of LoRA."""

    merge: Switch


class ModelSection(VerlSection):
    """A model: its folder, and how it is loaded and adapted."""

    path: str | None  # checks.py: each model that is used is set
    trust_remote_code: Switch
    external_lib: str | None
    custom_chat_template: str | None
    override_config: Json
    enable_gradient_checkpointing: Switch
    use_remove_padding: Switch
    use_fused_kernels: Switch
    lora_rank: CountOrZero
    lora_alpha: Positive
    target_modules: Names | None
    exclude_modules: Names | None


class PolicyModel(ModelSection):
    """The policy's model."""

    path: Text
    lora_adapter_path: str | None
    lora: Lora


class Optimizer(VerlSection):
    """The optimizer of a model and its learning rate."""

    lr: NotNegative
    lr_warmup_steps: Annotated[int, by(Number(0, is_whole=True, words={-1: "the ratio decides"}))]
    lr_warmup_steps_ratio: Fraction
    min_lr_ratio: Annotated[float | None, by(Number(0, 1, words={None: "0"}))] = None
    clip_grad: Positive
    weight_decay: NotNegative
    betas: list[float]
    override_optimizer_config: Json | None = None
    total_training_steps: int = -1
    # Megatron has none of these
    lr_scheduler_type: str = "constant"
    warmup_style: str | None = None
    num_cycles: NotNegative = 0.5
    zero_indexed_step: Switch = True


class WrapPolicy(VerlSection):
    """Which modules FSDP shards."""

    transformer_layer_cls_to_wrap: list[str] | None = None


class MixedPrecision(VerlSection):
    """The types in which FSDP computes."""

    param_dtype: str | None = None


class FsdpEngine(VerlSection):
    """verl's FSDP engine for one model."""

    fsdp_size: Annotated[int, count(minus_one="all GPUs")]
    model_dtype: Precision
    param_offload: Switch
    optimizer_offload: Switch
    offload_policy: Switch
    reshard_after_forward: Switch
    use_no_sync_for_gradient_accumulation: Switch
    mixed_precision: MixedPrecision | None = None
    wrap_policy: WrapPolicy | None = None


class CheckpointContents(VerlSection):
    """What a checkpoint has, and what a resumed run loads."""

    save_contents: list[str]
    load_contents: list[str]


class PolicyLoss(VerlSection):
    """The policy loss."""

    loss_mode: Text
    clip_cov_ratio: Fraction
    kl_cov_ratio: Fraction
    clip_cov_lb: Finite
    clip_cov_ub: Finite
    dro_beta: Annotated[float | None, by(Number(0, excludes_low=True, words={None: "not set"}))]
    rollout_correction: Json | None = None


class TrainedModel(VerlSection):
    """The training of a model: batches, optimizer, engine, checkpoints. Rows are prompts."""

    strategy: str
    ppo_mini_batch_size: Count
    ppo_epochs: Count
    use_dynamic_bsz: Switch
    ppo_micro_batch_size_per_gpu: CountOrNull
    ppo_max_token_len_per_gpu: Count
    loss_scale_factor: Annotated[
        float | None, by(Number(0, excludes_low=True, words={None: "the longest response"}))
    ]
    shuffle: Switch
    data_loader_seed: Seed
    optim: Optimizer
    checkpoint: CheckpointContents
    megatron: Json | None = None


class ActorSection(TrainedModel):
    """actor_rollout_ref.actor."""

    clip_ratio_c: Annotated[float, by(Number(1, excludes_low=True))]
    loss_agg_mode: Text
    policy_loss: PolicyLoss
    entropy_coeff: Finite
    calculate_entropy: Switch
    use_kl_loss: Switch
    kl_loss_coef: NotNegative
    kl_loss_type: KlType
    ulysses_sequence_parallel_size: Count = 1
    fsdp_config: FsdpEngine | None = None  # without it, Megatron trains


class CriticModel(ModelSection):
    """The critic's model."""


class CriticSection(TrainedModel):
    """critic."""

    ppo_micro_batch_size_per_gpu: CountOrNull = None
    model: CriticModel
    fsdp: FsdpEngine | None = None


class ReferenceSection(VerlSection):
    """actor_rollout_ref.ref."""

    log_prob_max_token_len_per_gpu: Count
    fsdp_config: FsdpEngine | None = None


class Sampling(VerlSection):
    """How responses are sampled."""

    n: Count
    temperature: Temperature
    top_k: Annotated[int, count(minus_one="off")]
    top_p: Share
    do_sample: Switch


class Turns(VerlSection):
    """The turns of an episode."""

    format: Text
    max_assistant_turns: Annotated[int | None, count(null="as many as fit")]
    max_tool_response_length: Count


class WeightSync(VerlSection):
    """How new weights reach the rollout engine."""

    backend: Text
    update_weights_bucket_megabytes: Count
    custom_backend_module: str | None = None


class Prometheus(VerlSection):
    """Metrics for Prometheus."""

    enable: Switch
    port: Port
    file: Text


class Agent(VerlSection):
    """Processes that run episodes."""

    num_workers: CountOrZero


class RolloutSection(Sampling):
    """actor_rollout_ref.rollout."""

    name: Text
    dtype: Text
    seed: Seed
    full_determinism: Switch
    repetition_penalty: Positive = 1.0
    nnodes: CountOrZero
    n_gpus_per_node: Count
    tensor_model_parallel_size: Count
    data_parallel_size: Count
    gpu_memory_utilization: Share
    max_model_len: Annotated[int | None, count(null="the longest episode")]
    max_num_seqs: Count
    free_cache_engine: Switch
    enforce_eager: Switch
    load_format: Text
    quantization: str | None
    disable_log_stats: Switch
    log_prob_micro_batch_size_per_gpu: CountOrNull
    log_prob_max_token_len_per_gpu: Count
    cudagraph_capture_sizes: list[int] | None
    limit_images: int | None = None
    engine_kwargs: dict[str, Json]
    val_kwargs: Sampling
    multi_turn: Turns
    checkpoint_engine: WeightSync
    prometheus: Prometheus
    agent: Agent


class PolicySection(VerlSection):
    """actor_rollout_ref: the policy's model, training, reference and rollout engine."""

    model: PolicyModel
    actor: ActorSection
    ref: ReferenceSection
    rollout: RolloutSection
    nccl_timeout: Count


class RewardModel(VerlSection):
    """A model that scores responses."""

    enable: Switch
    model_path: str | None


class RewardSection(VerlSection):
    """reward."""

    reward_model: RewardModel


class TeacherModel(VerlSection):
    """The teacher, which replaces the reference."""

    model_path: str | None


class TeacherModels(VerlSection):
    """distillation.teacher_models."""

    teacher_model: TeacherModel


class Distillation(VerlSection):
    """distillation."""

    enabled: Switch
    teacher_models: TeacherModels


# --- the run -------------------------------------------------------------------------------------


class ResourcePools(Section):
    """GPUs per node for one role, in addition to trainer.n_gpus_per_node."""

    critic: PoolSize
    ref: PoolSize
    reward_model: PoolSize

    def sizes(self) -> dict[str, int]:
        """Return {role: GPUs per node} of the roles with separate GPUs."""
        return {role: count for role, count in self.model_dump().items() if count}


class TrainerSection(VerlSection):
    """Steps, checkpoints and GPUs."""

    project_name: Text
    experiment_name: Text
    default_local_dir: Text
    logger: Annotated[list[str], BeforeValidator(listed)]
    device: Text
    nnodes: Count
    n_gpus_per_node: Count
    resource_pools: ResourcePools
    critic_warmup: CountOrZero
    total_epochs: Count
    total_training_steps: Annotated[int | None, count(null="train for trainer.total_epochs")]
    save_freq: Annotated[int, count(minus_one="only after the last step")]
    test_freq: Annotated[int, count(minus_one="only before and after training")]
    val_before_train: Switch
    resume_mode: Annotated[str, choose_from("auto", "disable", "resume_path")]
    resume_from_path: str | None
    max_actor_ckpt_to_keep: CountOrAll
    log_val_generations: CountOrZero
    ray_wait_register_center_timeout: Count
    one_step_off: Annotated[int, by(Number(0, 1, is_whole=True))]
    print_samples_every: CountOrZero
    stage_timeout_s: Seconds
    allow_memory_over_estimate: Switch
    replay_min_ess: Fraction


class RayKwargs(VerlSection):
    """ray_kwargs."""

    ray_init: Json


class Values(VerlSection):
    """All values of a recipe that the kit reads."""

    gym: GymSection
    env: EnvSection
    agents: AgentsSection
    data: DataSection
    algorithm: AlgorithmSection
    actor_rollout_ref: PolicySection
    critic: CriticSection
    reward: RewardSection
    distillation: Distillation
    trainer: TrainerSection
    ray_kwargs: RayKwargs
    model_engine: str


# --- problems, and the kind of a key -------------------------------------------------------------


def find_problems(values: Json) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for each invalid value of a recipe.

    For an item of a list, it is the key of the list. values: resolved.
    """
    try:
        Values.model_validate(values)
    except ValidationError as error:
        problems = error.errors()
    else:
        return
    seen = set()
    for problem in problems:
        location = itertools.takewhile(lambda part: isinstance(part, str), problem["loc"])
        key = ".".join(trim(list(map(str, location))))
        if key in seen:  # the other types of a union
            continue
        seen.add(key)
        if problem["type"] == "extra_forbidden":
            names = (*Server.model_fields, *ServerStart.model_fields)  # others are known here
            similar = difflib.get_close_matches(key.rpartition(".")[2], names, n=1)
            hint = f"Did you mean {similar[0]}?" if similar else "Remove it."
            yield key, f"unknown key {key}. {hint}"
        else:
            reason = f"is invalid: {problem['msg']}. Change it."
            if problem["type"] == "value_error":
                reason = str(problem["ctx"]["error"])
            yield key, f"{key}={show(problem['input'])} {reason}"


def trim(parts: list[str]) -> list[str]:
    """Return a location without the name of the type of a union, which pydantic adds."""
    return parts[:-1] if (parts[-1:] and "[" in parts[-1]) or parts[-1:] == ["str"] else parts


def list_types(key: str) -> set[object]:
    """Return the types that the value of a key may have; none if it has no type here.

    A union has several, and a mapping or a list has its class.
    """
    current: set[Any] = {Values}
    for name in key.split("."):
        found: set[Any] = set()
        for kind in current:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                field = kind.model_fields.get(name)
                found |= unpack(field.annotation) if field else set()
            elif typing.get_origin(kind) is dict:
                found |= unpack(typing.get_args(kind)[1])
        current = found - {Any}
    return {typing.get_origin(kind) or kind for kind in current}


def unpack(annotation: Any) -> set[Any]:  # a type, as typing has it
    """Return the members of a union, without the annotations."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return unpack(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return set().union(*map(unpack, typing.get_args(annotation)))
    if origin is Literal:
        return {type(value) for value in typing.get_args(annotation)}
    return {annotation}
