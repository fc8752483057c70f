"""Batches and their order, on tensors alone: no Ray."""

import asyncio
import concurrent.futures
import math
import random
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import ALGORITHM, load
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding

import training
from kit.data.episode import Episode
from kit.data.selection import select_trainable
from kit.extras import gloo
from kit.rollout.client import Client
from kit.runs import launch
from kit.runs.prepare import stop_token_ids


def episode(prompt, response, reward=1.0, mask=None, group="g", status="ok"):
    return Episode(
        row_id="r",
        group_id=group,
        server="s",
        prompt_ids=prompt,
        response_ids=response,
        response_mask=mask or [1] * len(response),
        log_probs=[-0.5] * len(response),
        reward=reward,
        status=status,
    )


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (
            {"GPU": 1.0, "CPU": 64.0},
            r"Ray has 1 GPUs, trainer\.n_gpus_per_node \* nnodes = 2: set these",
        ),
        (
            {"GPU": 2.0, "CPU": 1.0},
            r"Ray has 1 CPUs, and one goes to the process on each of 2 GPUs: let them share",
        ),
        ({"GPU": 2.0, "CPU": 2.0}, ""),
        (
            {"GPU": 2.0, "CPU": 2.0, "own": 1},
            r"Ray has 2 GPUs, .* \* nnodes with .*resource_pools .* = 3: set",
        ),
        (
            {"GPU": 3.0, "CPU": 4.0, "servers": 1},
            r"Ray has 3 GPUs, .* and rollout\.nnodes = 4: set",
        ),
        (
            {"GPU": 4.0, "CPU": 4.0, "servers": 1},
            r"Ray has 4 CPUs, .* 4 GPUs, two where vLLM is alone: .*num_cpus=6",
        ),
        ({"GPU": 4.0, "CPU": 6.0, "servers": 1}, ""),
        ({"GPU": 2.0, "CPU": 4.0, "own": 1, "servers": 1, "command": "evaluate"}, ""),
        ({"GPU": 2.0, "CPU": 2.0, "own": 1, "servers": 1, "command": "sft"}, ""),
    ],
)
def test_less_than_the_workers_ask_for_is_told_before_they_are_waited_for(workspace, found, told):
    """Actor, critic and reward model share a process on each of two ranks."""
    changes = [
        "algorithm.adv_estimator=gae",
        "reward.reward_model.enable=true",
        "trainer.n_gpus_per_node=2",
    ]
    own = f"trainer.resource_pools.critic={found.get('own', 'null')}"
    separate = ["separate", "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo"] * found.get(
        "servers", 0
    )
    changes += [own, f"reward.reward_model.model_path={workspace / 'scored'}", *separate[1:]]
    config, _ = load(workspace, *changes, overlays=separate[:1])
    assert re.match(told or "$", launch.lacking(config, found, found.get("command", "train")))


def test_weights_reach_servers_on_gpus_of_their_own(monkeypatch):
    """gloo.py as verl's manager calls it: one rank of two sends, two parts of servers get all of it, twice."""
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    engines = [gloo.GlooCheckpointEngine(2**20, is_master=i == 0) for i in range(4)]
    weights = {
        "wide": torch.randn(700, 500),
        "half": torch.randn(3, 5).bfloat16(),
        "turned": torch.randn(4, 6).T,
    }
    weights |= {"one": torch.tensor(7), "none": torch.ones(2, 0)}

    async def receive(engine) -> dict[str, torch.Tensor]:
        return {name: tensor async for name, tensor in engine.receive_weights()}

    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # each its own process, there
        for _ in range(2):
            senders, receivers = gloo.GlooCheckpointEngine.build_topology(
                2, 2, [e.prepare() for e in engines]
            )
            asked = {name: [*senders[name], *receivers[name]] for name in senders}
            done = [
                pool.submit(e.init_process_group, **{k: v[i] for k, v in asked.items()})
                for i, e in enumerate(engines)
            ]
            assert not any(future.result(timeout=30) for future in done)
            sent = [
                pool.submit(asyncio.run, engine.send_weights(iter(weights.items())))
                for engine in engines[:2]
            ]
            got = [pool.submit(asyncio.run, receive(engine)) for engine in engines[2:]]
            assert not any(future.result(timeout=30) for future in sent)
            for found in (future.result(timeout=30) for future in got):
                assert found.keys() == weights.keys()
                assert all(
                    torch.equal(found[n], w) and found[n].dtype == w.dtype
                    for n, w in weights.items()
                )
            weights["wide"] += 1


def test_an_episodes_turns_stay_on_the_replica_of_its_first(workspace):
    """And replicas get as many episodes each."""
    config, _ = load(workspace)
    client = Client(config, {"a": 1, "b": 2})

    async def ask() -> list[str]:
        return [(await client._acquire_server(f"episode-{i}"))[0] for i in range(64)]

    first = asyncio.run(ask())
    assert first == asyncio.run(ask()) and first.count("a") == first.count("b") == 32


def test_to_batch_pads_by_mask_not_by_id():
    PAD = 2  # also the id of EOS, which is sampled
    batch = training.build_batch(
        [episode([5, 6, 7], [8, PAD]), episode([9], [PAD], reward=0.5)], PAD, temperature=0.7
    )
    b = batch.batch
    assert b["input_ids"].tolist() == [[5, 6, 7, 8, PAD], [PAD, PAD, 9, PAD, PAD]]
    assert b["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [0, 0, 1, 1, 0]]
    assert b["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 1, 1]]
    assert b["response_mask"].tolist() == [
        [1, 1],
        [1, 0],
    ]  # the sampled EOS counts, the padding does not
    assert b["token_level_scores"].tolist() == [[0.0, 1.0], [0.5, 0.0]]  # on the last token of each
    assert b["rollout_log_probs"].tolist() == [[-0.5, -0.5], [-0.5, 0.0]]
    assert batch.meta_info["temperature"] == 0.7 and batch.meta_info["global_token_num"] == [5, 2]


def test_observed_tokens_are_seen_but_carry_no_loss():
    batch = training.build_batch([episode([5], [6, 7, 8], mask=[1, 0, 1])], 0, 1.0)
    assert batch.batch["attention_mask"].tolist() == [[1, 1, 1, 1]]
    assert batch.batch["response_mask"].tolist() == [[1, 0, 1]]


def test_keep_drops_failures_and_groups_of_one():
    ok = [episode([1], [1], group=g) for g in "aab"]
    failed = [episode([1], [1], reward=None, group=g, status="timeout") for g in "abc"]
    kept, _ = select_trainable([ok[0], failed[0], ok[1], ok[2], *failed[1:]])
    assert kept == ok[:2]
    assert select_trainable(failed) == ([], {})


def test_advantages_of_survivors_are_those_of_a_run_without_failures():
    config = OmegaConf.create({"algorithm": ALGORITHM})

    def advantages(episodes):
        batch = training.build_batch(select_trainable(episodes)[0], 0, 1.0)
        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        training.compute_advantages(batch, config)
        return batch.batch["advantages"][:, 0].tolist()

    good = [episode([1], [1], reward=r, group="a") for r in (0.0, 1.0, 1.0)]
    lone = episode([1], [1], reward=1.0, group="b")
    failed = [episode([1], [1], reward=None, group=g, status="http_500") for g in "aab"]
    survived = advantages([good[0], failed[0], good[1], lone, good[2], *failed[1:]])
    assert survived == advantages(good) == pytest.approx([-2 / 3, 1 / 3, 1 / 3])


@pytest.mark.parametrize(
    ("rows", "mini_batches", "ranks"), [(64, 1, 1), (61, 2, 2), (9, 8, 1), (16, 4, 4), (5, 2, 2)]
)
def test_arrange_gives_every_slot_its_share(rows, mini_batches, ranks):
    rng = random.Random(rows)
    lengths = [rng.randint(3, 90) for _ in range(rows)]
    order, filling = training.arrange(lengths, mini_batches, ranks)
    assert sorted(order) == list(range(rows + filling)) and filling < mini_batches * ranks
    per_slot = len(order) // (mini_batches * ranks)
    slots = [order[i : i + per_slot] for i in range(0, len(order), per_slot)]
    for m in range(
        mini_batches
    ):  # the mini-batch m of every rank together: real rows, dealt in turn
        members = [i for rank in range(ranks) for i in slots[rank * mini_batches + m]]
        real = [i for i in members if i < rows]
        assert all(i % mini_batches == m for i in members) and len(real) >= rows // mini_batches


def test_stop_ids_come_from_tokenizer_and_generation_config():
    tokenizer = SimpleNamespace(eos_token_id=1)
    assert stop_token_ids(tokenizer, None) == {1}
    assert stop_token_ids(tokenizer, SimpleNamespace(eos_token_id=[2, 3])) == {1, 2, 3}
    assert stop_token_ids(tokenizer, SimpleNamespace(eos_token_id=4)) == {1, 4}


def packed(groups):
    """(nested ids [B, t], prompt lengths [B]) of groups: (length of the prompt, lengths of its answers)."""
    rows, lengths = [], []
    for first, (size, answers) in enumerate(groups, 10):
        for row, length in enumerate(answers):
            rows.append(torch.tensor([first] * size + [100 + row] * length))
            lengths.append(size)
    return torch.nested.nested_tensor(rows, layout=torch.jagged), torch.tensor(lengths)


RAGGED = {
    "ragged": [(5, [1, 7, 3]), (60, [64, 65]), (1, [2])],
    "one token": [(1, [1])],
    "no answer": [(4, [0, 3, 0]), (2, [0])],
    "long": [(30, [2000, 1, 500]), (600, [90])],
    "many": [(20, [40] * 70)],
}


@pytest.mark.parametrize("groups", RAGGED.values(), ids=RAGGED)
def test_attention_on_grids_is_that_of_each_sequence_by_itself(groups, monkeypatch):
    """Forward and backward, in fp32, against plain attention over each prompt with its answer."""
    from kit.cpu import cpu_engine

    torch.manual_seed(0)
    H, H_kv, D = 4, 2, 8
    ids, prompts = packed(groups)
    layout = cpu_engine.lay_out(ids, prompts)
    assert len(layout.gather_index) == sum(
        size + sum(answers) for size, answers in groups
    )  # every prompt once
    assert torch.equal(ids.values()[layout.gather_index][layout.packed_positions], ids.values())
    monkeypatch.setattr(cpu_engine, "_layout", layout)
    given = [
        torch.randn(1, heads, len(layout.gather_index), D, requires_grad=True)
        for heads in (H, H_kv, H_kv)
    ]
    weight = torch.randn(len(layout.packed_positions), H, D)
    found = cpu_engine.grid_attention(None, *given, None, scaling=0.3)[0][0][
        layout.packed_positions
    ]  # [T, H, D]
    expected = []
    for begin, end in zip(ids.offsets(), ids.offsets()[1:], strict=False):
        q, k, v = (x[0][:, layout.packed_positions[begin:end]] for x in given)  # [heads, t, D]
        k, v = (x.repeat_interleave(H // H_kv, dim=0) for x in (k, v))
        later = torch.ones(len(q[0]), len(q[0])).triu(1).bool()
        expected.append(
            (F.softmax((q @ k.mT * 0.3).masked_fill(later, -torch.inf), dim=-1) @ v).transpose(0, 1)
        )
    torch.testing.assert_close(found, torch.cat(expected))
    ours, theirs = (
        torch.autograd.grad((x * weight).sum(), given) for x in (found, torch.cat(expected))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_attention_refuses_what_it_would_leave_out(monkeypatch):
    from kit.cpu import cpu_engine

    given = [torch.zeros(1, 2, 4, 8)] * 3
    with pytest.raises(ValueError, match="use_remove_padding"):
        cpu_engine.grid_attention(None, *given, None)
    monkeypatch.setattr(cpu_engine, "_layout", cpu_engine.lay_out(*packed([(2, [2])])))
    cpu_engine.grid_attention(None, *given, None, sliding_window=4)
    message = r"a sliding window of 3 tokens \(the longest row: 4\)"
    with pytest.raises(NotImplementedError, match=message):
        cpu_engine.grid_attention(None, *given, None, sliding_window=3)
    with pytest.raises(NotImplementedError, match="softcap"):
        cpu_engine.grid_attention(None, *given, None, softcap=50.0)


def test_log_probs_and_entropy_in_tiles_are_torchs():
    from kit.cpu import cpu_engine

    torch.manual_seed(0)
    logits, labels = torch.randn(300, 50, requires_grad=True), torch.randint(50, (300,))
    temperature = torch.rand(300, 1) + 0.5
    log_probs = (logits / temperature).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    a, b = torch.randn(2, 300)
    for weights in ((a, b), (a, 0 * b)):
        found = cpu_engine.LogProbEntropy.apply(
            cpu_engine.scale_logits(1.0 * logits, temperature, is_unit_temperature=False), labels
        )
        expected = log_probs.gather(1, labels[:, None])[:, 0], entropy
        torch.testing.assert_close(found, expected)
        ours, theirs = (
            torch.autograd.grad(
                sum((w * x).sum() for w, x in zip(weights, pair, strict=True)),
                logits,
                retain_graph=True,
            )
            for pair in (found, expected)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_words_are_drawn_with_their_probabilities():
    from kit.cpu import vllm_patches

    torch.manual_seed(0)
    probs = torch.tensor([[0.5, 0.0, 0.3, 1e-4, 0.2, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]])
    probs[0] /= probs[0].sum()
    n = 100_000
    drawn = vllm_patches.sample_tokens(probs.log().repeat(n, 1)).view(n, 2)
    seen = torch.stack([row.bincount(minlength=6) for row in drawn.T]) / n
    assert torch.all((seen - probs).abs() <= 4 * (probs * (1 - probs) / n).sqrt()), (
        seen
    )  # none that cannot be
    broken = vllm_patches.sample_tokens(
        torch.full((3, 6), torch.nan)
    )  # of weights that are not finite: the step tells, not the engine
    assert torch.all((broken >= 0) & (broken < 6))
    of = probs.log().gather(1, torch.tensor([[4], [5]]))
    assert vllm_patches.count_at_least(probs.log(), of).tolist() == [3, 1]


def test_micro_batches_keep_answers_to_a_prompt_together(monkeypatch):
    """However the rows come, and each prompt counted once."""
    from kit.cpu import cpu_engine

    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    made = [episode([5 + g] * 6, [7 + m] * (1 + 3 * m)) for g in range(4) for m in range(4)]
    cuts = []
    for order in (made, made[::-1], made[1::2] + made[::2]):
        data = left_right_2_no_padding(training.build_batch(order, 0, 1.0).to_tensordict())
        tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=60)
        parts, places = cpu_engine.prepare_micro_batches(data)
        assert sorted(place for part in places for place in part) == list(range(16))
        assert (
            len(parts) == 2
        )  # 4 x 6 tokens of prompts, 4 x 22 of answers; each answer with its prompt: 4 x 46
        cuts.append([[row.tolist() for row in part["input_ids"].unbind()] for part in parts])
        assert [len({tuple(order[place].prompt_ids) for place in part}) for part in places] == [
            2,
            2,
        ]
    assert cuts[0] == cuts[1] == cuts[2]


def test_components_of_the_reward_reach_verls_multi_reward_advantage():
    """gdpo normalises each component by itself: here they pull apart, and the sum alone would say nothing."""
    parts = [
        {"right": 1.0, "format": 0.0},
        {"right": 0.0, "format": 1.0},
        {"right": 1.0, "format": 0.0},
    ]
    episodes = [episode([1], [2, 3], reward=1.0) for _ in parts]
    for e, part in zip(episodes, parts, strict=True):
        e.reward_components = part
    batch = training.build_batch(episodes, 0, 1.0)
    assert list(batch.non_tensor_batch["right"]) == [1.0, 0.0, 1.0]
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    weights = {"gdpo_reward_keys": ["right", "format"], "gdpo_reward_weights": [1.0, 0.1]}
    algorithm = ALGORITHM | {"adv_estimator": "gdpo"} | weights
    training.compute_advantages(batch, OmegaConf.create({"algorithm": algorithm}))
    advantages = batch.batch["advantages"]  # [3, 2]
    assert advantages[0, 0] > 0 > advantages[1, 0] and torch.equal(advantages[0], advantages[2])


def test_components_that_not_all_episodes_have_are_left_out():
    one, two = episode([1], [2]), episode([1], [2])
    one.reward_components = {"a": 1.0, "b": 0.0}
    two.reward_components = {"b": 1.0}
    batch = training.build_batch([one, two], 0, 1.0)
    assert list(batch.non_tensor_batch["b"]) == [0.0, 1.0] and "a" not in batch.non_tensor_batch


def test_damage_is_found_where_the_mask_is_and_named():
    from kit.runs.finite_check import find_reason_to_skip

    sampling = {"rollout": {"top_p": 1.0, "top_k": -1}}
    settings = OmegaConf.create({"actor_rollout_ref": sampling, "trainer": {"one_step_off": 0}})

    def damaged(name=None, value=math.nan, where=(0, 0), metrics=None):
        batch = training.build_batch([episode([5, 6], [7, 8]), episode([5], [7])], 0, 1.0)
        batch.batch["old_log_probs"] = torch.zeros(2, 2)
        batch.batch["advantages"] = torch.zeros(2, 2)
        for each in name.split() if name else ():
            batch.batch[each][where] = value
        return find_reason_to_skip(batch, metrics or {}, settings)

    assert (
        damaged() == ""
        and damaged(metrics={"actor/grad_norm": 3.0, "timing_s/gen": math.nan}) == ""
    )
    for name in ("rollout_log_probs", "old_log_probs", "token_level_scores", "advantages"):
        assert damaged(name) == f"1 of 3 {name} are NaN or infinite"
        assert damaged(name, -math.inf) == f"1 of 3 {name} are NaN or infinite"
        assert damaged(name, where=(1, 1)) == ""  # padding
    both = damaged("rollout_log_probs old_log_probs", metrics={"actor/grad_norm": math.nan})
    assert (
        both
        == "1 of 3 rollout_log_probs, 1 of 3 old_log_probs are NaN or infinite; actor/grad_norm is nan"
    )
    assert damaged(metrics={"actor/grad_norm": math.inf}) == "actor/grad_norm is inf"
    assert damaged(metrics={"critic/vf_loss": math.nan}) == "critic/vf_loss is nan"
    assert "the rollout engine's probabilities differ from the trainer's by 0.30" in damaged(
        metrics={"training/rollout_probs_diff_mean": 0.3}
    )
    settings.actor_rollout_ref.rollout.top_p = 0.5  # the sampler's are of other tokens
    assert damaged(metrics={"training/rollout_probs_diff_mean": 0.3}) == ""


def test_forward_passes_are_balanced_over_ranks_and_come_back_in_order():
    """Answers of 1,024 and of 100 tokens: on 8 ranks the slowest has 1.82 times the mean as they come."""
    rng = random.Random(0)
    rows = [
        episode([1] * 4, [2] * rng.choice([1024, 100, 100, 100]), group=str(i)) for i in range(61)
    ]
    batch = training.build_batch(rows, 0, 1.0)
    seen = {}

    def call(data):
        tokens = data["input_ids"].offsets().diff()  # of each row, in the order of the workers
        parts = tokens.view(8, -1).sum(dim=1).float()
        seen["slowest"], seen["rows"] = float(parts.max() / parts.mean()), len(tokens)
        values = torch.nested.nested_tensor_from_jagged(
            torch.repeat_interleave(tokens.float(), tokens), offsets=data["input_ids"].offsets()
        )
        return TensorDict({"values": values}, batch_size=len(tokens))

    found = training._infer(call, batch, 8).padded("values", len(rows))  # [B, R]
    assert seen["rows"] == 64 and seen["slowest"] < 1.3
    for row, e in zip(found, rows, strict=True):
        assert set(row[: len(e.response_ids)].tolist()) == {float(len(e.response_ids) + 4)}
