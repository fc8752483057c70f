"""Read the images of rows, count their tokens, and pass them to vLLM and the trainer.

A row has images in the format of Gym and OpenAI, `{"type": "input_image", "image_url": ...}`. The
address is one of these:

- a data URL
- a file: an absolute path, a path relative to the rows' folder, or file://
- an http(s) address at a host of env.image_hosts

The model computes several features of an image. In the prompt's ids, an image has one placeholder
for each feature. vLLM gets one placeholder for each image, and expands it.
"""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlparse

import numpy as np

import env
from env import DataError
from kit.chat.processor import TextProcessor
from kit.errors import ConfigError
from kit.recipe.keys import ACTOR, MODEL, REF, ROLLOUT
from kit.recipe.settings import Settings
from kit.verify import network

USES_MROPE = {  # by model_type: whether positions have three dimensions (mRoPE)
    "llava": False,
    "qwen2_vl": True,
    "qwen2_5_vl": True,
}
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # of the 43 that PIL reads
MAX_FETCHED_BYTES = 2**25  # of one image from the network
FETCH_TIMEOUT_S = 30.0
BAN = -100.0  # added to a logit by the rollout engine
MASKED_LOGIT = -1e4  # its exponential is 0, and unlike -inf it keeps the entropy finite


class RowInputs(NamedTuple):
    """The images of a row."""

    number: int  # rows with the same number have the same images
    tensors: dict[str, Any]  # of the model's forward pass


@dataclass
class ImageProcessor(TextProcessor):
    """The processor of a model that reads images."""

    processor: Any  # transformers': image_processor and _get_num_multimodal_tokens
    placeholder: int  # the id that stands for one feature of an image
    all_placeholders: list[int]  # also those of a video, which no row has
    folder: str  # of the model
    uses_mrope: bool
    hosts: tuple[str, ...] = ()  # from which images may be fetched
    fetched: dict[str, bytes] = field(default_factory=dict)  # by address

    reads_images = True

    def placeholder_ids(self) -> list[int]:
        """Ids that stand for an image or a video, which no policy may sample."""
        return self.all_placeholders

    # --- prompts ---

    def template_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Turn text content into a list of parts: next to lists, some templates drop plain text."""
        converted = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, str):
                message = {**message, "content": [{"type": "text", "text": content}]}
            converted.append(message)
        return converted

    def expand(self, ids: list[int], messages: Sequence[dict[str, Any]], where: str) -> list[int]:
        """Repeat the placeholder of each image for each of its features. Raises DataError."""
        images = self.load_images(messages, where)
        placeholders = ids.count(self.placeholder)
        if placeholders != len(images):
            raise DataError(
                f"{where}: {len(images)} images, but {placeholders} placeholders in the prompt. "
                "Remove the placeholders from its text."
            )
        counts = iter(self.count_features(images))
        expanded: list[int] = []
        for token in ids:
            repeats = next(counts) if token == self.placeholder else 1
            expanded += [token] * repeats
        return expanded

    def engine_inputs(self, ids: list[int], task: Any) -> tuple[list[int], dict[str, Any]]:
        """Undo `expand` for vLLM -> (ids, the images as arguments of its `generate`)."""
        if not list_sources(task.messages):
            return ids, {}
        images = self.load_images(task.messages, task.row_id)
        counts = iter(self.count_features(images))
        kept: list[int] = []
        position = 0
        while position < len(ids):
            kept.append(ids[position])
            position += next(counts) if ids[position] == self.placeholder else 1
        return kept, {"image_data": images}

    def sampling_params(self) -> dict[str, Any]:
        """Sampling parameters that keep the policy from sampling a placeholder."""
        return {"logit_bias": dict.fromkeys(self.all_placeholders, BAN)}

    # --- images ---

    def load_images(self, messages: Sequence[dict[str, Any]], where: str) -> list[Any]:
        """The images of a prompt in RGB. Raises DataError."""
        return [self.load_image(source, where) for source in list_sources(messages)]

    def load_image(self, source: str, where: str) -> Any:
        """An image in RGB, as a PIL image. Raises DataError.

        where: the row, file:line. Relative paths start at the folder of this file.
        """
        try:
            return decode(self.read_source(source, where))
        except Exception as error:  # from the disk, the network, base64 or PIL
            raise DataError(
                f"{where}: image {source[:60]!r} cannot be read ({error!s:.100}). Give a data URL "
                "or a file of an image."
            ) from None

    def read_source(self, source: str, where: str) -> bytes:
        """The bytes of an image."""
        if source.startswith("data:"):
            return base64.b64decode(source.partition(",")[2], validate=True)
        url = urlparse(source)
        if url.scheme in ("http", "https"):
            if url.hostname not in self.hosts:
                raise ValueError(f"{url.hostname} is not in env.image_hosts")
            if source not in self.fetched:
                self.fetched[source] = fetch(source)
            return self.fetched[source]
        path = unquote(url.path) if url.scheme == "file" else source
        return (folder_of(where) / path).read_bytes()

    def count_features(self, images: Sequence[Any]) -> list[int]:
        """The number of features of each image."""
        if not images:
            return []
        sizes = [(image.height, image.width) for image in images]
        counts = self.processor._get_num_multimodal_tokens(sizes)
        return [int(count) for count in counts["num_image_tokens"]]

    def compute_inputs(self, images: Sequence[Any]) -> dict[str, Any]:
        """The inputs of the model's forward pass: pixel_values, for some models image_grid_thw."""
        inputs = self.processor.image_processor(images=list(images), return_tensors="pt")
        return {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}

    # --- checks, batches, workers ---

    def derive(self, settings: Settings, tasks: Sequence[Any]) -> Mapping[str, object]:
        """Check that images fit the recipe, and return values that follow. Raises ConfigError."""
        rollout = settings.rollout
        if (rollout.engine_kwargs.get("vllm") or {}).get("speculative_config"):
            raise ConfigError(
                f"{ROLLOUT}.engine_kwargs.vllm.speculative_config: vLLM cannot ban tokens with it, "
                "which a model that reads images needs. Remove it."
            )
        changes: dict[str, object] = {}
        if settings.command == "train" and settings.engine.is_fsdp:
            changes |= find_wrapped_layers(settings, self.folder)
        counts = {len(list_sources(task.messages)) for task in tasks}
        if not any(counts):
            return changes
        conflicts = self.find_conflicts(settings, tasks, 0 in counts)
        if conflicts:
            raise ConfigError(
                f"Rows with images do not work with {'; '.join(conflicts)}. Remove these."
            )
        return changes | {f"{ROLLOUT}.limit_images": max(counts)}

    def find_conflicts(
        self, settings: Settings, tasks: Sequence[Any], has_text_rows: bool
    ) -> list[str]:
        """Return the parts of a recipe that do not work with images."""
        rollout = settings.rollout
        is_conflict = {
            f"{ROLLOUT}.name={rollout.name}": rollout.name != "vllm",
            f"{MODEL}.lora_rank": settings.model.lora_rank,
            "a critic (algorithm.adv_estimator)": settings.has_critic,
            "reward.reward_model": settings.has_reward_model,
            f"model_engine={settings.model_engine}": not settings.engine.is_fsdp,
            "ulysses_sequence_parallel_size": settings.engine.sequence_gpus > 1,
            "an agent server": has_agent_rows(settings, tasks),
            "rows without images on several GPUs": has_text_rows
            and not self.uses_mrope
            and settings.world_size() > 1,
            "a CPU, on which verl's attention of Qwen's models does not run": self.uses_mrope
            and settings.trainer.device == "cpu",
        }
        return [name for name, conflicts in is_conflict.items() if conflicts]

    def add_images(self, batch: Any, episodes: Sequence[Any]) -> None:
        """Add `multi_modal_inputs`, `image` [B] and with mRoPE position_ids [B, 4, P+R].

        batch: verl's DataProto. Rows with the same number in `image` have the same images.
        """
        import torch

        row_inputs: dict[tuple[tuple[str, str], ...], RowInputs] = {(): RowInputs(0, {})}
        rows: list[RowInputs] = []
        for episode in episodes:
            messages = env.render_row(episode.row, episode.row_id)[0]
            folder = str(folder_of(episode.row_id))  # in the key, since relative paths start here
            key = tuple((folder, source) for source in list_sources(messages))
            if key not in row_inputs:
                images = self.load_images(messages, episode.row_id)
                row_inputs[key] = RowInputs(len(row_inputs), self.compute_inputs(images))
            rows.append(row_inputs[key])
        batch.batch["image"] = torch.tensor([row.number for row in rows])  # [B]
        inputs = np.empty(len(rows), dtype=object)
        inputs[:] = [row.tensors for row in rows]
        batch.non_tensor_batch["multi_modal_inputs"] = inputs
        if self.uses_mrope:
            positions = [self.compute_positions(batch, i, row) for i, row in enumerate(rows)]
            batch.batch["position_ids"] = torch.stack(positions)  # [B, 4, P+R]

    def compute_positions(self, batch: Any, row: int, inputs: RowInputs) -> Any:
        """[4, P+R]: text positions, then time, height and width by the model's get_rope_index."""
        import torch

        mask = batch.batch["attention_mask"][row].bool()  # [P+R]
        text_positions = batch.batch["position_ids"][row]  # [P+R]
        ids = batch.batch["input_ids"][row][mask][None]  # [1, tokens]
        positions, _ = load_without_weights(self.folder).model.get_rope_index(
            input_ids=ids,
            mm_token_type_ids=(ids == self.placeholder).int(),
            image_grid_thw=inputs.tensors.get("image_grid_thw"),
            attention_mask=None,
        )  # [3, 1, tokens]
        padded = text_positions.new_zeros(3, len(text_positions))  # [3, P+R]
        padded[:, mask] = positions[:, 0]
        return torch.cat([text_positions[None], padded])

    def mask_placeholders(self, workers: Any) -> None:
        """Mask the placeholders' logits of actor and reference. workers: training.Workers.

        The policy never samples a placeholder, so nothing lowers its logit in training. Unmasked,
        it would take the probability that other tokens lose.
        """
        import ray

        calls = []
        for name in ("actor", "ref"):
            group = getattr(workers, name)
            if group:
                hook = functools.partial(mask_in_worker, placeholders=self.all_placeholders)
                calls += [worker.__ray_call__.remote(hook, name) for worker in group.workers]
        ray.get(calls)


def mask_in_worker(worker: Any, name: str, placeholders: list[int]) -> None:
    """Register a hook on the model's output that masks placeholders. Runs in a worker."""

    def mask(_module: Any, _args: Any, logits: Any) -> Any:
        logits[..., placeholders] = MASKED_LOGIT
        return logits

    role = getattr(worker, "worker_dict", {name: worker})[name]
    for part in (role.actor, role.ref):
        if part:
            part.engine.module.get_output_embeddings().register_forward_hook(mask)


def has_agent_rows(settings: Settings, tasks: Sequence[Any]) -> bool:
    """Return whether an agent server runs the episodes of a row with images."""
    servers = settings.gym.servers.items()
    agents = {name for name, server in servers if server.start and server.start.agent}
    return any(task.server in agents and list_sources(task.messages) for task in tasks)


# --- reading images ------------------------------------------------------------------------------


def list_sources(messages: Sequence[dict[str, Any]]) -> list[str]:
    """The addresses of the images of chat messages, in order."""
    sources = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            sources += [part["image"] for part in content if part["type"] == "image"]
    return sources


def folder_of(where: str) -> Path:
    """The folder of a row's file. where: file:line."""
    return Path(where.rpartition(":")[0]).parent


@functools.lru_cache(maxsize=4)  # the responses to a prompt share its images
def decode(raw: bytes) -> Any:
    """The image in RGB. Raises the errors of PIL, which also refuses over 179 million pixels."""
    from PIL import Image

    with Image.open(io.BytesIO(raw), formats=FORMATS) as image:
        return image.convert("RGB")


def fetch(source: str) -> bytes:
    """Fetch the bytes at an address. Raises httpx.HTTPError.

    It does so for a redirect, too, which may lead to a host that env.image_hosts does not name.
    """
    answer = network.get(source, FETCH_TIMEOUT_S, MAX_FETCHED_BYTES, use_proxy=True)
    return answer.raise_for_status().content


# --- models --------------------------------------------------------------------------------------


def make_processor(settings: Settings, hf_config: Any, tokenizer: Any) -> ImageProcessor | None:
    """The processor of a model of a supported family; None if the model can only read text here."""
    kind = hf_config.model_type
    folder = settings.model.path
    processor = load_processor(folder, kind) if kind in USES_MROPE else None
    if processor is None:
        return None
    tokenizer.chat_template = tokenizer.chat_template or getattr(processor, "chat_template", None)
    placeholder = getattr(hf_config, "image_token_id", None) or hf_config.image_token_index
    video_placeholder = getattr(hf_config, "video_token_id", None) or placeholder
    return ImageProcessor(
        tokenizer,
        processor,
        placeholder,
        sorted({placeholder, video_placeholder}),
        folder,
        USES_MROPE[kind],
        tuple(settings.env.image_hosts),
    )


def load_processor(folder: str, kind: str) -> Any:
    """transformers' processor of a model, or None if it has none.

    Qwen's needs torchvision for videos. Without torchvision, it is built for images only.
    """
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(folder)
    except ImportError:
        if not kind.startswith("qwen2"):
            return None
    except (OSError, ValueError):
        return None
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2_5_VLProcessor.__new__(Qwen2_5_VLProcessor)
    processor.tokenizer = None
    processor.video_processor = None
    processor.image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return processor


@functools.cache
def load_without_weights(folder: str) -> Any:
    """The model on torch's meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))


def find_wrapped_layers(settings: Settings, folder: str) -> dict[str, object]:
    """Return the layer classes that FSDP wraps, unless the recipe sets them."""
    keys = [
        f"{section}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap"
        for section in (ACTOR, REF)
    ]
    return {key: find_layer_classes(folder) for key in keys if not settings.get(key)}


def find_layer_classes(folder: str) -> list[str]:
    """The classes of the model's layers that FSDP can wrap.

    By default, verl wraps every class of transformers' _no_split_modules. Some of these contain an
    embedding, which FSDP would wrap twice.
    """
    from torch.nn import Embedding

    model = load_without_weights(folder)
    with_embedding = set()
    for module in model.modules():
        if any(isinstance(part, Embedding) for part in module.modules()):
            with_embedding.add(type(module).__name__)
    return sorted({*model._no_split_modules} - with_embedding)
