"""Recipes: strict keys with the nearest name, impossible sizes, missing files and models; a line each, all at once."""

import base64
import gzip
import json
import os
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import yaml
from conftest import CPU, RECIPE, ROOT, load, row, tiny, write_rows
from omegaconf import OmegaConf

import env
from kit.config import checks
from kit.config.keys import diff
from kit.config.load import MICRO_BATCH_TOKENS, base_configs, load_config
from kit.config.redaction import HIDDEN, redacted
from kit.errors import ConfigError
from kit.extras.report import report_page
from kit.gym import network
from kit.runs import prepare, summary
from kit.runs.run_dir import Run

ROLLOUT = "actor_rollout_ref.rollout"


def merged(*changes, files=(str(CPU), str(RECIPE))):
    return load_config(files, changes)[0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (f"{ROLLOUT}.temprature=1", "Did you mean actor_rollout_ref.rollout.temperature"),
        ("gym.timeout=3", "unknown key gym.timeout. Did you mean gym.timeout_s"),
        ("trainr.save_freq=3", "unknown key trainr"),
        ("algorithm.pf_ppo.weight_pow=1", "this trainer does not use. Remove it"),
        (
            "data.train_files=x",
            r"data\.train_files is a verl option that this trainer does not use\. Set env\.train_files",
        ),
        (
            "rollout.temperature=1",
            r"unknown key rollout. Did you mean actor_rollout_ref\.rollout\.temperature",
        ),
        ("actor_rollout_ref.actor.clip_ratio=0.1", r"Set actor_rollout_ref\.actor\.clip_ratio_low and actor_rollout_ref"),
        (f"{ROLLOUT}.multi_turn.enable=true", r"Set gym\.servers instead"),
        ("actor_rollout_ref.actor.rollout_n=4", r"Set actor_rollout_ref\.rollout\.n instead\.$"),
        ("trainer.total_training_steps=ten", "total_training_steps=ten is not valid. Give a value like 100"),
        ("data.train_batch_size=null", "train_batch_size=None is not valid. Give a value like 64"),
        ("reward.num_workers=2", "does not use"),
        ("just_a_word", "'just_a_word' is not key=value"),
    ],
)
def test_a_key_that_nothing_reads_is_an_error(change, named):
    with pytest.raises(ConfigError, match=named):
        merged(change)


def test_what_comes_to_verls_default_is_taken():
    """Recipes from elsewhere write down what is so anyway; rollout.n is 8, and the rest follows from it."""
    merged(
        "actor_rollout_ref.actor.rollout_n=8",
        f"{ROLLOUT}.mode=async",
        "actor_rollout_ref.actor.grad_clip=1.0",
    )


def test_what_verl_knows_beyond_its_yaml_is_taken():
    config = merged(
        "+actor_rollout_ref.model.override_config.attn_implementation=eager", "data.seed=7"
    )
    assert config.actor_rollout_ref.model.override_config.attn_implementation == "eager"
    config = merged(
        "actor_rollout_ref.rollout.enable_sleep_mode=false"
    )  # a field of verl's RolloutConfig only
    assert config.actor_rollout_ref.rollout.enable_sleep_mode is False


@pytest.mark.parametrize(
    ("text", "named"),
    [("a: [", "not valid YAML"), ("- 1\n", "is a YAML mapping"), (None, "no such file")],
)
def test_bad_recipe_files_are_named(tmp_path, text, named):
    if text is not None:
        (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"recipe\.yaml: .*{named}"):
        merged(files=[str(tmp_path / "recipe.yaml")])


def test_a_recipe_is_found_by_its_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = merged(files=["math_cpu", "dapo", "cpu"])
    assert (config.trainer.device, config.actor_rollout_ref.actor.clip_ratio_high) == ("cpu", 0.28)
    for old, now in (
        ("cpu.yaml", "machines/cpu"),
        ("dapo.yaml", "algorithms/dapo"),
        ("smollm.yaml", "models/smollm2"),
    ):
        with pytest.raises(
            ConfigError,
            match=rf"configs/{old}: no such file. Use configs/{now}\.yaml, or just",
        ):
            merged(files=[f"configs/{old}"])
    (tmp_path / "dapo").write_text("trainer: {save_freq: 3}")  # a file of one's own comes first
    assert merged(files=["dapo"]).trainer.save_freq == 3


def test_names_of_recipes_are_unique():
    assert (
        Counter(path.stem for path in (ROOT / "configs").rglob("*.yaml")).most_common(1)[0][1] == 1
    )


# --- what cannot run -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (
            "actor_rollout_ref.actor.ppo_mini_batch_size=3",
            ConfigError,
            "train_batch_size=8 must be a multiple",
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
            "actor_rollout_ref.actor.strategy=megatron",
            ConfigError,
            "strategy=megatron is not supported. Use one of: fsdp, fsdp2",
        ),
        ("trainer.n_gpus_per_node=3", ConfigError, "must be a multiple of 3 GPUs"),
        ("trainer.n_gpus_per_node=0", ConfigError, "n_gpus_per_node=0 must be at least 1"),
        (
            "gym.concurrency=many",
            ConfigError,
            "gym.concurrency=many must be auto, or a number of calls",
        ),
        ("gym.concurrency.x=0", ConfigError, "gym.concurrency.x=0 must be auto"),
        ("trainer.one_step_off=2", ConfigError, "trainer.one_step_off=2 is not supported. Use one of: 0, 1"),
        (
            "trainer.resource_pools.ref=0",
            ConfigError,
            "trainer.resource_pools.ref=0 must be at least 1 GPU, or null",
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
            "env.keep_rollouts=0 must be at least 1, or null for all",
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
            "actor_rollout_ref.model.external_lib=no_such_module",
            ConfigError,
            "No module named 'no_such_module'",
        ),
        ("env.train_files=[nowhere.jsonl]", env.DataError, r"nowhere\.jsonl: no such file"),
        ("env.train_files=[]", ConfigError, "env.train_files is not set"),
        ("env.train_files=x.jsonl", ConfigError, r"must be a list. Write 'env\.train_files=\[x\.jsonl\]'"),
        ("data.max_prompt_length=3", ConfigError, "have no usable rows"),
        ("env.max_rows=7", ConfigError, "have 7 usable rows, fewer than data.train_batch_size=8"),
        ("gym.servers.reasoning_gym.url=http://127.0.0.1:1", ConfigError, "must have either url"),
        ("gym.servers.reasoning_gym.start.python=nowhere", network.GymStartError, "`make gym`"),
    ],
)
def test_what_cannot_run_is_an_error_before_anything_starts(workspace, change, error, named):
    with pytest.raises(error, match=named):
        load(workspace, change)


def test_all_that_is_wrong_is_told_at_once_and_without_the_network(workspace, monkeypatch):
    monkeypatch.setattr(
        "transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("asked the hub")
    )
    wrong = {
        "trainr.save_freq=3": "unknown key trainr",
        f"{ROLLOUT}.trace.backend=mlflow": "trace.backend is a verl option that this trainer does not use",
        "data.train_batch_size=many": "data.train_batch_size=many is not valid. Give a value like 64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=3": "must be a multiple of actor_rollout_ref.actor.ppo_mini",
        "env.train_files=[nowhere.jsonl]": "nowhere.jsonl: no such file",
        "env.val_files=[neither.jsonl]": "neither.jsonl: no such file",
        "actor_rollout_ref.model.path=a-name/of-the-hub": "",
        "gym.servers.reasoning_gym.start.python=gone": "no interpreter at gone",
        f"{ROLLOUT}.temperature=0": "all responses to a prompt equal",
        "algorithm.filter_groups.enable=true": "needs max_num_gen_batches",
    }
    problems: list[Exception] = []
    config, _ = load_config([str(CPU), str(RECIPE)], [*tiny(workspace), *wrong], problems)
    with pytest.raises(ConfigError) as raised:
        prepare.check_recipe(config, "train", problems)
    first, *lines = str(raised.value).split("\n")
    assert first == "9 problems with this recipe:"
    assert [line.split(". ")[0] for line in lines] == [f"  {number}" for number in range(1, 10)]
    for named in wrong.values():
        assert sum(named in line for line in lines) == 1 or not named, named


GREEDY = r"decode greedily, so n=4 responses .*Set .*\.val_kwargs\.do_sample=true and .*temperature=0\.8"


@pytest.mark.parametrize(
    ("command", "changes", "named"),
    [
        (
            "train",
            ["temperature=0"],
            r"and the trainer divides by the temperature. Set .*rollout\.do_sample=true",
        ),
        ("train", ["do_sample=false"], "all responses to a prompt equal"),
        ("rollout", ["temperature=0"], "all responses to a prompt equal. Set"),
        ("rollout", ["temperature=0", "n=1"], ""),
        ("evaluate", ["temperature=0"], ""),
        ("evaluate", ["val_kwargs.n=4"], GREEDY),
        ("train", ["val_kwargs.n=4"], GREEDY),
        ("rollout", ["val_kwargs.n=4"], ""),  # which evaluates nothing
        (
            "evaluate",
            ["val_kwargs.n=4", "val_kwargs.do_sample=true"],
            GREEDY,
        ),  # verl's temperature is 0
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
def test_answers_that_should_differ_are_sampled(command, changes, named):
    config = merged("env.val_files=[x]", *(f"{ROLLOUT}.{change}" for change in changes))
    found = list(checks.check_sampling(config, command))
    assert len(found) == bool(named)
    if named:
        with pytest.raises(AssertionError if not found else ConfigError, match=named):
            raise ConfigError(found[0])


def test_what_verl_knows_is_what_is_taken():
    """The lists are read from verl's source: none is empty, and verl computes with each name in them."""
    from verl.trainer.ppo import core_algos, rollout_corr_helper

    ones = torch.ones(2, 2)
    modes = checks.string_literals_compared_with(core_algos.agg_loss, "loss_agg_mode")
    assert len(modes) == 5 and all(core_algos.agg_loss(ones, ones, mode) > 0 for mode in modes)
    kinds = checks.string_literals_compared_with(core_algos.kl_penalty_forward, "kl_penalty")
    assert kinds.pop() == "full" and len(kinds) == 7  # which verl has not
    assert all(
        core_algos.kl_penalty(ones, ones, f"{kind}{plus}").shape == (2, 2)
        for kind in kinds
        for plus in ("", "+")
    )
    assert checks.string_literals_compared_with(core_algos.get_kl_controller, "kl_ctrl.type") == ["fixed", "adaptive"]
    weigh = rollout_corr_helper.compute_rollout_correction_weights
    assert checks.string_literals_compared_with(weigh, "rollout_is") == ["token", "sequence"]
    assert set(checks.string_literals_compared_with(core_algos.compute_policy_loss_bypass_mode, "loss_type")) == {
        "ppo_clip",
        "reinforce",
    }


# --- what follows --------------------------------------------------------------------------------


def test_derived_sizes(workspace):
    config, data = load(workspace, "env.val_max_rows=3")
    rollout = config.actor_rollout_ref.rollout
    assert rollout.max_model_len == 32 + 12
    assert config.actor_rollout_ref.actor.optim.total_training_steps == 40
    assert (
        rollout.checkpoint_engine.update_weights_bucket_megabytes == 64
    )  # the floor: the model is tiny
    assert data.stop_ids == {1} and len(data.validation) == 3
    assert (
        config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 1024
    )  # as configs/machines/cpu.yaml says
    small = [f"{key}=100" for key in MICRO_BATCH_TOKENS]
    longer, _ = load(
        workspace, "data.max_prompt_length=1000", *small
    )  # a whole episode must fit a micro-batch
    assert [OmegaConf.select(longer, key) for key in MICRO_BATCH_TOKENS] == [1012] * 4
    longer.actor_rollout_ref.actor.ulysses_sequence_parallel_size = 2  # on GPUs
    for key in MICRO_BATCH_TOKENS:
        OmegaConf.update(longer, key, 100)
    prepare.set_sizes(longer, data.model)
    assert [OmegaConf.select(longer, key) for key in MICRO_BATCH_TOKENS] == [506] * 4
    parts, _ = load(
        workspace,
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    )
    assert "distributed_executor_backend" not in parts.actor_rollout_ref.rollout.engine_kwargs.vllm
    threads = parts.ray_kwargs.ray_init.runtime_env.env_vars
    assert (
        str(max(1, len(os.sched_getaffinity(0)) // 2)) == threads.OMP_NUM_THREADS
        and threads.TENSOR_PARALLEL == "2"
    )
    assert "8 prompts x 8 responses = 64 episodes" in summary.summarize(config, data, "train")
    overlap = load(workspace, f"env.val_files=[{workspace / 'train.jsonl'}]")
    assert "WARNING     8 of the held-out prompts" in summary.summarize(*overlap, "train")


def test_the_summary_names_functions_of_ones_own(workspace):
    config, data = load(workspace)
    usual = summary.summarize(config, data, "train").splitlines()
    config.env.sampler = "templates/samplers.py:by_pass_rate"
    config.env.reward = {"function": "templates/rewards.py:overlong", "limit": 48}
    config.env.filters = [
        "templates/filters.py:drop_uniform",
        {"function": "x.py:f", "reasons": ["length"]},
    ]
    (line,) = set(summary.summarize(config, data, "train").splitlines()) - set(usual)
    filters = "templates/filters.py:drop_uniform, x.py:f {reasons: [length]}"
    functions = f"templates/rewards.py:overlong {{limit: 48}}; filters {filters}"
    assert line == f"reward      {functions}; sampler templates/samplers.py:by_pass_rate"
    config.env.reward = config.env.sampler = None
    config.env.filters = ["x.py:f"]
    assert "filters     x.py:f" in summary.summarize(config, data, "train").splitlines()


@pytest.mark.parametrize(
    ("command", "rows"), [("train", (4, 8)), ("rollout", (4, 0)), ("evaluate", (0, 8))]
)
def test_the_rows_of_a_command(workspace, command, rows):
    config = merged(*tiny(workspace, "env.max_rows=4", "data.train_batch_size=4"))
    data = prepare.prepare(config, command)
    assert (len(data.train), len(data.validation)) == rows


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem
)
def test_every_recipe_is_short_and_merges(path):
    assert len(path.read_text().splitlines()) <= 125
    config, defaults = load_config([str(path)], [])
    assert diff(config, defaults)
    assert config.trainer.device == ("cpu" if path == CPU else "cuda")


class Head(BaseHTTPRequestHandler):
    """A head server and, at the same address, the resources server that it knows."""

    def do_GET(self):
        here = {"host": "127.0.0.1", "port": self.server.server_port}
        known = {
            "puzzles": {"resources_servers": {"reasoning_gym": here}},
            "unused": {"resources_servers": {"mcqa": {**here, "port": 1}}},
            "odd_agent": {
                "responses_api_agents": {"simple_agent": {"resources_server": {"name": "puzzles"}}}
            },
        }
        routes = {"paths": {"/verify": {"post": {}}}}
        data = json.dumps(
            routes if self.path == "/openapi.json" else yaml.safe_dump(known)
        ).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_a_head_server_fills_in_what_the_recipe_does_not_name(workspace):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Head)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    rows = [
        row(f"say {i}", agent_ref={"name": "odd_agent" if i % 2 else "reasoning_gym_agent"})
        for i in range(8)
    ]
    files = f"env.train_files=[{write_rows(workspace / 'odd.jsonl', rows)}]"
    head = f"http://127.0.0.1:{server.server_port}"
    config, data = load(workspace, files, "env.val_files=[]", f"gym.head_server={head}")
    assert [task.server for task in data.train] == ["reasoning_gym", "puzzles"] * 4
    assert (
        config.gym.servers.puzzles.url == head
    )  # and `unused`, where nobody listens, is not asked for
    assert set(config.gym.servers) == {"reasoning_gym", "puzzles"}
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
        )  # left out
    with pytest.raises(env.DataError, match="agent_ref 'odd_agent' matches none"):
        load(workspace, files, "env.val_files=[]")
    with pytest.raises(
        network.GymStartError, match=r"gym\.head_server: http://127.0.0.1:9 is not a Gym head server"
    ):
        load(workspace, files, "gym.head_server=http://127.0.0.1:9")


def test_an_address_for_the_agents_of_others_wants_a_key(workspace, monkeypatch):
    monkeypatch.delenv("POLICY_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="environment variable POLICY_API_KEY"):
        load(workspace, "gym.policy_endpoint.port=12345")


def test_an_unknown_format_of_tool_calls_is_named(workspace):
    files = f"env.train_files=[{workspace / 'tools.jsonl'}]"
    with pytest.raises(
        ConfigError,
        match=r"multi_turn\.format=hermess: vLLM has no such tool parser. Use one of: .*hermes",
    ):
        load(workspace, files, "actor_rollout_ref.rollout.multi_turn.format=hermess")


# --- secrets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "JUDGE_KEY", "MY_SECRET_2", "DB_PASSWORD", "aws_credential"]
)
def test_a_variable_with_a_secrets_name_is_written_nowhere(workspace, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, "planted8")  # the shortest that is taken for a secret
    config, _ = load(
        workspace, "gym.servers.reasoning_gym.start.config.url=http://planted8.example/v1"
    )
    for command in ("train", "evaluate"):
        with Run(config, command) as run:
            pass
    written = [path.read_text() for path in tmp_path.rglob("*.yaml")]
    assert len(written) == 2 and "planted8" not in "".join(written)
    assert all(f"${{oc.env:{name}}}.example" in text for text in written)
    page = report_page.write_page([run.folder], tmp_path / "page.html").read_text()
    packed = page.partition('id="data">')[2].partition("<")[0]
    assert "planted8" not in gzip.decompress(base64.b64decode(packed)).decode()


def test_a_dry_run_shows_no_secret(workspace, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "planted8")
    extra = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    config, data = load(workspace, f"{extra}.hf_token=planted8", f"{extra}.api_key=sk-planted")
    text = summary.describe_dry_run(config, base_configs()[0], data, "train")
    assert f"{extra}.hf_token: ${{oc.env:HF_TOKEN}}" in text and f"{extra}.api_key: " in text
    assert "planted8" not in text and "sk-planted" not in text


LITERALS = [
    ("api_key", "sk-planted"),
    ("openai_api_key", "sk-planted"),
    ("judge_key", "planted"),
    ("token", "planted"),
    ("hub_token", "planted"),
    ("password", "planted"),
    ("client_secret", "planted"),
    ("Authorization", "Bearer planted"),
    ("SERVICE_KEY", "planted-8"),
    ("credentials", "{user: me, pass: planted}"),
    ("api_keys", "[planted, planted2]"),
    ("key", "'${oc.env:NO_SUCH_VARIABLE,planted}'"),
    ("base_url", "https://me:pl@nted-planted@host/v1"),
    ("base_url", "https://planted@host/v1"),
    ("base_url", "'https://host/v1?n=1&api_key=planted'"),
]


@pytest.mark.parametrize(("name", "value"), LITERALS)
def test_a_literal_secret_is_hidden(name, value):
    config = merged(f"gym.servers.judge.start.config={{{name}: {value}, model: kept}}")
    written = OmegaConf.to_yaml(redacted(config).gym.servers.judge)
    assert "planted" not in written and "model: kept" in written, written
    assert name in written


def test_what_is_no_secret_stays():
    """Keys of verl's with `key` or `token` in their names, and the name of the variable that holds a key."""
    stays = {
        "eos_token": "<end>",
        "api_key_env": "JUDGE_KEY",
        "prompt_key": "question",
        "token": None,
    }
    config = merged("data.prompt_key=question")
    OmegaConf.update(config, "gym.servers.judge.start.config", stays, force_add=True)
    assert redacted(config).gym.servers.judge.start.config == stays
    assert OmegaConf.to_yaml(redacted(config)).count(HIDDEN) == 0
