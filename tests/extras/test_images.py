"""Rows with images: files, tokens of prompts, inputs of the engine, batches, checks, training."""

from __future__ import annotations

import http.server
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import env
import training
from extras import images, sft
from extras.images import ImageProcessor, make_processor
from gym_client import GymError
from kit.chat.processor import TextProcessor
from kit.chat.template import ChatTemplate
from kit.data import rollout_files
from kit.data.episode import Episode, TurnSpan
from kit.data.tasks import TaskLoader
from kit.errors import ConfigError
from kit.recipe.entries import Entry
from kit.recipe.load import read_source
from kit.recipe.model_files import load_model_files
from kit.recipe.settings import make_settings
from kit.run import prepare, summary
from tests.helpers.http import served
from tests.helpers.models import (
    COLORS,
    IMAGE_CHAT_TEMPLATE,
    data_url,
    image_row,
    png,
)
from tests.helpers.recipes import (
    CPU,
    RECIPE,
    ROOT,
    command,
    gym_examples,
    make_partial,
    metrics_of,
    row,
    run,
    tiny,
    write_rows,
)
from tests.helpers.rollouts import ask_endpoint, context_of


def load_image_processor(model: Path) -> ImageProcessor:
    """The processor of a model. It may fetch images from this machine."""
    policy = {"model": {"path": str(model)}}
    recipe = make_partial({"actor_rollout_ref": policy, "env": {"image_hosts": ["127.0.0.1"]}})
    files = load_model_files(recipe)
    processor = make_processor(recipe, files.hf_config, files.tokenizer)
    assert processor
    return processor


@pytest.fixture(scope="module")
def processor(vision_model):
    return load_image_processor(vision_model)


def read_image(processor, source, where):
    """Read the image of a row at `where`, as the loader of rows does."""
    messages = env.render_row(image_row(source), where)[0]
    return processor.read_images(messages, where)[0]


def test_an_unreadable_image_is_an_error_that_names_the_row(processor, workspace, monkeypatch):
    monkeypatch.setattr(images, "MAX_FETCHED_BYTES", 10**4)
    requests: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_response(302 if "moved" in self.path else 200 if "ok" in self.path else 404)
            self.send_header("Location", f"{url}/ok?after_redirect")
            self.end_headers()
            self.wfile.write(bytes(10**5) if "long" in self.path else png(COLORS["b"]))

    where = f"{workspace / 'rows.jsonl'}:3"
    path = workspace / "c.png"
    path.write_bytes(png(COLORS["r"]))
    with served(Handler) as url:
        for source in (str(path), path.as_uri(), "c.png"):
            assert read_image(processor, source, where) == (str(path), 16)
        assert read_image(processor, f"{url}/ok", where).token_count == 16
        unreadable = {  # {source: the reason in the message}
            f"{url}/gone": "404",
            f"{url}/moved": "302",
            f"{url}/ok_long": "over 10000 bytes",
            "http://elsewhere/x.png": "elsewhere is not in env.image_hosts",
            "none.png": "No such file",
            "data:image/png;base64,@@": "cannot be read",
            data_url(b"no image"): "cannot identify",
        }
        for source, reason in unreadable.items():
            with pytest.raises(env.DataError, match=rf"rows\.jsonl:3: image .*{reason}"):
                read_image(processor, source, where)
        assert "/moved" in requests and "/ok?after_redirect" not in requests
    assert processor.load_image(f"{url}/ok").size == (40, 30)  # fetched once, and the server ended
    with pytest.raises(env.DataError, match="1 images, but 2 placeholders"):
        load_task(processor, image_row("c.png", "so <image>"), where)


def load_task(processor, row, where) -> env.Task:
    """Make the task of a row."""
    template = ChatTemplate(processor, {processor.tokenizer.eos_token_id})
    return TaskLoader(template, {"s": "s"}, 999).make_task(row, where, Entry("rows.jsonl"))


def test_a_model_of_text_reads_no_images(processor):
    with pytest.raises(env.UnsupportedRowError, match="the model reads no images"):
        load_task(TextProcessor(processor.tokenizer), image_row("c.png"), "rows.jsonl:1")


def make_episode(task: env.Task, group_id: str, ids: list[int]) -> Episode:
    """Make an episode with one turn and the reward 1."""
    turns = [TurnSpan(0, len(ids), 0)]
    lists = (ids, [1] * len(ids), [-1.0] * len(ids), turns)
    episode = Episode(task.row_id, group_id, "s", task.prompt_ids, *lists)
    episode.row = task.row
    episode.images = [image.source for image in task.images]
    episode.reward = 1.0
    return episode


def test_an_image_has_one_token_for_each_feature_of_the_model(processor, workspace):
    two_images = image_row(data_url(png(COLORS["r"])))
    content = two_images["responses_create_params"]["input"][0]["content"]
    content.insert(1, {"type": "input_image", "image_url": "b.png"})
    (workspace / "b.png").write_bytes(png(COLORS["b"], (70, 90)))
    task = load_task(processor, two_images, f"{workspace / 'rows.jsonl'}:1")
    ids = task.prompt_ids
    assert [part["type"] for part in task.messages[0]["content"]] == ["image", "image", "text"]
    assert ids.count(processor.placeholder) == 32
    assert processor.tokenizer.decode(ids).endswith("which ")
    engine_ids, inputs = processor.engine_inputs([*ids, 5, 6], task)
    assert engine_ids.count(processor.placeholder) == 2
    assert engine_ids[-2:] == [5, 6] and len(engine_ids) == len(ids) - 30 + 2
    loaded = inputs["image_data"]
    assert [image.getpixel((0, 0)) for image in loaded] == list(COLORS.values())
    again = processor.engine_inputs(ids, task)[1]["image_data"]
    assert [a is b for a, b in zip(again, loaded, strict=True)] == [True, True]  # decoded once
    text_task = env.Task("", row(), "", [{"role": "user", "content": "x"}], [5])
    assert processor.engine_inputs([5], text_task) == ([5], {})
    assert processor.sampling_params() == {"logit_bias": {processor.placeholder: -100.0}}


def build_batch(processor, episodes):
    tokenizer = SimpleNamespace(pad_token_id=0)
    recipe: Any = SimpleNamespace(rollout=SimpleNamespace(temperature=1.0))
    inputs: Any = SimpleNamespace(processor=processor, tokenizer=tokenizer)
    return training.to_batch(episodes, inputs, recipe)


def test_a_relative_path_is_relative_to_the_folder_of_the_row_file(processor, workspace):
    """This holds in the update too, where the responses to a prompt share its images."""
    episodes = []
    for name, color in COLORS.items():
        (workspace / name).mkdir()
        (workspace / name / "1.png").write_bytes(png(color))
        where = f"{workspace / name / 'rows.jsonl'}:1"
        task = load_task(processor, image_row("1.png"), where)
        episodes += [make_episode(task, f"1/{name}", [5])] * 2
    batch = build_batch(processor, episodes)
    assert batch.batch["image"].tolist() == [1, 1, 2, 2]
    for episode in episodes:  # a replay finds the images of rows that a function generated
        assert rollout_files.list_images(episode, None) == episode.images
    inputs = batch.non_tensor_batch["multi_modal_inputs"]
    red, same_red, blue, _ = (tensors["pixel_values"] for tensors in inputs)
    assert red is same_red
    # channel 0 is red, channel 2 is blue
    assert (red[0, 0] > red[0, 2]).all() and (blue[0, 0] < blue[0, 2]).all()


def test_text_of_the_environment_is_encoded_for_the_model(processor):
    """The chat template of this model accepts only content in parts."""
    tokenizer = processor.tokenizer
    stop_ids = {tokenizer.eos_token_id}
    template = ChatTemplate(processor, stop_ids)
    (stop_id,) = stop_ids
    ids = template.encode_continuation([{"role": "user", "content": "count 7"}], stop_id)
    assert tokenizer.decode(ids).strip() == "count 7"
    with pytest.raises(GymError, match="stands for an image"):
        template.encode_continuation([{"role": "user", "content": "so <image>"}], stop_id)
    part = {"type": "image_url", "image_url": {"url": "x"}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    context = context_of(None, tokenizer, template=template)
    reply = ask_endpoint(body, context)
    assert reply.status == 400 and reply.body["error"]["param"] == "messages"


def test_options_that_do_not_work_with_images_are_refused(processor):
    task = env.Task("", {}, "s", [], [1], images=[env.TaskImage("x", 1)])
    agent = "gym.servers={s: {start: {agent: simple_agent}}}"
    lora = "actor_rollout_ref.model.lora_rank=8"
    source = read_source([], ["actor_rollout_ref.rollout.name=hf", lora, agent])
    with pytest.raises(
        ConfigError, match=r"do not work with .*rollout\.name=hf; .*lora_rank; an agent server"
    ):
        processor.derive(make_settings(source, "evaluate"), [task])
    settings = make_settings(read_source([], []), "evaluate")
    changes = processor.derive(settings, [task])
    assert changes == {"actor_rollout_ref.rollout.limit_images": 1}
    drafts = "+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config={method: ngram}"
    settings = make_settings(read_source([], [drafts]), "evaluate")
    with pytest.raises(ConfigError, match="speculative_config: vLLM cannot ban tokens with it"):
        processor.derive(settings, [])


@pytest.fixture(scope="module")
def qwen(workspace) -> Path:
    """The files of a tiny Qwen2.5-VL, without weights."""
    from transformers import AutoTokenizer, Qwen2_5_VLConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    folder = workspace / "qwen"
    tokenizer = AutoTokenizer.from_pretrained(workspace / "untied")
    tokenizer.add_tokens(
        ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"], special_tokens=True
    )
    pad, start, end = (
        tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        for name in ("image_pad", "vision_start", "vision_end")
    )
    tokenizer.chat_template = IMAGE_CHAT_TEMPLATE.replace(
        "<image>", "<|vision_start|><|image_pad|><|vision_end|>"
    )
    text: dict[str, Any] = {"vocab_size": len(tokenizer), "hidden_size": 64, "num_hidden_layers": 2}
    text |= {"intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    text |= {"max_position_embeddings": 8192}
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
    vision = {"hidden_size": 32, "intermediate_size": 64, "depth": 2, "num_heads": 2}
    vision |= {"out_hidden_size": 64}
    ids: dict[str, Any] = {"image_token_id": pad, "vision_start_token_id": start}
    ids |= {"vision_end_token_id": end}
    Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids).save_pretrained(folder)
    Qwen2VLImageProcessorPil().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_recipe_for_qwen2_5_vl_is_checked_and_its_batch_built(workspace, qwen):
    """It works without torchvision. An image has positions in three dimensions (get_rope_index)."""
    (clicks,) = [path for path in gym_examples() if path.match("circle_click/*/example.jsonl")]
    changes = [f"actor_rollout_ref.model.path={qwen}", f"env.train_files=[{clicks}]"]
    changes += [f"gym.servers.circle_click.start.python={ROOT / '.venv-gym' / 'bin' / 'python'}"]
    recipe, inputs, _ = prepare.prepare(read_source(["circle_click"], changes))
    assert "8 cuda, 8 vLLM replicas" in summary.summarize(recipe, inputs)
    assert recipe.rollout.limit_images == 1
    layers = recipe.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap
    assert layers == ["Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"]
    task = inputs.train[0]
    # 70 x 70 patches of 14 x 14 pixels, with four patches in a token
    assert task.prompt_ids.count(inputs.processor.placeholder) == 35 * 35
    batch = build_batch(inputs.processor, [make_episode(task, "1/0", [5, 6])] * 2)
    positions = batch.batch["position_ids"]
    ids = batch.batch["input_ids"][0]
    assert positions.shape == (2, 4, len(ids))
    image = positions[0][:, ids == inputs.processor.placeholder]
    assert len(set(image[1].tolist())) == 1
    assert len(set(image[2].tolist())) == len(set(image[3].tolist())) == 35
    last = positions[0, :, -1].tolist()
    assert last[1] == last[2] == last[3] < last[0] == len(ids) - 1
    tensors = batch.non_tensor_batch["multi_modal_inputs"]
    assert tensors[0] is tensors[1] and tensors[0]["image_grid_thw"].tolist() == [[1, 70, 70]]
    with pytest.raises(ConfigError, match="a CPU, on which verl"):
        prepare.prepare(read_source(["circle_click", "cpu"], changes))


def test_sft_of_a_model_that_reads_images_is_refused(workspace, vision_model):
    write_rows(workspace / "chats.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    changes = [
        f"env.train_files=[{workspace / 'chats.jsonl'}]",
        "env.val_files=[]",
        f"actor_rollout_ref.model.path={vision_model}",
    ]
    source = read_source([str(CPU), str(RECIPE), "sft"], tiny(workspace, *changes))
    with pytest.raises(ConfigError, match="`sft` does not support models that read images"):
        sft.prepare(source)


@pytest.mark.soak
def test_a_model_learns_to_name_a_color(workspace, vision_model):
    """All texts are equal, so only the image helps. A constant answer is right in half of them.

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
        "trainer.total_training_steps=34",
    ]
    done = run(command(workspace, *tiny(workspace, *changes)), workspace, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folder = workspace / "runs" / "colors"
    trained = [m for m in metrics_of(folder) if "actor/grad_norm" in m]
    assert len(trained) == 34
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
    held_out = [m[key] for m in metrics_of(folder) if key in m]
    assert held_out[0] <= 0.5 < held_out[-1]
