"""Rows with images, for a model that sees: read, counted, shown to vLLM, trained on."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.server
import io
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, command, gym_examples, metrics_of, row, run, served, tiny, write_rows
from omegaconf import OmegaConf
from PIL import Image
from tiny_models import IMAGE_CHAT_TEMPLATE, make_vision_model

import env
import inference
import training
from gym_client import GymError
from kit.config.load import load_config
from kit.config.model_files import load_model_files
from kit.data.episode import Episode, TurnSpan
from kit.data.processor import TextProcessor
from kit.data.tasks import TaskLoader
from kit.errors import ConfigError
from kit.extras import images
from kit.extras.images import make_processor
from kit.rollout import chat, openai_server
from kit.runs import prepare, summary

COLOURS = {"r": (250, 20, 20), "b": (20, 20, 250)}


def png(colour: tuple[int, int, int], size: tuple[int, int] = (40, 30)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


def url(raw: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(raw).decode()}"


def picture(source: str, text: str = "which", answer: str = "r") -> dict:
    """A row that asks for the colour of an image."""
    parts = [
        {"type": "input_image", "image_url": source, "detail": "auto"},
        {"type": "input_text", "text": text},
    ]
    asked = row(text, answer)
    asked["responses_create_params"]["input"] = [{"role": "user", "content": parts}]
    return asked


@pytest.fixture(scope="module")
def seeing(workspace) -> Path:
    return make_vision_model(workspace / "seeing", workspace / "untied")


@pytest.fixture(scope="module")
def processor(seeing):
    keys = {"path": str(seeing), "trust_remote_code": False, "custom_chat_template": None}
    config = OmegaConf.create(
        {"actor_rollout_ref": {"model": keys}, "env": {"image_hosts": ["127.0.0.1"]}}
    )
    files = load_model_files(config)
    return make_processor(config, files.hf_config, files.tokenizer)


def test_an_image_is_as_many_tokens_as_the_model_has_features(processor, workspace):
    both = picture(url(png(COLOURS["r"])))
    both["responses_create_params"]["input"][0]["content"].insert(
        1, {"type": "input_image", "image_url": "b.png"}
    )
    (workspace / "b.png").write_bytes(png(COLOURS["b"], (70, 90)))
    where = f"{workspace / 'rows.jsonl'}:1"
    messages, _ = env.render_row(both, where)
    assert [part["type"] for part in messages[0]["content"]] == ["image", "image", "text"]
    ids = env.encode_messages(messages, [], processor.tokenizer, where, processor)
    assert ids.count(processor.placeholder) == 32 and processor.tokenizer.decode(ids).endswith(
        "which "
    )
    task = env.Task(where, both, "", messages, ids)
    asked, shown = processor.engine_inputs([*ids, 5, 6], task)
    assert (
        asked.count(processor.placeholder) == 2
        and asked[-2:] == [5, 6]
        and len(asked) == len(ids) - 30 + 2
    )
    assert [image.getpixel((0, 0)) for image in shown["image_data"]] == list(COLOURS.values())
    assert processor.compute_inputs(shown["image_data"])["pixel_values"].shape == (2, 3, 32, 32)
    text_task = env.Task("", row(), "", [{"role": "user", "content": "x"}], [5])
    assert processor.engine_inputs([5], text_task) == ([5], {})
    assert processor.sampling_params() == {"logit_bias": {processor.placeholder: -100.0}}


def test_what_cannot_be_read_names_the_row(processor, workspace):
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if "moved" in self.path:
                self.send_response(302)
                self.send_header("Location", f"{here}/ok?from_elsewhere")
                self.end_headers()
                return
            self.send_response(200 if "ok" in self.path else 404)
            self.end_headers()
            self.wfile.write(png(COLOURS["b"]))

    where = f"{workspace / 'rows.jsonl'}:3"
    with served(Handler) as here:
        (workspace / "c.png").write_bytes(png(COLOURS["r"]))
        os.mkfifo(workspace / "pipe.png")  # to which nobody writes
        for source in (
            f"{here}/ok",
            str(workspace / "c.png"),
            (workspace / "c.png").as_uri(),
            "c.png",
        ):
            assert processor.load_image(source, where).size == (40, 30)
        wrong = {
            f"{here}/gone": "404",
            f"{here}/moved": "it redirects to http://127.0.0.1:.*, which is refused. Give the "
            "final address",
            "http://elsewhere/x.png": "elsewhere is not in env.image_hosts",
            "none.png": "No such file",
            "data:image/png;base64,@@": "cannot be read",
            url(b"no image"): "cannot identify",
            url(png((0, 0, 0), (5000, 4000))): "5000 x 4000 pixels, over 16777216. Make it smaller",
            "pipe.png": "not a regular file",
            "/dev/zero": "not a regular file",
        }
        for source, why in wrong.items():
            with pytest.raises(env.DataError, match=rf"rows\.jsonl:3: image .*{why}"):
                processor.load_image(source, where)
        assert f"{here}/moved".removeprefix(here) in asked and "/ok?from_elsewhere" not in asked
    assert processor.load_image(f"{here}/ok", where).size == (40, 30)  # which is not fetched again
    with pytest.raises(env.DataError, match="1 images, but 2 placeholders"):
        messages = env.render_row(picture("c.png", "so <image>"), where)[0]
        env.encode_messages(messages, [], processor.tokenizer, where, processor)


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "TGA"])
def test_five_formats_are_read(processor, name):
    out = io.BytesIO()
    Image.new("RGB", (32, 32), (250, 20, 20)).save(out, name)
    if name in images.FORMATS:
        red, green, blue = processor.load_image(url(out.getvalue()), "x:1").getpixel((9, 9))
        assert red > 230 and green < 40 and blue < 40
        return
    with pytest.raises(
        env.DataError, match=r"x:1: image .* cannot be read \(cannot identify image file"
    ):
        processor.load_image(url(out.getvalue()), "x:1")


def test_a_file_is_read_up_to_the_limit(processor, tmp_path, monkeypatch):
    raw = png(COLOURS["r"])
    (tmp_path / "a.png").write_bytes(raw)
    monkeypatch.setattr(images, "MAX_FILE_BYTES", len(raw))
    for source in ("a.png", url(raw)):
        assert processor.load_image(source, f"{tmp_path}/rows.jsonl:1").size == (40, 30)
    (tmp_path / "a.png").write_bytes(raw + b"0")
    for source in ("a.png", url(raw + b"0")):
        with pytest.raises(
            env.DataError, match=r"rows\.jsonl:1: image .*: its file is over 0 MiB. Make it smaller"
        ):
            processor.load_image(source, f"{tmp_path}/rows.jsonl:1")
    asked = []
    monkeypatch.setattr(
        images.os, "fstat", lambda number: asked.append(number) or os.stat("/dev/null")
    )
    with pytest.raises(
        env.DataError, match="not a regular file"
    ):  # one that became a device after it was looked at
        processor.load_image("a.png", f"{tmp_path}/rows.jsonl:1")
    assert asked


def test_of_a_file_without_end_only_the_limit_is_read(tmp_path, monkeypatch):
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(10**12)  # bytes, none of them on the disk
    monkeypatch.setattr(images, "MAX_FILE_BYTES", 1000)
    assert images.read_file(tmp_path / "a.png") == bytes(1001)


def test_a_download_without_end_is_given_up_at_the_limit(monkeypatch):
    sent = []

    class Endless(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(1000):
                    self.wfile.write(bytes(10**6))
                    sent.append(10**6)

    monkeypatch.setattr(images, "MAX_FILE_BYTES", 10**6)
    with served(Endless) as address, pytest.raises(images.TooLargeError):
        images.fetch(f"{address}/x", "x:1")
    assert sum(sent) < 10**8  # what the sockets buffer is less


def test_the_images_of_a_row_have_a_limit_together(processor, monkeypatch):
    """Of two images of 1,200 pixels each; neither is decoded before its size is known."""
    messages, _ = env.render_row(picture(url(png(COLOURS["r"]))), "x:1")
    messages[0]["content"] += [{"type": "image", "image": url(png(COLOURS["b"]))}]
    monkeypatch.setattr(images, "MAX_ROW_PIXELS", 2400)
    assert len(processor.load_images(messages, "x:1")) == 2
    monkeypatch.setattr(images, "MAX_ROW_PIXELS", 2399)
    together = r"x:1: image .*: 40 x 30 pixels: the images of the row have over 2399 pixels together. Make it smaller"
    with pytest.raises(env.DataError, match=together):
        processor.load_images(messages, "x:1")


PEAK = """
import resource, sys
from env import DataError
from kit.extras import images
from kit.extras.images import make_processor
from PIL import Image, PngImagePlugin
big = open(sys.argv[1]).read()
vision = images.ImageProcessor(None, None, 0, [0], "", False)
messages = [{"role": "user", "content": [{"type": "image", "image": big}] * 16}]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    vision.load_images(messages, "x:1")
except DataError as error:
    print(str(error)[-90:])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def test_a_row_of_many_large_images_takes_little_memory(tmp_path):
    """16 images of 16 Mpixel, 64 MiB each once they are decoded, from 50 KB of text each."""
    (tmp_path / "big").write_text(url(png((0, 0, 0), (4096, 4096))))
    done = run([sys.executable, "-c", PEAK, str(tmp_path / "big")], ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    told, peak = done.stdout.splitlines()
    assert "have over 33554432 pixels together. Make it smaller" in told and int(peak) < 300  # MiB


def test_a_small_image_is_decoded_once_and_a_large_one_is_not_kept():
    images.decode_small.cache_clear()
    small, large = png(COLOURS["r"], (1024, 1024)), png(COLOURS["r"], (1025, 1024))
    assert images.decode(small) is images.decode(small)
    assert images.decode(large) is not images.decode(large)
    assert images.decode_small.cache_info().currsize == 1


def test_an_image_that_drips_in_is_given_up(monkeypatch):
    """A server that sends a byte now and then, each well within the client's own timeout."""

    class Dripping(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b"x")
                    time.sleep(0.1)

    monkeypatch.setattr(images, "FETCH_TIMEOUT_S", 0.5)
    began = time.monotonic()
    with (
        served(Dripping) as address,
        pytest.raises(TimeoutError, match=r"not complete after 0\.5 s"),
    ):
        images.fetch(f"{address}/x", "x:1")
    assert time.monotonic() - began < 5


def test_what_is_fetched_is_not_unpacked():
    """100 MB of zeros in 100 KB of gzip."""

    class Packed(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            self.wfile.write(packed)

    packed = gzip.compress(bytes(10**8))
    with served(Packed) as address:
        assert images.fetch(f"{address}/x", "x:1") == packed


def test_a_model_that_sees_none_refuses_images(workspace):
    from transformers import AutoTokenizer

    rows = write_rows(workspace / "pictures.jsonl", [picture(url(png(COLOURS["r"])))])
    tokenizer = AutoTokenizer.from_pretrained(workspace / "tied")
    loader = TaskLoader(TextProcessor(tokenizer), {"reasoning_gym": "reasoning_gym"}, 100)
    reason = r"pictures\.jsonl:1: input_image: the model reads no images"
    with pytest.raises(env.UnsupportedRowError, match=reason):
        loader.load_files([rows])


def test_paths_are_of_the_rows_own_folder(processor, workspace):
    """In the update, too, where answers to one prompt share their images."""
    asked = []
    for name, colour in COLOURS.items():
        (workspace / name).mkdir()
        (workspace / name / "1.png").write_bytes(png(colour))
        where, given = f"{workspace / name / 'rows.jsonl'}:1", picture("1.png")
        prompt = env.encode_messages(
            env.render_row(given, where)[0], [], processor.tokenizer, where, processor
        )
        asked += [
            Episode(
                where,
                f"1/{name}",
                "s",
                prompt,
                [5],
                [1],
                [-1.0],
                [TurnSpan(0, 1, 0)],
                reward=1.0,
                row=given,
            )
        ] * 2
    batch = training.build_batch(asked, 0, 1.0)
    processor.add_images(batch, asked)
    assert batch.batch["image"].tolist() == [1, 1, 2, 2]
    first, again, other, _ = (
        inputs["pixel_values"] for inputs in batch.non_tensor_batch["multi_modal_inputs"]
    )
    assert (
        first is again and (first[0, 0] > first[0, 2]).all() and (other[0, 0] < other[0, 2]).all()
    )


def test_it_reads_what_the_environment_says(processor):
    """Its template takes parts alone."""
    tokenizer = processor.tokenizer
    ids = chat.encode_observation(
        [{"role": "user", "content": "count 7"}], processor, {tokenizer.eos_token_id}
    )
    assert tokenizer.decode(ids).strip() == "count 7"
    with pytest.raises(GymError, match="stands for an image"):
        chat.encode_observation(
            [{"role": "user", "content": "so <image>"}], processor, {tokenizer.eos_token_id}
        )
    shown = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(env.UnsupportedRowError, match="images that an agent shows"):
        openai_server.build_prompt_ids(shown, [], SimpleNamespace(tokenizer=tokenizer))


def test_processes_that_drive_episodes_ban_it_too(processor):
    told = []
    servers = inference.Servers.__new__(inference.Servers)
    servers.context = SimpleNamespace(processor=processor, endpoint_sampling={})
    servers.rollout_workers = SimpleNamespace(
        rollout=lambda requests, sampling, *_: told.append(sampling)
    )
    servers.rollout_async([], {"temperature": 1.0}, lambda *_: None, False)
    assert told == [{"temperature": 1.0} | processor.sampling_params()]


def test_sft_of_a_model_that_sees_is_refused(workspace, seeing):
    (workspace / "chats.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n"
    )
    chats = [
        "env.train_files=[chats.jsonl]",
        "env.val_files=[]",
        f"actor_rollout_ref.model.path={seeing}",
    ]
    done = run(command(workspace, "--config", "sft", "sft", *tiny(workspace, *chats)), workspace)
    assert done.returncode == 1 and "`sft` does not support models that read images" in done.stderr


def test_what_images_do_not_go_with(processor):
    task = env.Task(
        "", {}, "s", [{"role": "user", "content": [{"type": "image", "image": "x"}]}], [1]
    )
    policy = {"rollout": {"name": "hf", "limit_images": None}, "model": {"lora_rank": 8}}
    policy["actor"] = {"ulysses_sequence_parallel_size": 1, "policy_loss": {"loss_mode": "vanilla"}}
    policy["rollout"]["engine_kwargs"] = {"vllm": {}}
    rest: dict = {"gym": {"servers": {"s": {"start": {"agent": "simple_agent"}}}}}
    rest |= {
        "trainer": {"device": "cpu", "n_gpus_per_node": 1, "nnodes": 1, "resource_pools": {}},
        "model_engine": "dp",
    }
    config = OmegaConf.create({"actor_rollout_ref": policy, **rest})
    with pytest.raises(
        ConfigError, match=r"do not work with .*rollout\.name=hf; .*lora_rank; an agent server"
    ):
        processor.check(config, [task], "evaluate")
    config.actor_rollout_ref.rollout.name, config.actor_rollout_ref.model.lora_rank = "vllm", 0
    config.gym.servers.s.start.agent = None
    processor.check(config, [task], "evaluate")
    assert config.actor_rollout_ref.rollout.limit_images == 1
    config.actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config = {"method": "ngram"}
    with pytest.raises(ConfigError, match="speculative_config: vLLM cannot ban tokens with it"):
        processor.check(config, [], "evaluate")


def run_colours(workspace, seeing, steps: int) -> list[float]:
    """Train a model to name the colour of an image, and return the held-out accuracy of each
    evaluation.

    Rows of Gym's circle_click, whose tool it never calls, are in the same batches. Sampler and
    trainer agree throughout: neither says <image>, which would take the probability that other
    tokens lose.
    """
    rows = [
        picture(url(png(colour)), answer=name) for name, colour in COLOURS.items() for _ in range(3)
    ]
    write_rows(workspace / "colours.jsonl", rows)
    [clicks] = [
        path
        for path in gym_examples()
        if path.parts[-3] == "circle_click" and path.name == "example.jsonl"
    ]
    changes = [
        f"actor_rollout_ref.model.path={seeing}",
        f"env.train_files=[{{path: colours.jsonl, server: reasoning_gym, weight: 6}}, "
        f"{{path: {clicks}, server: circle_click, weight: 2}}]",
        "env.val_files=[{path: colours.jsonl, server: reasoning_gym}]",
        f"gym.servers.circle_click.start.python={ROOT / '.venv-gym' / 'bin' / 'python'}",
        "data.max_prompt_length=1024",
        "data.max_response_length=1",
        "actor_rollout_ref.actor.optim.lr=0.003",
        "trainer.experiment_name=colours",
        f"trainer.total_training_steps={steps}",
    ]
    done = run(command(workspace, *tiny(workspace, *changes)), workspace, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folder = workspace / "runs" / "colours"
    trained = [m for m in metrics_of(folder) if "actor/grad_norm" in m]
    print("rewards", [round(m["reward/reasoning_gym/mean"], 2) for m in trained])
    print("apart", max(m["training/rollout_probs_diff_max"] for m in trained))
    assert len(trained) == steps and all(m["actor/grad_norm"] > 0 for m in trained)
    assert all(m["training/rollout_probs_diff_max"] < 1e-3 for m in trained)
    assert all(m["rollout/failed_frac"] == 0 for m in trained)
    told = [
        json.loads(line) for line in (folder / "rollouts" / "step_1.jsonl").read_text().splitlines()
    ]
    assert {len(record["response"]["output"]) for record in told} == {1}
    assert max(map(len, (folder / "rollouts" / "step_1.jsonl").read_text().splitlines())) < 20_000
    assert (folder / "export" / "processor_config.json").is_file()
    return [m[key] for m in metrics_of(folder) if (key := "val-core/reasoning_gym/acc/mean@1") in m]


def test_a_model_that_sees_is_trained_on_what_it_sampled(workspace, seeing):
    assert len(run_colours(workspace, seeing, steps=4)) == 2


@pytest.mark.soak
def test_it_learns_to_name_a_colour(workspace, seeing):
    """The texts are all the same: only eyes help. One answer to all would be right half of the
    time.
    """
    held_out = run_colours(workspace, seeing, steps=34)
    assert held_out[0] <= 0.5 < held_out[-1]


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
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
    }
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8192}
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "depth": 2,
        "num_heads": 2,
        "out_hidden_size": 64,
    }
    ids = {"image_token_id": pad, "vision_start_token_id": start, "vision_end_token_id": end}
    Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids).save_pretrained(folder)
    Qwen2VLImageProcessorPil().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_recipe_for_qwens_eyes_is_in_order(workspace, qwen):
    """Without torchvision; over an image its positions go in three dimensions, by the model's own
    get_rope_index.
    """
    [clicks] = [
        path
        for path in gym_examples()
        if path.parts[-3] == "circle_click" and path.name == "example.jsonl"
    ]
    changes = [f"actor_rollout_ref.model.path={qwen}", f"env.train_files=[{clicks}]"]
    changes += [f"gym.servers.circle_click.start.python={ROOT / '.venv-gym' / 'bin' / 'python'}"]
    config, _ = load_config(["circle_click"], changes)
    data = prepare.prepare(config)
    assert "8 cuda, 8 vLLM replicas" in summary.summarize(config, data, "train")
    assert config.actor_rollout_ref.rollout.limit_images == 1
    layers = config.actor_rollout_ref.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap
    assert layers == ["Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"]
    task = data.train[0]
    assert (
        task.prompt_ids.count(data.processor.placeholder) == 35 * 35
    )  # of 14 x 14 pixels, four to a token
    episode = Episode(
        task.row_id,
        "1/0",
        task.server,
        task.prompt_ids,
        [5, 6],
        [1, 1],
        [-1.0, -1.0],
        [TurnSpan(0, 2, 0)],
    )
    episode.row, episode.reward = task.row, 1.0
    batch = training.build_batch([episode, episode], 0, 1.0)
    data.processor.add_images(batch, [episode, episode])
    positions, ids = batch.batch["position_ids"], batch.batch["input_ids"][0]
    assert positions.shape == (2, 4, len(ids))
    seen = positions[0][:, ids == data.processor.placeholder]
    assert (
        len(set(seen[1].tolist())) == 1
        and len(set(seen[2].tolist())) == len(set(seen[3].tolist())) == 35
    )
    assert (
        positions[0, 1, -1]
        == positions[0, 2, -1]
        == positions[0, 3, -1]
        < positions[0, 0, -1]
        == len(ids) - 1
    )
    given = batch.non_tensor_batch["multi_modal_inputs"]
    assert given[0] is given[1] and given[0]["image_grid_thw"].tolist() == [[1, 70, 70]]
    with pytest.raises(ConfigError, match="a CPU, on which verl"):
        config, _ = load_config(["circle_click", "cpu"], changes)
        prepare.prepare(config)
