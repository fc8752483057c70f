"""Read the images of rows, count their tokens, and pass them to vLLM and the trainer.

A row has images in the format of Gym and OpenAI, `{"type": "input_image", "image_url": ...}`. The
address is a data URL, a file (a path, relative ones from the rows' folder, or file://), or an
http(s) address at a host of env.image_hosts.

An image has several features for the model. In the prompt's ids, it has one placeholder for each
feature. vLLM gets one placeholder for each image, and expands it. Images are read and counted when
their row is loaded. A task keeps the addresses and counts only, so memory does not grow with
pixels.
"""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlparse

import numpy as np

import env
from env import DataError, Json, Task, TaskImage
from kit.chat.processor import TextProcessor
from kit.errors import ConfigError
from kit.recipe.keys import ACTOR, MODEL, REF, ROLLOUT
from kit.recipe.settings import Settings
from kit.verify import network

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from transformers import PretrainedConfig, PreTrainedTokenizerBase
    from verl import DataProto

USES_MROPE = {  # by model_type: whether positions have three dimensions (mRoPE)
    "llava": False,
    "qwen2_vl": True,
    "qwen2_5_vl": True,
}
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # of the 43 that PIL reads
MAX_FETCHED_BYTES = 2**25  # of one image from the network
FETCH_TIMEOUT_S = 30.0
BAN = -100.0  # added to a logit by the rollout engine
MAX_DECODED = 64  # images in memory: the responses to a prompt, and their turns, share them
MASKED_LOGIT = -1e4  # its exponential is 0, and unlike -inf it keeps the entropy finite


class RowInputs(NamedTuple):
    """The images of a row."""

    number: int  # rows with the same number have the same images
    tensors: Mapping[str, torch.Tensor]  # of the model's forward pass


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
        """Return the ids that stand for an image or a video, which no policy may sample."""
        return self.all_placeholders

    # --- prompts ---

    def read_images(self, messages: Sequence[Json], row_id: str) -> list[TaskImage]:
        """Read the images of a row's chat messages, and count their tokens. Raises DataError."""
        sources = env.list_images(messages, row_id)
        if not sources:
            return []
        try:
            images = [self.load_image(source) for source in sources]
        except DataError as error:
            raise DataError(f"{row_id}: {error}") from None
        sizes = [(image.height, image.width) for image in images]
        counts = self.processor._get_num_multimodal_tokens(sizes)["num_image_tokens"]
        return [TaskImage(*pair) for pair in zip(sources, map(int, counts), strict=True)]

    def expand(self, ids: list[int], images: Sequence[TaskImage], row_id: str) -> list[int]:
        """Repeat the placeholder of each image for each of its features. Raises DataError."""
        placeholders = ids.count(self.placeholder)
        if placeholders != len(images):
            raise DataError(
                f"{row_id}: {len(images)} images, but {placeholders} placeholders in the prompt. "
                "Remove the placeholders from its text."
            )
        counts = iter([image.token_count for image in images])
        expanded: list[int] = []
        for token in ids:
            expanded += [token] * (next(counts) if token == self.placeholder else 1)
        return expanded

    def engine_inputs(self, ids: list[int], task: Task) -> tuple[list[int], Json]:
        """Undo `expand` for vLLM. Returns the ids, and the images as arguments of `generate`."""
        if not task.images:
            return ids, {}
        counts = iter([image.token_count for image in task.images])
        kept: list[int] = []
        position = 0
        while position < len(ids):
            kept.append(ids[position])
            position += next(counts) if ids[position] == self.placeholder else 1
        return kept, {"image_data": [self.load_image(image.source) for image in task.images]}

    def sampling_params(self) -> Json:
        """Return the sampling parameters that keep the policy from sampling a placeholder."""
        return {"logit_bias": dict.fromkeys(self.all_placeholders, BAN)}

    # --- images ---

    def load_image(self, source: str) -> Image:
        """Load an image in RGB. Raises DataError."""
        try:
            return decode(self.read_source(source))
        except Exception as error:  # from the disk, the network, base64 or PIL
            raise DataError(
                f"image {source[:60]!r} cannot be read ({error!s:.100}). Give a data URL or a file "
                "of an image."
            ) from None

    def read_source(self, source: str) -> bytes:
        """Read the bytes of an image. Raises ValueError, OSError or httpx.HTTPError."""
        if source.startswith("data:"):
            return base64.b64decode(source.partition(",")[2], validate=True)
        url = urlparse(source)
        if url.scheme not in ("http", "https"):
            return Path(source).read_bytes()
        if url.hostname not in self.hosts:
            raise ValueError(f"{url.hostname} is not in env.image_hosts")
        if source not in self.fetched:
            self.fetched[source] = fetch(source)
        return self.fetched[source]

    def compute_inputs(self, sources: Sequence[str]) -> dict[str, torch.Tensor]:
        """Compute the inputs of the forward pass: pixel_values, for some models image_grid_thw."""
        images = [self.load_image(source) for source in sources]
        inputs = self.processor.image_processor(images=images, return_tensors="pt")
        return {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}

    # --- checks, batches, workers ---

    def derive(self, settings: Settings, tasks: Sequence[Task]) -> Mapping[str, object]:
        """Check that images fit the recipe, and set the values that follow. Raises ConfigError."""
        rollout = settings.rollout
        if (rollout.engine_kwargs.get("vllm") or {}).get("speculative_config"):
            raise ConfigError(
                f"{ROLLOUT}.engine_kwargs.vllm.speculative_config: vLLM cannot ban tokens with it, "
                "which a model that reads images needs. Remove it."
            )
        changes: dict[str, object] = {}
        if settings.command == "train" and settings.engine.is_fsdp:
            changes |= find_wrapped_layers(settings, self.folder)
        counts = {len(task.images) for task in tasks}
        if not any(counts):
            return changes
        conflicts = self.find_conflicts(settings, tasks, 0 in counts)
        if conflicts:
            raise ConfigError(
                f"Rows with images do not work with {'; '.join(conflicts)}. Remove these."
            )
        return changes | {f"{ROLLOUT}.limit_images": max(counts)}

    def find_conflicts(
        self, settings: Settings, tasks: Sequence[Task], has_text_rows: bool
    ) -> list[str]:
        """Find the parts of a recipe that do not work with images."""
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

    def add_images(self, batch: DataProto, images: Sequence[Sequence[str]]) -> None:
        """Add `multi_modal_inputs`, `image` [B] and with mRoPE position_ids [B, 4, P+R].

        images: the addresses in each row. Rows with the same number in `image` have the same ones.
        """
        import torch

        inputs_of: dict[tuple[str, ...], RowInputs] = {(): RowInputs(0, {})}
        rows: list[RowInputs] = []
        for sources in map(tuple, images):
            if sources not in inputs_of:
                inputs_of[sources] = RowInputs(len(inputs_of), self.compute_inputs(sources))
            rows.append(inputs_of[sources])
        batch.batch["image"] = torch.tensor([row.number for row in rows])  # [B]
        inputs = np.empty(len(rows), dtype=object)
        inputs[:] = [row.tensors for row in rows]
        batch.non_tensor_batch["multi_modal_inputs"] = inputs
        if self.uses_mrope:
            positions = [self.compute_positions(batch, i, row) for i, row in enumerate(rows)]
            batch.batch["position_ids"] = torch.stack(positions)  # [B, 4, P+R]

    def compute_positions(self, batch: DataProto, row: int, inputs: RowInputs) -> torch.Tensor:
        """Compute the positions of a row [4, P+R]: of the text, then time, height and width."""
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


def has_agent_rows(settings: Settings, tasks: Sequence[Task]) -> bool:
    """Return whether an agent server runs the episodes of a row with images."""
    servers = settings.gym.servers.items()
    agents = {name for name, server in servers if server.start and server.start.agent}
    return any(task.server in agents and task.images for task in tasks)


@functools.lru_cache(MAX_DECODED)
def decode(raw: bytes) -> Image:
    """Decode an image to RGB. Raises the errors of PIL, which refuses over 179 million pixels."""
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


def make_processor(
    settings: Settings, hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> ImageProcessor | None:
    """Make the processor of a model, or None if its family can only read text here."""
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
    """Load transformers' processor of a model, or None if it has none.

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
    """Load the model on torch's meta device."""
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
    """Find the classes of the model's layers that FSDP can wrap.

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
