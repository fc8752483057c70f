"""Tests of benchmarks/versus.py: its commands, how it reads the output of each slice, its table."""

from __future__ import annotations

import json
import sys

import pytest
from hydra import compose, initialize_config_dir
from verl.utils.logger.aggregate_logger import concat_dict_to_str

from kit.recipe.load import VERL_CONFIG, read_source
from tests.helpers.recipes import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import versus
import versus_raw
import versus_trl

# Seconds of three steps on one H200 (docs/gpu_results.md), and of a fourth, a copy of the third.
SECONDS = [
    {"gen": 12.84, "old_log_prob": 5.59, "ref": 1.97, "update_actor": 6.83, "step": 27.85},
    {"gen": 9.55, "old_log_prob": 1.75, "ref": 1.77, "update_actor": 4.42, "step": 18.01},
    {"gen": 7.52, "old_log_prob": 1.71, "ref": 2.19, "update_actor": 4.46, "step": 16.41},
]
SYNC = (0.26, 0.19, 0.23)
ROWS = [seconds | {"update_weights": s} for seconds, s in zip(SECONDS, SYNC, strict=True)]
MEDIANS = {"step": 17.21, "sampling": 8.535, "log-probs": 3.71, "update": 4.44, "sync": 0.21}


@pytest.fixture
def work():
    return versus.Work("model", 3, 128, 256, 24576, has_flash_attn=False)


def test_the_commands_have_only_keys_that_quintet_and_verl_know(work):
    command = versus.make_kit_command(work)
    source = read_source(["math", "one_gpu"], command[command.index("one_gpu") + 1 :])
    assert source.resolved["actor_rollout_ref"]["rollout"]["ignore_eos"] is True
    words = versus.make_verl_command(work)
    with initialize_config_dir(str(VERL_CONFIG), version_base=None):
        config = compose("ppo_trainer", overrides=words[words.index("-m") + 2 :])
    model = config.actor_rollout_ref
    assert model.model.override_config.attn_implementation == "torch_varlen"
    assert model.ref.log_prob_max_token_len_per_gpu == 24576
    assert config.trainer.use_v1  # verl's default trainer
    variables = versus.list_variables("verl", work)
    assert variables["VERL_USE_EXTERNAL_MODULES"] == "extras.without_flash_attn"


def test_the_steps_of_each_slice_are_read_from_what_it_prints(tmp_path):
    """Quintet's last step has a checkpoint, which is no part of the work."""
    expected = [versus.to_step(row) for row in ROWS]
    assert expected[1] == {
        "step": 18.01,
        "sampling": 9.55,
        "log-probs": 3.52,
        "update": 4.42,
        "sync": 0.19,
    }
    lines = [{"step": 0, "timing_s/start": 30.0}]
    for step, row in enumerate(ROWS, 1):
        lines.append({"step": step} | {f"timing_s/{name}": s for name, s in row.items()})
    lines[-1] |= {"timing_s/save_checkpoint": 5.29, "timing_s/step": 16.41 + 5.29}
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, other in zip(versus.read_kit("", path), expected, strict=True):
        assert step == pytest.approx(other)
    output = "Training Progress:   0%\n"
    for step, row in enumerate(ROWS, 1):
        metrics = {"actor/loss": -1e-05} | {f"timing_s/{name}": s for name, s in row.items()}
        text = concat_dict_to_str(metrics | {"timing_per_token_ms/gen": 9.9}, step)
        output += f"\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m {text}\n"
    assert versus.read_verl(output) == expected
    output = "".join(f"STEP {json.dumps(row)}\n{{'loss': 0.1}}\n" for row in ROWS)
    assert versus.read_trl(output) == expected


def test_trls_methods_become_stages():
    """A turn contains the sync, and a scored batch contains the turn."""
    clock = versus_trl.Clock()
    clock.seconds = {"sync": 1.0, "turn": 28.3, "scored": 32.0}
    assert clock.finish(38.3) == pytest.approx(
        {"gen": 27.3, "update_weights": 1.0, "old_log_prob": 3.7, "update_actor": 6.3, "step": 38.3}
    )
    assert clock.seconds == {}


def test_the_table_has_medians_without_the_first_step_and_the_ratios():
    kit = versus.summarize([versus.to_step(row) for row in ROWS], 58.0)
    assert kit == MEDIANS | {"start": 30.1}
    trl = {name: 2 * value for name, value in kit.items()}
    results = {"raw": {"sampling": 7.6815, "update": 3.33}, "trl": trl, "kit": kit}
    assert versus.render_table(results).splitlines()[2:] == [
        "| Quintet | 17.21 | 8.535 | 3.71 | 4.44 | 0.21 | 30.1 |",
        "| vLLM alone, bare update |  | 7.6815 |  | 3.33 |  |  |",
        "| TRL | 34.42 | 17.07 | 7.42 | 8.88 | 0.42 | 60.2 |",
    ]
    assert versus.list_ratios(results) == [
        "Quintet / TRL: step 0.50, start 0.50",
        "alone / Quintet: sampling 0.90",
        "alone / Quintet: update 0.75",
    ]


def test_micro_batches_have_at_most_the_tokens_of_the_limit(tmp_path):
    """A failed episode is no part of the batch."""
    path = tmp_path / "step_2.jsonl"
    sizes = [(3, 5), (2, 6), (4, 4), (9, 9)]
    lines = []
    for prompt, response in sizes:
        item = {"prompt_token_ids": [1] * prompt, "generation_token_ids": [2] * response}
        lines.append({"_episode": {"status": "ok"}, "response": {"output": [item]}})
    lines.append({"_episode": {"status": "timeout"}, "response": {}})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = versus_raw.read_episodes(path)
    assert [(len(row.prompt), len(row.response)) for row in rows] == sizes
    assert [len(batch) for batch in versus_raw.pack(rows, 16)] == [2, 1, 1]
