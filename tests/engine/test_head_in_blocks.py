"""Log-probs, entropies and gradients from blocks of the head are those from all logits.

On a GPU, verl's engine calls the same function on packed rows. Its workers run here, on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from verl.models.transformers.dense_common import forward_with_torch_backend
from verl.utils.experimental import torch_functional

from kit.engine import head_in_blocks
from kit.engine.worker_patches import monkey_patch_training_worker
from kit.recipe.fused_head import PLAIN_HEADS, find_head_obstacle
from tests.helpers.architectures import VARIABLES, make_architecture, shrink
from tests.helpers.engine_steps import compare_steps, load_recipe, run_actor

TOKENS, VOCABULARY, WIDTH = 90, 331, 24
ROUNDING = 1e-5


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Split the tokens into 5 blocks, and the vocabulary into at least 4."""
    monkeypatch.setattr(head_in_blocks, "BLOCK_SIZE", 19 * VOCABULARY)


def compute_from_logits(hidden, weight, labels, temperature):
    """Compute log-probs and entropies [1, T] in float64."""
    logits = hidden.double() @ weight.double().t() / temperature
    log_probs = logits.log_softmax(-1)  # [1, T, V]
    chosen = log_probs.gather(-1, labels[..., None])[..., 0]
    return chosen, -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("used", ["both", "log_probs", "entropy"])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_numbers_are_those_of_log_softmax(temperature, used, is_frozen):
    torch.manual_seed(0)
    hidden = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    weight = (torch.randn(VOCABULARY, WIDTH) / 2).requires_grad_(not is_frozen)
    labels = torch.randint(0, VOCABULARY, (1, TOKENS))
    scales = torch.randn(2, 1, TOKENS)
    scales[:, :, :40] = 0  # a prompt has no gradient
    inputs = [hidden] if is_frozen else [hidden, weight]

    def compute(function, *arguments):
        outputs = function(hidden, weight, labels, temperature, *arguments)
        losses = dict(zip(("log_probs", "entropy"), outputs, strict=True))
        terms = [
            (losses[name] * scale).sum()
            for name, scale in zip(losses, scales, strict=True)
            if used in ("both", name)
        ]
        return [*outputs, *torch.autograd.grad(sum(terms), inputs)]

    found = compute(head_in_blocks.HeadInBlocks.apply, 512)
    expected = compute(compute_from_logits)
    assert len(found) == 2 + len(inputs)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b.float(), rtol=ROUNDING, atol=ROUNDING)
    assert not found[2][:, :40].any()


def test_bfloat16_has_one_rounding_of_the_heads_gradient():
    """Its error stays that of one product, whatever the number of blocks."""
    torch.manual_seed(0)
    hidden = torch.randn(1, TOKENS, WIDTH).bfloat16()
    labels = torch.randint(0, 5, (1, TOKENS))  # so that many tokens add to the same rows
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(1)
        weight = (torch.randn(VOCABULARY, WIDTH) / 2).bfloat16().to(dtype).requires_grad_()
        log_probs, entropy = head_in_blocks.HeadInBlocks.apply(hidden, weight, labels, 1.0, 512)
        assert log_probs.dtype == entropy.dtype == torch.float32
        (gradient,) = torch.autograd.grad(log_probs.sum(), weight)
        assert gradient.dtype == dtype
        gradients.append(gradient[:5].float())
    error = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    assert error < 2 * torch.finfo(torch.bfloat16).eps, error


# --- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PLAIN_HEADS)
def test_a_plain_head_gives_the_log_probs_and_gradients_of_all_logits(kind, monkeypatch):
    monkeypatch.setattr(torch_functional, "FusedLinearForPPOFunction", head_in_blocks.HeadInBlocks)
    torch.manual_seed(0)
    config = shrink(kind)
    assert find_head_obstacle(config) == ""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for weight in model.parameters():
        weight.data += 0.05 * torch.randn_like(weight)  # none is 0 or 1
    ids = torch.randint(4, config.vocab_size, (1, 20))
    logits = model(ids).logits / 0.7
    log_probs = logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    output = forward_with_torch_backend(model, ids, return_dict=True, temperature=0.7)
    found = output.log_probs[0, :-1]
    torch.testing.assert_close(found, log_probs, rtol=ROUNDING, atol=ROUNDING)
    parameters = dict(model.named_parameters())
    gradients = [
        torch.autograd.grad(values.sum(), parameters.values(), allow_unused=True)
        for values in (found, log_probs)
    ]
    for name, a, b in zip(parameters, *gradients, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert float((a - b).norm()) <= ROUNDING * float(b.norm()), name


# --- verl's workers ------------------------------------------------------------------------------

LORA = [
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.rollout.load_format=auto",
]
# {case: (architecture, changes)}
CASES = {
    "tied": ("gemma", []),
    "untied": ("llama", []),  # FSDP2 would not gather the weights of its head
    "lora": ("qwen3", LORA),
}


def compare_cases(_: int, workspace: Path) -> None:
    """Run a step of each case in both ways, as a GPU does: packed. Runs in its own process."""
    torch.set_num_threads(1)
    store = torch.distributed.HashStore()
    # torch's own function: the one of kit/cpu/platform.py imports cpu_engine.py
    torch.distributed.distributed_c10d.init_process_group("gloo", store=store, rank=0, world_size=1)
    head_in_blocks.BLOCK_SIZE = 700
    monkey_patch_training_worker()
    sdpa = "actor_rollout_ref.model.override_config.attn_implementation=sdpa"
    for name, (kind, changes) in CASES.items():
        print(name, flush=True)
        make_architecture(kind, workspace / "heads" / name)
        recipe = load_recipe(workspace, "grpo", [sdpa, *changes], f"heads/{name}")
        expected = run_actor(recipe)
        calls = count_calls()
        found = run_actor(recipe, is_fused=True)
        assert calls, "the model's forward pass was not replaced"
        assert set(found.outputs) == {"log_probs", "entropy"}
        compare_steps(found, expected)


def count_calls() -> list[torch.Size]:
    """Return a list that gets the shape of the hidden states of each call."""
    calls: list[torch.Size] = []
    function = head_in_blocks.HeadInBlocks

    class Counted:
        @staticmethod
        def apply(hidden: torch.Tensor, *arguments: object) -> object:
            calls.append(hidden.shape)
            return function.apply(hidden, *arguments)

    counted: Any = Counted
    torch_functional.FusedLinearForPPOFunction = counted  # type: ignore[misc]
    return calls


@pytest.mark.timeout(600)  # a new process imports verl, and makes six workers
def test_verls_workers_compute_the_same_step_from_blocks(workspace, monkeypatch):
    """Log-probs, entropies, the loss with an entropy term, and all gradients of two updates."""
    for name, value in (VARIABLES | {"VERL_ENGINE_DEVICE": "cuda"}).items():
        monkeypatch.setenv(name, value)
    torch.multiprocessing.spawn(compare_cases, (workspace,))
