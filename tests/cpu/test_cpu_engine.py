"""Attention, micro-batches and sampling on a CPU agree with torch and verl.

test_verl_engine.py compares log-probs and entropies.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding

import training
from kit.cpu import platform, vllm_patches
from tests.helpers.workers import make_episode

# {case: groups}; a group is (length of the prompt, lengths of its responses)
GROUPS = {
    "ragged": [(5, [1, 7, 3]), (60, [64, 65]), (1, [2])],
    "no response": [(4, [0, 3, 0]), (2, [0])],
    "long": [(30, [2000, 1, 500]), (600, [90])],
    "many": [(20, [40] * 70)],
}


def make_ids(groups):
    """Make the token ids (nested [B, t]) and the prompt lengths [B] of groups."""
    rows = []
    lengths = []
    for prompt_id, (size, responses) in enumerate(groups, 10):
        for row, length in enumerate(responses):
            rows.append(torch.tensor([prompt_id] * size + [100 + row] * length))
            lengths.append(size)
    return torch.nested.nested_tensor(rows, layout=torch.jagged), torch.tensor(lengths)


def compute_reference_attention(tensors, layout, offsets, scaling, window):
    """Compute the attention of each prompt with its response separately, [T, H, D]."""
    outputs = []
    for begin, end in itertools.pairwise(offsets):
        q, k, v = (x[0][:, layout.packed_positions[begin:end]] for x in tensors)  # [heads, t, D]
        repeats = len(q) // len(k)
        k = k.repeat_interleave(repeats, dim=0)
        v = v.repeat_interleave(repeats, dim=0)
        ones = torch.ones(len(q[0]), len(q[0]), dtype=torch.bool)  # a row for each query
        is_hidden = ones.triu(1) | ones.tril(-window)
        scores = (q @ k.mT * scaling).masked_fill(is_hidden, -torch.inf)
        outputs.append((F.softmax(scores, dim=-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [5, 5000])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_attention_on_grids_is_that_of_each_sequence_alone(groups, window, monkeypatch):
    """The grid holds each prompt once. The outputs and the gradients are compared in fp32.

    The window is shorter than most rows, or longer. Values are less wide than keys.
    """
    from kit.cpu import cpu_engine

    torch.manual_seed(0)
    H = 4
    H_kv = 2
    D = 8
    ids, prompts = make_ids(groups)
    layout = cpu_engine.lay_out(ids, prompts)
    size = len(layout.gather_index)
    assert size == sum(prompt + sum(responses) for prompt, responses in groups)  # each prompt once
    assert torch.equal(ids.values()[layout.gather_index][layout.packed_positions], ids.values())
    monkeypatch.setattr(cpu_engine, "_layout", layout)
    shapes = [(H, D), (H_kv, D), (H_kv, D - 2)]
    tensors = [torch.randn(1, heads, size, d, requires_grad=True) for heads, d in shapes]
    weight = torch.randn(len(layout.packed_positions), H, D - 2)
    options = {"scaling": 0.3, "sliding_window": window}
    output = cpu_engine.grid_attention(None, *tensors, None, **options)[0][0]
    output = output[layout.packed_positions]  # [T, H, D]
    expected = compute_reference_attention(tensors, layout, ids.offsets(), 0.3, window)
    torch.testing.assert_close(output, expected)
    gradients = torch.autograd.grad((output * weight).sum(), tensors)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), tensors)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-4)


def test_attention_refuses_unsupported_options(monkeypatch):
    from kit.cpu import cpu_engine

    tensors = [torch.zeros(1, 2, 4, 8)] * 3
    with pytest.raises(ValueError, match="use_remove_padding"):
        cpu_engine.grid_attention(None, *tensors, None)
    ids, prompts = make_ids([(2, [2])])
    monkeypatch.setattr(cpu_engine, "_layout", cpu_engine.lay_out(ids, prompts))
    with pytest.raises(NotImplementedError, match="softcap"):
        cpu_engine.grid_attention(None, *tensors, None, softcap=50.0)
    # only the mask, which is not computed, would limit such a layer
    kinds = ["full_attention", "sliding_attention"]
    config = SimpleNamespace(layer_types=kinds, sliding_window=3)
    full, sliding = (SimpleNamespace(config=config, layer_idx=i) for i in range(2))
    cpu_engine.grid_attention(full, *tensors, None)
    cpu_engine.grid_attention(sliding, *tensors, None, sliding_window=3)
    with pytest.raises(NotImplementedError, match="sliding_attention"):
        cpu_engine.grid_attention(sliding, *tensors, None)


def test_micro_batches_keep_responses_to_a_prompt_together(monkeypatch):
    """This holds for any order of the rows. The token count of a batch has each prompt once."""
    from kit.cpu import cpu_engine

    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    episodes = []
    for group in range(4):
        for member in range(4):
            response = [7 + member] * (1 + 3 * member)
            episodes.append(make_episode([5 + group] * 6, response, turns=[]))
    micro_batches = []  # for each order
    for order in (episodes, episodes[::-1], episodes[1::2] + episodes[::2]):
        data = left_right_2_no_padding(training.build_batch(order, 0, 1.0).to_tensordict())
        tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=60)
        parts, indices = cpu_engine.prepare_micro_batches(data)
        assert sorted(itertools.chain(*indices)) == list(range(16))
        # Prompts have 4 x 6 tokens, responses 4 x 22: two batches of 60. If each response counted
        # with its prompt, there would be 4 x 46 tokens, which need four.
        assert len(parts) == 2
        token_ids = []
        for part in parts:
            token_ids.append([row.tolist() for row in part["input_ids"].unbind()])
        micro_batches.append(token_ids)
        prompts = []
        for part in indices:
            prompts.append({tuple(order[index].prompt_ids) for index in part})
        assert [len(part) for part in prompts] == [2, 2]
    assert micro_batches[0] == micro_batches[1] == micro_batches[2]


def test_gradients_of_tokens_that_share_a_row_are_equal_bit_for_bit():
    """Without `add_in_one_order`, up to a fifth of them differ if the machine is busy."""
    index = torch.cat(
        [torch.tensor([(i + 4) // 8, *range(9 * i + 80, 9 * i + 88)]) for i in range(64)]
    )
    hidden = torch.randn(1, 700, 64, requires_grad=True)
    upstream = torch.randn(1, len(index), 64)

    def compute_gradient():
        (gradient,) = torch.autograd.grad(hidden[:, index], hidden, upstream)
        return gradient

    threads = torch.get_num_threads()
    torch.set_num_threads(4)  # 4 threads on two cores wait for each other
    platform.add_in_one_order()
    try:
        first = compute_gradient()
        assert all(torch.equal(first, compute_gradient()) for _ in range(300))
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


def test_tokens_are_drawn_with_their_probabilities():
    torch.manual_seed(0)
    probs = torch.tensor([[0.5, 0.0, 0.3, 1e-4, 0.2, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]])
    probs[0] /= probs[0].sum()
    n = 100_000
    drawn = vllm_patches.sample_tokens(probs.log().repeat(n, 1)).view(n, 2)
    frequencies = torch.stack([row.bincount(minlength=6) for row in drawn.T]) / n
    bound = 4 * (probs * (1 - probs) / n).sqrt()  # four standard errors; 0 for a probability of 0
    assert torch.all((frequencies - probs).abs() <= bound), frequencies
    # For logits that are not finite, the engine returns any token, and the step reports them.
    tokens = vllm_patches.sample_tokens(torch.full((3, 6), torch.nan))
    assert torch.all((tokens >= 0) & (tokens < 6))
    values = probs.log().gather(1, torch.tensor([[4], [5]]))
    assert vllm_patches.count_at_least(probs.log(), values).tolist() == [3, 1]
