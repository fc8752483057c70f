"""Rows with small images, and the processor of the tiny model that reads them."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from conftest import row
from omegaconf import OmegaConf
from PIL import Image

from kit.config.model_files import load_model_files
from kit.extras.images import ImageProcessor, make_processor

COLORS = {"r": (250, 20, 20), "b": (20, 20, 250)}


def png(color: tuple[int, int, int], size: tuple[int, int] = (40, 30)) -> bytes:
    """The bytes of an image in one color."""
    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, "PNG")
    return out.getvalue()


def data_url(raw: bytes) -> str:
    """A data URL of an image."""
    return f"data:image/png;base64,{base64.b64encode(raw).decode()}"


def image_row(source: str, text: str = "which", answer: str = "r") -> dict:
    """A row that asks for the color of an image."""
    parts = [
        {"type": "input_image", "image_url": source, "detail": "auto"},
        {"type": "input_text", "text": text},
    ]
    result = row(text, answer)
    result["responses_create_params"]["input"] = [{"role": "user", "content": parts}]
    return result


def load_image_processor(model: Path) -> ImageProcessor:
    """The processor of a model. It may fetch images from this machine."""
    keys = {"path": str(model), "trust_remote_code": False, "custom_chat_template": None}
    config = OmegaConf.create(
        {"actor_rollout_ref": {"model": keys}, "env": {"image_hosts": ["127.0.0.1"]}}
    )
    files = load_model_files(config)
    processor = make_processor(config, files.hf_config, files.tokenizer)
    assert processor
    return processor
