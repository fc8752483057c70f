"""Tests that rows of verl with images become tasks of a model that reads images."""

from __future__ import annotations

import pytest
from datasets import Dataset

import env
from kit.config.entries import Entry
from kit.data.processor import TextProcessor
from kit.data.tasks import TaskLoader
from kit.rollout.chat_template import ChatTemplate
from tests.helpers.models import COLORS, load_image_processor, png
from tests.helpers.recipes import write_rows

CHAT = [{"role": "user", "content": "which <image> or <image>"}]


@pytest.mark.parametrize("form", ["bytes", "path"])
def test_images_of_verl_are_loaded_with_their_prompt(workspace, vision_model, tmp_path, form):
    processor = load_image_processor(vision_model)
    images = []
    for name, color in COLORS.items():
        (tmp_path / f"{name}.png").write_bytes(png(color))
        images.append({"bytes": png(color), "path": None})
    path = tmp_path / "rows.parquet"
    if form == "bytes":
        Dataset.from_list([{"prompt": CHAT, "images": images}]).to_parquet(path)
    else:
        row = {"prompt": CHAT, "images": [f"{name}.png" for name in COLORS]}
        path = write_rows(tmp_path / "rows.jsonl", [row])
    template = ChatTemplate(processor, {processor.tokenizer.eos_token_id})
    (task,) = TaskLoader(template, {"s": "s"}, 999).load_files([Entry(str(path))]).tasks
    assert task.prompt_ids.count(processor.placeholder) == 32
    _, inputs = processor.engine_inputs(task.prompt_ids, task)
    assert [image.getpixel((0, 0)) for image in inputs["image_data"]] == list(COLORS.values())
    assert "images" not in task.row

    text_template = ChatTemplate(TextProcessor(processor.tokenizer), {1})
    with pytest.raises(env.UnsupportedRowError, match="the model reads no images"):
        TaskLoader(text_template, {"s": "s"}, 999).load_files([Entry(str(path))])
