"""Training runs on rows with images."""

from __future__ import annotations

import json

import pytest

from extras import sft
from kit.config.load import load_config
from kit.errors import ConfigError
from tests.helpers.models import COLORS, data_url, image_row, png
from tests.helpers.recipes import (
    CPU,
    RECIPE,
    ROOT,
    command,
    gym_examples,
    metrics_of,
    run,
    tiny,
    write_rows,
)


def test_sft_of_a_model_that_reads_images_is_refused(workspace, vision_model):
    write_rows(workspace / "chats.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    changes = [
        f"env.train_files=[{workspace / 'chats.jsonl'}]",
        "env.val_files=[]",
        f"actor_rollout_ref.model.path={vision_model}",
    ]
    config, defaults = load_config([str(CPU), str(RECIPE), "sft"], tiny(workspace, *changes))
    with pytest.raises(ConfigError, match="`sft` does not support models that read images"):
        sft.prepare(config, defaults)


def run_colors(workspace, vision_model, steps: int) -> list[float]:
    """Train a model to name the color of an image. Return the accuracy of each evaluation.

    Rows of Gym's circle_click are in the same batches, and the model never calls their tool. Both
    rollout engine and trainer ban the token <image>, so their probabilities agree.
    """
    rows = []
    for name, color in COLORS.items():
        rows += [image_row(data_url(png(color)), answer=name)] * 3
    write_rows(workspace / "colors.jsonl", rows)
    (clicks,) = [path for path in gym_examples() if path.match("circle_click/*/example.jsonl")]
    changes = [
        f"actor_rollout_ref.model.path={vision_model}",
        f"env.train_files=[{{path: colors.jsonl, server: reasoning_gym, weight: 6}}, "
        f"{{path: {clicks}, server: circle_click, weight: 2}}]",
        "env.val_files=[{path: colors.jsonl, server: reasoning_gym}]",
        f"gym.servers.circle_click.start.python={ROOT / '.venv-gym' / 'bin' / 'python'}",
        "data.max_prompt_length=1024",
        "data.max_response_length=1",
        "actor_rollout_ref.actor.optim.lr=0.003",
        "trainer.experiment_name=colors",
        f"trainer.total_training_steps={steps}",
    ]
    done = run(command(workspace, *tiny(workspace, *changes)), workspace, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folder = workspace / "runs" / "colors"
    trained = [m for m in metrics_of(folder) if "actor/grad_norm" in m]
    print("rewards", [round(m["reward/reasoning_gym/mean"], 2) for m in trained])
    print("largest difference", max(m["training/rollout_probs_diff_max"] for m in trained))
    assert len(trained) == steps
    # If all eight groups of a step have equal rewards, there is no gradient.
    with_signal = [m for m in trained if m["rollout/zero_variance_groups"] < 8]
    assert with_signal and all(m["actor/grad_norm"] > 0 for m in with_signal)
    assert all(m["training/rollout_probs_diff_max"] < 1e-3 for m in trained)
    assert all(m["rollout/failed_frac"] == 0 for m in trained)
    lines = (folder / "rollouts" / "step_1.jsonl").read_text().splitlines()
    assert {len(json.loads(line)["response"]["output"]) for line in lines} == {1}
    assert max(map(len, lines)) < 20_000
    assert (folder / "export" / "processor_config.json").is_file()
    key = "val-core/reasoning_gym/acc/mean@1"
    return [m[key] for m in metrics_of(folder) if key in m]


@pytest.mark.soak
def test_a_model_is_trained_on_responses_to_images(workspace, vision_model):
    assert len(run_colors(workspace, vision_model, steps=4)) == 2


@pytest.mark.soak
def test_a_model_learns_to_name_a_color(workspace, vision_model):
    """All texts are equal, so only the image helps. A constant answer is right in half of them."""
    held_out = run_colors(workspace, vision_model, steps=34)
    assert held_out[0] <= 0.5 < held_out[-1]
