"""Planted faults in the weights of a rollout engine are found before it samples."""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from kit.engine.weight_proof import METRIC, RUN, RUNS, add_up, ask_replicas, send_with_sums
from kit.errors import RunError
from kit.run import prepare, summary
from tests.helpers.models import make_model
from tests.helpers.recipes import CLEAN_ENV, ROOT, load

GATE_UP = "the parameter with model.layers.1.mlp.gate_proj.weight"  # vLLM packs it on a CPU
UP = "model.layers.1.mlp.up_proj.weight"
QKV = "model.layers.0.self_attn.qkv_proj"


def plant_faults(action: str, folder) -> dict[str, list[str]]:
    """Return the problems that vLLM reports, by fault (tests/helpers/engine_process.py)."""
    arguments = [sys.executable, "-m", "tests.helpers.engine_process", action, str(folder)]
    done = subprocess.run(
        arguments, cwd=ROOT, env=CLEAN_ENV, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_vllm_finds_weights_that_are_dropped_exchanged_or_old(tmp_path):
    found = plant_faults("weights", make_model(tmp_path / "tied", tied=True))
    assert found["first sync"] == found["later sync"] == found["last sync"] == []
    unwritten = f"{GATE_UP}: 8,192 of 16,384 elements were not written"
    assert found["dropped on the way"] == [unwritten, f"{UP} was sent and did not arrive"]
    assert found["dropped by the loader"] == [unwritten]
    moved = "elements are in other places"
    assert found["rows exchanged on the way"] == [f"{GATE_UP} (from {UP}): {moved}"]
    embedding = "model.embed_tokens.weight"
    assert found["rows exchanged in the engine"] == [f"{embedding} (from {embedding}): {moved}"]
    packed = "lm_head: vLLM computes with a packed copy of an earlier sync"
    assert found["tied head of the sync before"] == [packed]


def test_vllm_finds_an_adapter_of_an_earlier_step(tmp_path):
    found = plant_faults("adapter", make_model(tmp_path / "untied", tied=False))
    assert found["first sync"] == found["later sync"] == found["last sync"] == []
    old = found["adapter of the sync before"]
    assert len(old) == 8 and f"{QKV}: the values of the adapter differ" in old
    [problem] = found["one tensor of a sync before"]
    assert problem.endswith("lora_A.weight: the values differ")


def test_transformers_engine_finds_the_same(tmp_path):
    """The server of configs/hf.yaml, without Ray."""
    hf_rollout = importlib.import_module("extras.hf_rollout")
    server = hf_rollout.Server(SimpleNamespace(dtype="bfloat16"), {})
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path, tied=True))
    weights = [(name, weight + 0.01) for name, weight in model.state_dict().items()]
    server.model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)

    def sync(alter=list):
        for name, weight in alter(send_with_sums(weights, torch.bfloat16)):
            asyncio.run(server.load_weight(name, weight, 1))
        [[report]] = asyncio.run(server.collective_rpc("take_weight_reports"))
        return report["problems"]

    assert sync() == []
    dropped = [f"{UP}: 8,192 of 8,192 elements were not written"]
    dropped.append(f"{UP} was sent and did not arrive")
    assert sync(lambda sent: [pair for pair in sent if pair[0] != UP]) == dropped
    exchanged = [f"{UP} (from {UP}): elements are in other places"]
    assert sync(lambda sent: [(n, w.flip(0) if n == UP else w) for n, w in sent]) == exchanged


def test_a_replica_with_other_weights_ends_the_run_by_name():
    """A replica that got nothing is one, too."""

    def make_replica(rank, *workers):
        call = SimpleNamespace(remote=lambda _: asyncio.sleep(0, list(workers)))
        return SimpleNamespace(replica_rank=rank, servers=[SimpleNamespace(collective_rpc=call)])

    def make_report(*problems, compared=4):
        return {"problems": list(problems), "unknown": [], "compared": compared, "total": 4}

    first = make_replica(0, [make_report()], [make_report(compared=3)])
    assert asyncio.run(ask_replicas([first], 7)) == {METRIC: 0.875}
    message = "Step 7: replica 1 of the rollout engine does not have the weights .* sent: "
    for workers, problem in (
        ([[make_report()], [make_report(*"abcde")]], "a; b; c; and 2 more"),
        ([[make_report()], []], "no weights arrived"),
    ):
        with pytest.raises(RunError, match=message + problem):
            asyncio.run(ask_replicas([first, make_replica(1, *workers)], 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (5, 3), (300, 256), (RUNS * RUN, 5)])
def test_sums_see_a_changed_bit_and_exchanged_rows(shape, dtype):
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 50).to(dtype)
    sums = add_up(tensor)
    assert torch.equal(add_up(tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor), sums)
    changed = tensor.clone()
    changed.view(-1)[-1:] += 1
    assert add_up(changed)[0] != sums[0]
    if len(shape) > 1:
        exchanged = tensor.clone()
        exchanged[[0, -1]] = exchanged[[-1, 0]]
        assert add_up(exchanged)[1] != sums[1]


def test_the_summary_says_that_an_engine_cannot_be_checked(workspace):
    recipe, inputs, _ = load(workspace)
    assert "is checked" not in summary.summarize(recipe, inputs)
    key = "actor_rollout_ref.rollout"
    for change in (f"{key}.quantization=fp8", f"{key}.name=sglang"):
        text = summary.summarize(recipe.change(change), inputs)
        assert f"WARNING     {change} " in text and "no sync of the weights is checked" in text
    hf_config = copy.deepcopy(inputs.model)
    hf_config.quantization_config = {"quant_method": "fp8"}
    facts = recipe.facts._replace(model=prepare.make_model_facts(hf_config))
    text = summary.summarize(recipe.model_copy(update={"facts": facts}), inputs)
    assert "path has weights in fp8" in text and "no sync of the weights is checked" in text
