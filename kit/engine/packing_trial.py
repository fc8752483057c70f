"""Try a loaded model: may its rows be packed, or must each be computed by itself?

verl packs the rows of a micro-batch one behind another, and a CPU's engine moves the prompts that
rows share. Attention keeps such rows apart. A recurrence or a convolution takes its state from the
tokens before, which belong to another row. No configuration says what layers do. So each model
computes a few short rows with its engine, before the first step:

    neighbors   packed, twice, with other tokens in the other rows. The shapes are the same, and so
                the kernels are. If the log-probs of a row differ, it depends on its neighbors
    reference   each row by itself, with transformers' eager attention, which has the features of
                every model. Other kernels may differ from it by rounding only

If packed rows fail, each row becomes a micro-batch, with the first attention that agrees.

Protects: log-probs and weights, from layers that mix the rows of a batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import verl.workers.engine.fsdp.transformer_impl as fsdp
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding

from kit.errors import RunError
from kit.recipe.model_files import expert_count

Engine = Any  # verl's FSDPEngine, to which verl and this module add attributes
EAGER = "eager"  # attention of transformers that every model has
LENGTHS = ((9, 12), (9, 6), (14, 5), (14, 10))  # of a prompt and its response
# The most that rounding changes log-probs, as the root of the mean square over the tokens.
# The same kernels: 0 in each model without experts, in float32 and in bfloat16.
SAME_KERNELS = 1e-5
# SmolLM2-135M with sdpa against eager: 6e-6 in float32, 0.06 to 0.11 in bfloat16.
OTHER_KERNELS = {True: 1e-4, False: 0.3}  # by whether the engine computes in float32


class Row(NamedTuple):
    """Token ids of a prompt and a response."""

    prompt: list[int]
    response: list[int]


class Way(NamedTuple):
    """A way to compute rows."""

    is_packed: bool
    attention: str  # attn_implementation of transformers


@functools.cache
def monkey_patch_engine() -> None:
    """Have verl's FSDP engines try each model that they load, and load models without heads."""
    engine: Engine = fsdp.FSDPEngineWithLMHead  # the one with values derives from it
    verl_initialize = engine.initialize
    verl_patch = fsdp.apply_monkey_patch

    def initialize(self: Engine) -> None:
        config = self.model_config.hf_config
        try:
            verl_initialize(self)
        except (KeyError, ValueError):  # a model without this attention
            if config._attn_implementation == EAGER or self.ulysses_sequence_parallel_size > 1:
                raise
            config._attn_implementation = EAGER
            verl_initialize(self)
        try_model(self)

    def apply_monkey_patch(model: PreTrainedModel, **options: object) -> None:
        # verl counts heads for sequence parallelism. Mamba and GPT-NeoX have no such key
        is_needed = options["ulysses_sp_size"] != 1 or options["use_fused_kernels"]
        if is_needed or hasattr(model.config.get_text_config(), "num_key_value_heads"):
            verl_patch(model, **options)  # type: ignore[arg-type]

    engine.packing_note = ""
    engine.initialize = initialize
    fsdp.apply_monkey_patch = apply_monkey_patch  # type: ignore[assignment]


def try_model(engine: Engine) -> None:
    """Choose how an engine computes rows. If that is not as configured, set `packing_note`.

    engine: verl's FSDPEngine. Raises RunError if the model cannot compute a row.
    """
    model = find_model(engine)
    attentions = [model.config._attn_implementation]
    if engine.ulysses_sequence_parallel_size == 1:  # only verl's attention splits rows
        attentions = list(dict.fromkeys([*attentions, "sdpa", EAGER]))
    alone = Way(False, EAGER if EAGER in attentions else attentions[0])
    kind = model.config.model_type
    try:
        reference = compute(engine, make_rows(model.config), alone)
    except Exception as error:
        raise RunError(
            f"The trainer cannot compute a row of the model type {kind}: {describe_error(error)}. "
            "Choose another model."
        ) from error
    problems = []
    for way in [Way(True, attentions[0]), *(Way(False, each) for each in attentions)]:
        problem = find_problem(engine, way, reference)
        if not problem:
            break
        problems.append(problem)
    model.set_attn_implementation(way.attention)
    if not way.is_packed:
        settings = engine.engine_config
        settings.use_dynamic_bsz = False
        settings.micro_batch_size_per_gpu = 1
        settings.infer_micro_batch_size_per_gpu = 1
        engine.packing_note = (
            f"computes rows of the model type {kind} one by one ({way.attention} attention). "
            f"Packed, {problems[0]}"
        )


def find_problem(engine: Engine, way: Way, reference: Sequence[torch.Tensor]) -> str:
    """Describe why rows cannot be computed this way, on any rank. Empty if they can."""
    config = find_model(engine).config
    in_float32 = engine._autocast_dtype == torch.float32
    limit = OTHER_KERNELS[in_float32]
    problem = ""
    try:
        outputs = compute(engine, make_rows(config), way)
        if way.is_packed:
            difference = measure_influence(engine, way, outputs)
            # in bfloat16, other tokens may change by rounding which experts a token has
            is_exact = in_float32 or not expert_count(config.get_text_config())
            if not measure(difference) <= (SAME_KERNELS if is_exact else limit):
                problem = "log-probs depend on the neighbors of a row, by up to"
        if not problem:
            difference = subtract(outputs, reference)
            if not measure(difference) <= limit:
                problem = f"log-probs with {way.attention} attention differ by up to"
        problem += f" {float(difference.abs().max()):.2g}" if problem else ""
    except Exception as error:
        problem = describe_error(error)
    problems: list[str] = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(problems, problem)  # ranks must choose the same way
    return next(filter(None, problems), "")


def measure_influence(engine: Engine, way: Way, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Measure how much rows change if the tokens of the other half of the rows do."""
    rows = make_rows(find_model(engine).config)
    half = len(rows) // 2
    # the first tokens stay, so that rows which the engine sorts keep their order
    changed = [Row(*([ids[0], *reversed(ids[1:])] for ids in row)) for row in rows]
    later = compute(engine, [*rows[:half], *changed[half:]], way)
    earlier = compute(engine, [*changed[:half], *rows[half:]], way)
    return subtract([*later[:half], *earlier[half:]], outputs)


def compute(engine: Engine, rows: Sequence[Row], way: Way) -> list[torch.Tensor]:
    """Compute the log-probs of the tokens of each response, or the values before them."""
    model = find_model(engine)
    model.set_attn_implementation(way.attention)
    data = make_data(rows, has_axes=any(hasattr(m, "get_rope_index") for m in model.modules()))
    tu.assign_non_tensor(
        data,
        use_remove_padding=engine.model_config.use_remove_padding,
        use_fused_kernels=engine.engine_config.use_fused_kernels,
        use_dynamic_bsz=way.is_packed,
        max_token_len_per_gpu=data["input_ids"].values().numel(),
        micro_batch_size_per_gpu=1,
        temperature=1.0,
    )
    with engine.eval_mode():
        outputs = engine.infer_batch(data)["model_output"]
    values = outputs["log_probs" if "log_probs" in outputs else "values"].unbind()
    # the output before a token predicts it
    return [v[len(row.prompt) - 1 : -1].float() for row, v in zip(rows, values, strict=True)]


def find_model(engine: Engine) -> PreTrainedModel:
    """Find the model of transformers inside the wrappers of FSDP and LoRA."""
    return next(part for part in engine.module.modules() if isinstance(part, PreTrainedModel))


def make_rows(config: PretrainedConfig) -> list[Row]:
    """Make rows of different tokens, none of which stands for an image, padding or an end."""
    special = [value for key, value in vars(config).items() if key.endswith(("_id", "_index"))]
    ids = [i for i in range(min(config.get_text_config().vocab_size, 999)) if i not in special]

    def draw(first: int, length: int) -> list[int]:
        return [ids[(first + 7 * i * (i + first)) % len(ids)] for i in range(length)]

    return [Row(draw(p, p), draw(p + index, r)) for index, (p, r) in enumerate(LENGTHS)]


def make_data(rows: Sequence[Row], has_axes: bool) -> TensorDict:
    """Make verl's packed batch. has_axes: whether positions also have time, height and width."""
    pad = functools.partial(pad_sequence, batch_first=True, padding_value=-1)
    prompts = pad([torch.tensor(row.prompt) for row in rows], padding_side="left")  # [B, P]
    responses = pad([torch.tensor(row.response) for row in rows])  # [B, R]
    ids = torch.cat([prompts, responses], dim=1)  # [B, P+R]
    mask = (ids >= 0).long()
    positions = mask.cumsum(dim=1).sub(1).clamp(min=0)
    tensors = {
        "prompts": prompts.clamp(min=0),
        "responses": responses.clamp(min=0),
        "input_ids": ids.clamp(min=0),
        "attention_mask": mask,
        "response_mask": mask[:, prompts.shape[1] :],
        "position_ids": positions[:, None].expand(-1, 4, -1) if has_axes else positions,
    }
    return left_right_2_no_padding(TensorDict(tensors, batch_size=len(rows)))


def subtract(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the differences of all tokens."""
    return torch.cat([x - y for x, y in zip(a, b, strict=True)])


def measure(differences: torch.Tensor) -> float:
    """Return the root of the mean square. It is NaN if a difference is NaN."""
    return float(differences.square().mean().sqrt())


def describe_error(error: Exception) -> str:
    """Return the first line of an exception."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
