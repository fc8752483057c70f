"""Attention, log-probs and value models without flash-attn agree with torch's and transformers'.

torch's kernel for packed sequences needs a GPU. On a CPU a double computes each sequence alone.
"""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.attention.varlen as torch_varlen
import torch.nn.functional as F
import verl.utils.torch_functional as verl_F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)
from verl.utils.model import load_valuehead_model

from extras import without_flash_attn as substitute

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "attention_dropout": 0.0,
}
# {case: configuration of a model}
MODELS = {
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16),
    "llama, no shared heads": LlamaConfig(**SIZES, num_key_value_heads=4),
}
LENGTHS = [5, 1, 9, 2, 1, 12]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors are tiny here, and threads would wait for each other."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture
def attend(monkeypatch):
    """Replace torch's kernel by torch's sdpa on each sequence."""
    calls = []

    def attend_to_each(q, k, v, packing, scale):
        calls.append((q.shape, packing))
        outputs = []
        for begin, end in itertools.pairwise(packing.offsets.tolist()):
            assert end - begin <= packing.max_length
            rows = [x[begin:end].transpose(0, 1) for x in (q, k, v)]
            output = F.scaled_dot_product_attention(*rows, is_causal=True, scale=scale)
            outputs.append(output.transpose(0, 1))
        return torch.cat(outputs)

    monkeypatch.setattr(substitute, "attend", attend_to_each)
    return calls


def make_rows(lengths):
    """Make token ids and positions [1, T] of packed sequences."""
    ids = torch.randint(0, SIZES["vocab_size"], (1, sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return ids, positions[None]


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


# --- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "is_checkpointed"), [*((case, False) for case in MODELS), ("qwen2", True)]
)
def test_a_packed_row_gives_what_each_sequence_gives_alone(attend, case, is_checkpointed):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        MODELS[case], attn_implementation="eager", dtype=torch.float32
    ).train()
    ids, positions = make_rows(LENGTHS)
    weights = torch.randn(ids.shape[1], SIZES["vocab_size"])
    alone = torch.cat([model(row, use_cache=False).logits[0] for row in ids.split(LENGTHS, 1)])
    (alone * weights).sum().backward()
    expected = gradients(model)

    model.zero_grad()
    model.set_attn_implementation(substitute.NAME)
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    packed = model(ids, position_ids=positions, use_cache=False).logits[0]
    (packed * weights).sum().backward()

    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    layers = SIZES["num_hidden_layers"]
    assert len(attend) == layers * (1 + is_checkpointed)
    # the sequences are found once for all layers
    assert len({id(packing) for _, packing in attend}) == 1


def make_inputs(rows=1, tokens=6, width=8, value_width=8):
    """Make query [B, 4, T, D], key and value [B, 2, T, D], and positions [B, T]."""
    query = torch.randn(rows, 4, tokens, width)
    key = torch.randn(rows, 2, tokens, width)
    value = torch.randn(rows, 2, tokens, value_width)
    positions = torch.arange(tokens).repeat(rows, 1)
    return query, key, value, positions


def call_attention(query, key, value, positions, **options):
    module = SimpleNamespace(is_causal=True, config=None)
    return substitute.varlen_attention(
        module, query.bfloat16(), key, value, None, position_ids=positions, **options
    )


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        ({"softcap": 50.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"dropout": 0.1}, "dropout"),
        ({"sliding_window": 5}, "a sliding window of 5 tokens"),
    ],
)
def test_features_that_are_missing_are_refused(attend, options, feature):
    with pytest.raises(NotImplementedError, match=f"does not support {feature}"):
        call_attention(*make_inputs(), **options)
    with pytest.raises(NotImplementedError, match="values that are not as wide as keys"):
        call_attention(*make_inputs(value_width=4))
    assert not attend


def test_a_vision_tower_uses_sdpa(attend):
    """Its attention is not causal, and its batch is not packed."""
    query, key, value, _ = make_inputs(rows=3)
    module = SimpleNamespace(is_causal=False, num_key_value_groups=2)
    output, _ = substitute.varlen_attention(module, query, key, value, None, scaling=0.5)
    expected = F.scaled_dot_product_attention(query, key, value, scale=0.5, enable_gqa=True)
    torch.testing.assert_close(output, expected.transpose(1, 2))
    assert not attend


def test_torchs_kernel_gets_causal_sequences_in_half_precision(monkeypatch):
    """The arguments fit the installed torch's function. That of torch 2.11 has no `enable_gqa`."""
    signature = inspect.signature(torch_varlen.varlen_attn)
    calls = []

    def record(*args, **kwargs):
        calls.append(signature.bind(*args, **kwargs).arguments)
        return args[0]

    monkeypatch.setattr(torch_varlen, "varlen_attn", record)
    query, key, value, _ = make_inputs()
    positions = torch.tensor([[0, 1, 0, 1, 2, 0]])
    output, _ = call_attention(query, key, value, positions, scaling=0.25)
    (call,) = calls
    assert torch.equal(output[0], query[0].transpose(0, 1).bfloat16())
    expected = key[0].transpose(0, 1).bfloat16().repeat_interleave(2, dim=1)
    assert torch.equal(call["key"], expected) and call["key"].is_contiguous()
    assert call["value"].shape == (6, 4, 8) and call["value"].is_contiguous()
    assert call["cu_seq_q"].tolist() == call["cu_seq_k"].tolist() == [0, 2, 5, 6]
    assert call["max_q"] == call["max_k"] == 3
    assert call["scale"] == 0.25 and call["window_size"] == (-1, 0)
    packing = substitute.find_sequences(positions)
    with pytest.raises(NotImplementedError, match=r"has no float32\. Set override_config"):
        substitute.attend(query[0], key[0], value[0], packing, None)


class RecordsStrictness(torch.autograd.Function):
    """Stands in for torch's kernel, and records whether its backward pass may only warn."""

    seen: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx, query, *_, **__):
        return query * 1.0

    @staticmethod
    def backward(ctx, gradient):
        RecordsStrictness.seen.append(torch.is_deterministic_algorithms_warn_only_enabled())
        return gradient, *[None] * 6


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_the_backward_pass_is_deterministic_if_verl_asks_for_it(monkeypatch, is_deterministic):
    monkeypatch.setattr(torch_varlen, "varlen_attn", lambda *a, **_: RecordsStrictness.apply(*a))
    query, key, value, _ = make_inputs()
    query.requires_grad_()
    positions = torch.tensor([[0, 1, 0, 1, 2, 0]])
    torch.use_deterministic_algorithms(is_deterministic, warn_only=True)  # as verl does
    RecordsStrictness.seen.clear()
    try:
        call_attention(query, key, value, positions)[0].sum().backward()
        assert RecordsStrictness.seen == [not is_deterministic]
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


# --- log-probs -----------------------------------------------------------------------------------


@given(
    count=st.integers(0, 40),
    size=st.integers(1, 30),
    block=st.integers(1, 200),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    is_inplace=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=100, deadline=None)
def test_log_probs_and_gradients_are_those_of_log_softmax(
    count, size, block, dtype, is_inplace, seed
):
    torch.manual_seed(seed)
    logits = (torch.randn(count, size) * 5).to(dtype).requires_grad_()
    labels = torch.randint(0, size, (count,))
    weights = torch.randn(count)
    expected = logits.float().log_softmax(-1).gather(1, labels[:, None])[:, 0]
    (expected * weights).sum().backward()
    inputs = logits.detach().clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(substitute, "MAX_BLOCK_SIZE", block)
        log_probs = substitute.logprobs_from_logits_flash_attn(inputs, labels, is_inplace)
        (gradient,) = torch.autograd.grad((log_probs * weights).sum(), inputs)
    assert log_probs.dtype == torch.float32 and gradient.dtype == dtype
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)
    rtol = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(gradient, logits.grad, rtol=rtol, atol=1e-5)
    if count:
        assert (gradient.data_ptr() == inputs.data_ptr()) == is_inplace
    if not is_inplace:
        assert torch.equal(inputs, logits)


class SizeRecorder(TorchDispatchMode):
    """Record the size of the largest fp32 tensor that an operation creates."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and output.dtype == torch.float32:
            self.largest = max(self.largest, output.numel())
        return output


@pytest.mark.parametrize("is_inplace", [False, True])
def test_the_logits_are_never_copied_to_fp32_together(monkeypatch, is_inplace):
    monkeypatch.setattr(substitute, "MAX_BLOCK_SIZE", 100)
    logits = torch.randn(64, 20).bfloat16().requires_grad_()
    labels = torch.randint(0, 20, (64,))
    with SizeRecorder() as recorder:
        substitute.logprobs_from_logits_flash_attn(logits, labels, is_inplace).sum().backward()
    assert 64 <= recorder.largest <= 100


@pytest.fixture
def patched(monkeypatch):
    """Apply the patches of the module. They are undone after the test."""
    for name in (
        "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE",
        "logprobs_from_logits_flash_attn",
        "logprobs_from_logits_v2",
    ):
        monkeypatch.setattr(verl_F, name, getattr(verl_F, name))
    # without the patch of kit/cpu
    monkeypatch.delattr(AutoModelForTokenClassification, "from_pretrained", raising=False)
    substitute.monkey_patch_log_probs()
    substitute.monkey_patch_value_models()


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("shape", [(7,), (2, 3)])
def test_verls_log_probs_are_computed_in_blocks(patched, monkeypatch, shape, is_deterministic):
    monkeypatch.setenv("VERL_DISABLE_FLASH_ATTN_CE", str(int(is_deterministic)))
    logits = torch.randn(*shape, 11).bfloat16().requires_grad_()
    labels = torch.randint(0, 11, shape)
    log_probs = verl_F.logprobs_from_logits(logits, labels)
    assert "LogProbsInBlocks" in str(log_probs.grad_fn) + str(log_probs.grad_fn.next_functions)
    expected = logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(log_probs, expected)


# --- value models --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["qwen2", "qwen3"])
def test_a_critic_is_loaded_with_the_attention_of_its_config(patched, attend, case, tmp_path):
    torch.manual_seed(0)
    config = MODELS[case]
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    values = {}
    ids, positions = make_rows(LENGTHS)
    for name in (substitute.NAME, "sdpa"):
        config = type(config).from_pretrained(
            tmp_path, attn_implementation=name, num_labels=1, classifier_dropout=0.0
        )
        torch.manual_seed(1)  # of the value head
        model = load_valuehead_model(str(tmp_path), torch.float32, config, False)
        assert model.config._attn_implementation == name
        values[name] = model(ids, position_ids=positions, use_cache=False).logits
    assert len(attend) == SIZES["num_hidden_layers"]
    torch.testing.assert_close(values[substitute.NAME], values["sdpa"], rtol=1e-4, atol=1e-5)
