"""Recipes: unknown keys, invalid sizes, and missing files are errors before a run starts."""

import inspect
import json
import os
import re
import socket
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from verl.utils.model import update_model_config

import env
from kit.config import checks
from kit.config.keys import diff, to_plain
from kit.config.load import MICRO_BATCH_TOKENS, load_config
from kit.errors import ConfigError
from kit.gym import network
from kit.runs import prepare, summary
from tests.helpers.http import ScriptedServer
from tests.helpers.recipes import CPU, RECIPE, ROOT, load, row, tiny, write_rows

ROLLOUT = "actor_rollout_ref.rollout"


def load_tiny(*changes, files=(str(CPU), str(RECIPE))):
    """The tiny recipe with changes, merged over verl's configuration."""
    return load_config(files, changes)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (f"{ROLLOUT}.temprature=1", "Did you mean actor_rollout_ref.rollout.temperature"),
        ("gym.timeout=3", "unknown key gym.timeout. Did you mean gym.timeout_s"),
        ("trainr.save_freq=3", "unknown key trainr"),
        ("algorithm.pf_ppo.weight_pow=1", "this trainer does not use. Remove it"),
        (
            "data.train_files=x",
            r"data\.train_files is a verl option that this trainer does not use\. "
            r"Set env\.train_files",
        ),
        (
            "rollout.temperature=1",
            r"unknown key rollout. Did you mean actor_rollout_ref\.rollout\.temperature",
        ),
        (
            "actor_rollout_ref.actor.clip_ratio=0.1",
            r"Set actor_rollout_ref\.actor\.clip_ratio_low and actor_rollout_ref",
        ),
        (f"{ROLLOUT}.multi_turn.enable=true", r"Set gym\.servers instead"),
        # names of TRL, at any place
        ("max_completion_length=9", r"Did you mean data\.max_response_length\?"),
        ("trainer.learning_rate=1e-5", r"Did you mean actor_rollout_ref\.actor\.optim\.lr\?"),
        ("grpo_config.num_generations=4", r"Did you mean actor_rollout_ref\.rollout\.n\?"),
        ("reward_funcs=[my.py:f]", r"Set env\.verifier=\{function: templates/trl\.py"),
        # a section that does not exist
        ("kl_target=0.1", "See configs/base.yaml"),
        ("mini_batch_size=8", r"Did you mean actor_rollout_ref\.actor\.ppo_mini_batch_size\?"),
        ("dtyp=bf16", "See configs/base.yaml"),
        ("actor_rollout_ref.rolout.n=3", r"Did you mean actor_rollout_ref\.rollout\.n\?"),
        ("optim.weight_decay=0.1", r"Did you mean actor_rollout_ref\.actor\.optim\.weight_decay"),
        # no key has a similar last part
        ("data.completions_in_total=3", "unknown key data.completions_in_total. See configs/base"),
        ("actor_rollout_ref.actor.rollout_n=4", r"Set actor_rollout_ref\.rollout\.n instead\.$"),
        (
            "trainer.total_training_steps=ten",
            "total_training_steps=ten must be a whole number of at least 1, or null",
        ),
        (
            "data.train_batch_size=null",
            "train_batch_size=null must be a whole number of at least 1",
        ),
        ("reward.num_workers=2", "does not use"),
        ("just_a_word", "'just_a_word' is not key=value"),
    ],
)
def test_an_unknown_or_unused_key_is_an_error(change, message):
    with pytest.raises(ConfigError, match=message):
        load_tiny(change)


def test_an_unused_key_with_its_default_value_is_accepted():
    """Recipes from elsewhere set such keys. actor.rollout_n must be rollout.n, which is 8."""
    load_tiny(
        "actor_rollout_ref.actor.rollout_n=8",
        f"{ROLLOUT}.mode=async",
        "actor_rollout_ref.actor.grad_clip=1.0",
    )


def test_keys_that_only_verls_dataclasses_have_are_accepted():
    config = load_tiny(
        "+actor_rollout_ref.model.override_config.attn_implementation=eager", "data.seed=7"
    )
    assert config.actor_rollout_ref.model.override_config.attn_implementation == "eager"
    # verl's RolloutConfig has this field, its YAML does not
    config = load_tiny("actor_rollout_ref.rollout.enable_sleep_mode=false")
    assert config.actor_rollout_ref.rollout.enable_sleep_mode is False


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "not valid YAML"), ("- 1\n", "is a YAML mapping"), (None, "no such file")],
)
def test_an_error_of_a_recipe_file_names_the_file(tmp_path, text, message):
    if text is not None:
        (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"recipe\.yaml: .*{message}"):
        load_tiny(files=[str(tmp_path / "recipe.yaml")])


def test_a_recipe_file_that_is_not_utf8_is_an_error(tmp_path):
    (tmp_path / "recipe.yaml").write_bytes("trainer: {project_name: caf\xe9}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"recipe\.yaml is not UTF-8 \(byte 27: .*Save it"):
        load_tiny(files=[str(tmp_path / "recipe.yaml")])


def test_a_recipe_is_found_by_its_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_tiny(files=["math_cpu", "dapo", "cpu"])
    assert (config.trainer.device, config.actor_rollout_ref.actor.clip_ratio_high) == ("cpu", 0.28)
    for old_name, new_name in (
        ("cpu.yaml", "machines/cpu"),
        ("dapo.yaml", "algorithms/dapo"),
        ("smollm.yaml", "models/smollm2"),
    ):
        with pytest.raises(
            ConfigError,
            match=rf"configs/{old_name}: no such file. Use configs/{new_name}\.yaml, or just",
        ):
            load_tiny(files=[f"configs/{old_name}"])
    (tmp_path / "dapo").write_text("trainer: {save_freq: 3}")  # a local file comes first
    assert load_tiny(files=["dapo"]).trainer.save_freq == 3


def test_names_of_recipes_are_unique():
    names = Counter(path.stem for path in (ROOT / "configs").rglob("*.yaml"))
    assert names.most_common(1)[0][1] == 1


# --- invalid recipes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            "actor_rollout_ref.actor.ppo_mini_batch_size=3",
            ConfigError,
            "train_batch_size=8 must be a multiple",
        ),
        (
            "critic.ppo_mini_batch_size=3",
            ConfigError,
            r"train_batch_size=8 must be a multiple of critic\.ppo_mini_batch_size=3",
        ),
        (
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
            ConfigError,
            "1 GPUs must be a multiple of .*=2",
        ),
        (
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
            ConfigError,
            "=2 on a CPU: kit/cpu/cpu_engine.py",
        ),
        (
            "actor_rollout_ref.actor.entropy_checkpointing=true",
            ConfigError,
            "entropy_checkpointing on a CPU: .* tiles",
        ),
        (
            "actor_rollout_ref.actor.use_dynamic_bsz=false",
            ConfigError,
            "false needs .*ppo_micro_batch_size_per_gpu and",
        ),
        (
            "actor_rollout_ref.actor.fsdp_config.model_dtype=bf8",
            ConfigError,
            "model_dtype=bf8 is not supported. Use one of: null, fp32",
        ),
        (
            "actor_rollout_ref.actor.strategy=megatron",
            ConfigError,
            "strategy=megatron is not supported. Use one of: fsdp, fsdp2",
        ),
        ("trainer.n_gpus_per_node=3", ConfigError, "must be a multiple of 3 GPUs"),
        ("trainer.nnodes=0", ConfigError, "nnodes=0 must be a whole number of at least 1"),
        (f"{ROLLOUT}.tensor_model_parallel_size=0", ConfigError, "must be a whole number of"),
        ("data.train_batch_size=2.5", ConfigError, "=2.5 must be a whole number of at least 1"),
        (
            "trainer.total_training_steps=0",
            ConfigError,
            "steps=0 must be a whole number of at least",
        ),
        ("algorithm.adv_estimator=null", ConfigError, "adv_estimator=null is not in verl"),
        ("trainer.resume_mode=never", ConfigError, "resume_mode=never is not supported"),
        ("trainer.n_gpus_per_node=0", ConfigError, "n_gpus_per_node=0 must be a whole number"),
        (
            "gym.concurrency=many",
            ConfigError,
            "gym.concurrency=many must be a whole number of at least 1, or auto",
        ),
        ("gym.concurrency.x=0", ConfigError, "gym.concurrency.x=0 must be a whole number"),
        (
            "trainer.one_step_off=2",
            ConfigError,
            "trainer.one_step_off=2 must be a whole number from 0 to 1",
        ),
        (
            "trainer.resource_pools.ref=0",
            ConfigError,
            "trainer.resource_pools.ref=0 must be a whole number of at least 1, or null",
        ),
        (
            "trainer.resource_pools.critc=1",
            ConfigError,
            "Did you mean trainer.resource_pools.critic",
        ),
        (
            "reward.reward_model.enable_resource_pool=true",
            ConfigError,
            "Set trainer.resource_pools.reward_model",
        ),
        (
            "env.keep_rollouts=0",
            ConfigError,
            "env.keep_rollouts=0 must be a whole number of at least 1, or null .all.",
        ),
        (f"{ROLLOUT}.tensor_model_parallel_size=2", ConfigError, "1 GPUs must be a multiple"),
        (f"{ROLLOUT}.name=tgi", ConfigError, "name=tgi is not one of vllm, hf, sglang"),
        (f"{ROLLOUT}.n=1", ConfigError, "at least two responses"),
        (
            "data.max_response_length=5000",
            ConfigError,
            "the model has only 2048 positions. Lower these",
        ),
        (
            "actor_rollout_ref.model.path=./nowhere",
            ConfigError,
            "model.path=./nowhere: no such model folder. Give",
        ),
        (
            f"actor_rollout_ref.model.path={RECIPE}",
            ConfigError,
            r"model.path=.*tiny.yaml is a file. Give the model's folder",
        ),
        (
            "actor_rollout_ref.model.external_lib=no_such_module",
            ConfigError,
            "No module named 'no_such_module'",
        ),
        ("env.train_files=[nowhere.jsonl]", env.DataError, r"nowhere\.jsonl: no such file"),
        ("env.train_files=[]", ConfigError, "env.train_files is not set"),
        (
            "env.train_files=x.jsonl",
            ConfigError,
            r"must be a list. Write 'env\.train_files=\[x\.jsonl\]'",
        ),
        ("data.max_prompt_length=3", ConfigError, "have 0 usable rows, fewer than 8"),
        ("env.max_rows=7", ConfigError, "have 7 usable rows, fewer than 8"),
        ("gym.servers.reasoning_gym.url=http://127.0.0.1:1", ConfigError, "must have either url"),
        ("gym.servers.reasoning_gym.start.python=nowhere", network.GymStartError, "make .*gym`"),
    ],
)
def test_an_invalid_recipe_is_an_error_before_a_run_starts(workspace, change, error, message):
    with pytest.raises(error, match=message):
        load(workspace, change)


def test_all_problems_are_in_one_message_without_the_network(workspace, monkeypatch):
    """`mistakes` maps each change to a part of its message; the name of a hub model has none."""
    monkeypatch.setattr(
        "transformers.AutoConfig.from_pretrained",
        lambda *_, **__: pytest.fail("a request to the hub"),
    )
    unused = "is a verl option that this trainer does not use"
    mini_batch = "actor_rollout_ref.actor.ppo_mini_batch_size"
    mistakes = {
        "trainr.save_freq=3": "unknown key trainr",
        f"{ROLLOUT}.trace.backend=mlflow": f"trace.backend {unused}",
        "data.train_batch_size=many": "data.train_batch_size=many must be a whole "
        "number of at least 1",
        f"{mini_batch}=3": f"must be a multiple of {mini_batch}",
        "env.train_files=[nowhere.jsonl]": "nowhere.jsonl: no such file",
        "env.val_files=[neither.jsonl]": "neither.jsonl: no such file",
        "actor_rollout_ref.model.path=a-name/of-the-hub": "",
        "gym.servers.reasoning_gym.start.python=gone": "no interpreter at gone",
        f"{ROLLOUT}.temperature=0": "all responses to a prompt equal",
        "algorithm.filter_groups.enable=true": "needs max_num_gen_batches",
    }
    problems: list[Exception] = []
    merged = load_config([str(CPU), str(RECIPE)], [*tiny(workspace), *mistakes], problems)
    with pytest.raises(ConfigError) as raised:
        prepare.check_recipe(*merged, "train", problems)
    first, *lines = str(raised.value).split("\n")
    assert first == "9 problems with this recipe:"
    assert [line.split(". ")[0] for line in lines] == [f"  {number}" for number in range(1, 10)]
    for part in mistakes.values():
        assert sum(part in line for line in lines) == 1 or not part, part


GREEDY = (
    r"decode greedily, so n=4 responses .*Set .*\.val_kwargs\.do_sample=true and .*temperature=0\.8"
)


@pytest.mark.parametrize(
    ("command", "changes", "message"),
    [
        (
            "train",
            ["temperature=0"],
            r"and the trainer divides by the temperature. Set .*rollout\.do_sample=true",
        ),
        ("train", ["do_sample=false"], "all responses to a prompt equal"),
        ("rollout", ["temperature=0"], "all responses to a prompt equal. Set"),
        ("train", ["top_k=1"], r"top_k=1 make all .* equal\. Remove .*rollout\.top_k\."),
        ("train", ["top_p=1e-6"], "Remove .*rollout.top_p"),
        ("train", ["temperature=0.009"], r"temperature=0\.009 make all responses"),
        ("train", ["top_k=2", "top_p=0.1", "temperature=0.1"], ""),
        (
            "evaluate",
            ["val_kwargs.n=4", "val_kwargs.do_sample=true", "val_kwargs.temperature=1"]
            + ["val_kwargs.top_k=1"],
            "top_k=1 decode greedily, so n=4 responses",
        ),
        ("rollout", ["temperature=0", "n=1"], ""),
        ("evaluate", ["temperature=0"], ""),
        ("evaluate", ["val_kwargs.n=4"], GREEDY),
        ("train", ["val_kwargs.n=4"], GREEDY),
        ("rollout", ["val_kwargs.n=4"], ""),  # this command has no evaluation
        # verl's default of val_kwargs.temperature is 0
        ("evaluate", ["val_kwargs.n=4", "val_kwargs.do_sample=true"], GREEDY),
        (
            "evaluate",
            ["val_kwargs.temperature=0.8"],
            "do_sample=False, temperature=0.8 decode greedily",
        ),
        (
            "evaluate",
            ["val_kwargs.n=4", "val_kwargs.do_sample=true", "val_kwargs.temperature=0.8"],
            "",
        ),
    ],
)
def test_greedy_decoding_of_several_responses_is_an_error(command, changes, message):
    """Without a message, the settings are valid."""
    config = load_tiny("env.val_files=[x]", *(f"{ROLLOUT}.{change}" for change in changes))
    problems = list(checks.check_sampling(config, command))
    assert len(problems) == bool(message)
    if message:
        assert re.search(message, str(problems[0]))


def find_compared_texts(function, name: str) -> list[str]:
    """The texts with which the source code of a function compares its variable `name`."""
    pattern = rf"\b(?:el)?if {re.escape(name)} (?:==|in) (.*):"
    comparisons = " ".join(re.findall(pattern, inspect.getsource(function)))
    return list(dict.fromkeys(re.findall(r'"([^"]+)"', comparisons)))


def test_the_accepted_names_are_those_that_verl_accepts():
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo import rollout_corr_helper as helper

    penalties = find_compared_texts(core_algos.kl_penalty_forward, "kl_penalty")
    assert penalties.pop() == "full"  # verl does not implement it
    assert tuple(penalties) == checks.PENALTIES
    ones = torch.ones(2, 2)
    for kind in checks.KL_TYPES:
        assert core_algos.kl_penalty(ones, ones, kind).shape == (2, 2)
    types = find_compared_texts(core_algos.get_kl_controller, "kl_ctrl.type")
    assert tuple(types) == checks.CHOICES["algorithm.kl_ctrl.type"]
    levels = find_compared_texts(helper.compute_rollout_correction_weights, "rollout_is")
    assert (None, *levels) == checks.CHOICES[f"{checks.CORRECTION}.rollout_is"]
    losses = find_compared_texts(core_algos.compute_policy_loss_bypass_mode, "loss_type")
    assert tuple(losses) == checks.CHOICES[f"{checks.CORRECTION}.loss_type"]


# --- derived values ------------------------------------------------------------------------------


def test_derived_sizes(workspace):
    recipe, inputs = load(workspace, "env.val_max_rows=3")
    rollout = recipe.rollout
    assert rollout.max_model_len == 32 + 12
    assert recipe.actor.optim.total_training_steps == 40
    # the minimum, because the model is tiny
    assert rollout.checkpoint_engine.update_weights_bucket_megabytes == 64
    assert inputs.stop_ids == {1} and len(inputs.validation) == 3
    # the value in configs/machines/cpu.yaml
    assert recipe.actor.ppo_max_token_len_per_gpu == 1024
    small = [f"{key}=100" for key in MICRO_BATCH_TOKENS]
    # a micro-batch must be large enough for a whole episode
    longer = load(workspace, "data.max_prompt_length=1000", *small).recipe.for_verl()
    assert [OmegaConf.select(longer, key) for key in MICRO_BATCH_TOKENS] == [1012] * 4
    longer.actor_rollout_ref.actor.ulysses_sequence_parallel_size = 2  # possible only on GPUs
    for key in MICRO_BATCH_TOKENS:
        OmegaConf.update(longer, key, 100)
    prepare.set_sizes(longer, inputs.model)
    assert [OmegaConf.select(longer, key) for key in MICRO_BATCH_TOKENS] == [506] * 4
    parts, _ = load(
        workspace,
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    )
    assert "distributed_executor_backend" not in parts.rollout.engine_kwargs.vllm
    variables = parts.verl.ray_kwargs.ray_init.runtime_env.env_vars
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert str(threads) == variables.OMP_NUM_THREADS and variables.TENSOR_PARALLEL == "2"
    assert "8 prompts x 8 responses = 64 episodes" in summary.summarize(recipe, inputs)
    overlap = load(workspace, f"env.val_files=[{workspace / 'train.jsonl'}]")
    assert "WARNING     8 of the held-out prompts" in summary.summarize(*overlap)


@pytest.mark.parametrize(
    ("command", "rows"), [("train", (4, 8)), ("rollout", (4, 0)), ("evaluate", (0, 8))]
)
def test_the_rows_of_a_command(workspace, command, rows):
    changes = ["env.max_rows=4", "data.train_batch_size=4"]
    inputs = load(workspace, *changes, command=command).inputs
    assert (len(inputs.train), len(inputs.validation)) == rows


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem
)
def test_every_recipe_merges(path):
    config, defaults = load_config([str(path)], [])
    assert diff(config, defaults)
    assert config.trainer.device == ("cpu" if path == CPU else "cuda")


def test_a_new_value_head_predicts_0(tmp_path):
    """Of the critic that verl makes from the recipe's model. The model's own 0.02 gives noise."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 50}
    policy = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2))
    policy.save_pretrained(tmp_path)
    hf_config = AutoConfig.from_pretrained(tmp_path, num_labels=1)
    config, _ = load_config([str(CPU)], [])
    update_model_config(hf_config, to_plain(config.critic.model.override_config))
    hf_config._attn_implementation = "sdpa"  # the recipe's is of kit/cpu, which is not imported
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path, config=hf_config)
    assert critic.score.weight.abs().max() < 1e-5
    assert torch.equal(critic.model.embed_tokens.weight, policy.model.embed_tokens.weight)


class HeadServer(BaseHTTPRequestHandler):
    """A Gym head server, and at the same address the resources server that it lists."""

    def do_GET(self):
        address = {"host": "127.0.0.1", "port": self.server.server_port}
        configuration = {
            "puzzles": {"resources_servers": {"reasoning_gym": address}},
            "unused": {"resources_servers": {"mcqa": {**address, "port": 1}}},
            "odd_agent": {
                "responses_api_agents": {"simple_agent": {"resources_server": {"name": "puzzles"}}}
            },
        }
        routes = {"paths": {"/verify": {"post": {}}}}
        answer = routes if self.path == "/openapi.json" else yaml.safe_dump(configuration)
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_a_head_server_provides_servers_that_the_recipe_lacks(workspace):
    server = ThreadingHTTPServer(("127.0.0.1", 0), HeadServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    rows = [
        row(f"say {i}", agent_ref={"name": "odd_agent" if i % 2 else "reasoning_gym_agent"})
        for i in range(8)
    ]
    files = f"env.train_files=[{write_rows(workspace / 'odd.jsonl', rows)}]"
    head = f"http://127.0.0.1:{server.server_port}"
    recipe, inputs = load(workspace, files, "env.val_files=[]", f"gym.head_server={head}")
    assert [task.server for task in inputs.train] == ["reasoning_gym", "puzzles"] * 4
    assert recipe.gym.servers["puzzles"].url == head
    # no row uses the server `unused`, so it is not contacted
    assert set(recipe.gym.servers) == {"reasoning_gym", "puzzles"}
    with pytest.raises(
        env.DataError,
        match=r"'reasoning_gym_agent' matches none of gym.servers \(puzzles, unused\)",
    ):
        load(
            workspace,
            files,
            "env.val_files=[]",
            f"gym.head_server={head}",
            "gym.servers.reasoning_gym=null",
        )
    with pytest.raises(env.DataError, match="agent_ref 'odd_agent' matches none"):
        load(workspace, files, "env.val_files=[]")
    with pytest.raises(
        network.GymStartError,
        match=r"gym\.head_server: http://127.0.0.1:9 is not a Gym head server",
    ):
        load(workspace, files, "gym.head_server=http://127.0.0.1:9")


def load_with_server(workspace, server, kind):
    files = f"env.train_files=[{{path: {workspace}/train.jsonl, server: s}}]"
    address = f"gym.servers.s={{url: '{server.url.removeprefix('http://')}', kind: {kind}}}"
    return load(workspace, files, "env.val_files=[]", "gym.servers.reasoning_gym=null", address)


@pytest.mark.parametrize(
    ("kind", "path", "answer", "message"),
    [
        ("step", "reset", {"observation": {"board": [1]}}, r"\['observation'\]: .*valid string"),
        ("verify", "verify", {"score": 1.0}, r"\['reward'\]: field required"),
        ("verify", "verify", {"reward": 100}, "gym.max_reward=10. Let the verifier scale it"),
        ("agent", "run", {}, r"gym\.servers\.s runs episodes .* Set gym\.policy_endpoint\.port"),
    ],
)
@pytest.mark.parametrize("has_description", [True, False])
def test_a_running_server_is_tried(workspace, kind, path, answer, message, has_description):
    routes = {"step": [(200, {})]} if kind == "step" else {"seed_session": [(200, {})]}
    server = ScriptedServer(**{**routes, path: [(200, answer)]})
    server.openapi = server.openapi if has_description else None
    with pytest.raises(ConfigError, match=message):
        load_with_server(workspace, server, kind)


@pytest.mark.parametrize("has_description", [True, False])
def test_a_server_needs_two_routes_and_neither_a_description_nor_a_scheme(
    workspace, has_description
):
    server = ScriptedServer(seed_session=[(200, {})], verify=[(200, {"reward": 0.25})])
    server.openapi = server.openapi if has_description else None
    recipe, inputs = load_with_server(workspace, server, "null")
    assert (recipe.gym.servers["s"].url, recipe.gym.servers["s"].kind) == (server.url, "verify")
    assert any("reward 0.25 for" in line for line in inputs.trials)
    assert server.paths()[:2] == ["/seed_session", "/verify"]


def test_a_head_server_at_an_ipv6_address_lists_servers_there():
    address = {"host": "localhost", "port": 8001}
    assert network.public_url(address, "http://[::1]:11000") == "http://[::1]:8001"


def test_a_public_policy_endpoint_needs_a_key(workspace, monkeypatch):
    monkeypatch.delenv("POLICY_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="environment variable POLICY_API_KEY"):
        load(workspace, "gym.policy_endpoint.port=12345")


def test_an_unknown_format_of_tool_calls_is_an_error(workspace):
    files = f"env.train_files=[{workspace / 'tools.jsonl'}]"
    with pytest.raises(
        ConfigError,
        match=r"multi_turn\.format=hermess: there is no such tool parser. Use auto, or .*hermes",
    ):
        load(workspace, files, "actor_rollout_ref.rollout.multi_turn.format=hermess")


def test_the_recipes_for_gsm8k_have_the_sizes_of_verls_published_run():
    """256 prompts, mini-batches of 64 and 435 steps, also in the recipe with verl's verifier."""
    math = load_tiny(files=["math"])
    function = load_tiny(files=["gsm8k_function"])
    full_batches = 7473 // math.data.train_batch_size  # GSM8K's training rows
    assert math.trainer.total_training_steps == function.trainer.total_epochs * full_batches == 435
    mini_batches = math.data.train_batch_size // math.actor_rollout_ref.actor.ppo_mini_batch_size
    assert 435 * mini_batches == 1740
    for part in ("data", "actor_rollout_ref"):
        assert OmegaConf.to_container(math[part], resolve=False) == OmegaConf.to_container(
            function[part], resolve=False
        )


def test_the_ports_of_a_recipe_are_checked_before_anything_starts(monkeypatch):
    monkeypatch.setenv("POLICY_API_KEY", "key")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        config = load_tiny(f"gym.policy_endpoint.port={port}", "gym.servers={reasoning_gym: null}")
        (problem,) = prepare.check_servers(config)
        assert str(problem).startswith("gym.policy_endpoint: no server can listen on")


def test_from_another_folder_a_missing_interpreter_is_made_in_the_project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_tiny("gym.servers.reasoning_gym.start.python=nowhere")
    (problem,) = prepare.check_servers(config)
    assert f"run `make -C {ROOT} gym`" in str(problem)
