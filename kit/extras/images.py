"""Images in the rows of models that see: found, read, counted in tokens, and given to vLLM and to the trainer.

A row has them as Gym and OpenAI write them, `{"type": "input_image", "image_url": ...}`: a data URL, a file (its path,
as it is or from the rows' folder, or file://), or an http(s) address at a host of env.image_hosts. In the prompt's ids
an image is as many placeholders as the model has features of it; vLLM gets one for each, and makes them many itself.
"""

from __future__ import annotations

import base64
import functools
import io
import itertools
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np
from omegaconf import DictConfig

import env
from env import DataError
from kit.config.checks import drafts_of
from kit.config.load import MODEL, ROLLOUT, gpus
from kit.config.user_functions import asks_for
from kit.errors import ConfigError

FAMILIES = {
    "llava": False,
    "qwen2_vl": True,
    "qwen2_5_vl": True,
}  # model_type: positions in three dimensions (mRoPE)?
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # of the 43 that PIL reads
MOST_PIXELS = 2**24  # of one image; larger ones are refused
ROW_PIXELS = 2**25  # of all images of a row together; 4 bytes each once they are decoded
CACHED_PIXELS = 2**20  # larger images are decoded again each time, so that the cache stays small
MOST_BYTES = 2**25  # of the file of one image
FETCH_S = 30.0  # seconds to fetch one from the network


class TooLarge(ValueError):  # noqa: N818  an image that can be read and is refused
    """An image over a limit; the message gives both numbers."""


@dataclass
class Vision:
    """What a model that sees makes of images. It is the tokenizer's attribute `vision`, and goes where that goes."""

    processor: Any  # transformers': image_processor and _get_num_multimodal_tokens
    placeholder: int  # the id that stands for a feature of an image
    placeholders: list[int]  # and those of a film, which no row has
    folder: str  # of the model
    mrope: bool
    hosts: tuple[str, ...] = ()  # from which images may be fetched
    fetched: dict[str, bytes] = field(
        default_factory=dict
    )  # by address: once, before anything starts

    def messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Chat messages whose content is parts throughout: of text among them some templates say nothing."""
        texts = [m.get("content") for m in messages]
        parts = [
            {"type": "text", "text": text} if isinstance(text, str) else None for text in texts
        ]
        return [
            {**m, "content": [part]} if part else m for m, part in zip(messages, parts, strict=True)
        ]

    def expand(self, ids: list[int], messages: Sequence[dict[str, Any]], where: str) -> list[int]:
        """The template's ids with one placeholder for each image -> with as many as it has features. Raises
        DataError."""
        pictures, found = self.pictures(messages, where), ids.count(self.placeholder)
        if found != len(pictures):
            raise DataError(
                f"{where}: {len(pictures)} images, {found} placeholders in the prompt; take these out of text"
            )
        counts = iter(self.counts(pictures))
        return list(
            itertools.chain(*([i] * next(counts) if i == self.placeholder else [i] for i in ids))
        )

    def shrink(
        self, ids: Sequence[int], messages: Sequence[dict[str, Any]], where: str
    ) -> tuple[list[int], list[Any]]:
        """(what `expand` was given, with what came after it; the images)."""
        pictures, kept, place = self.pictures(messages, where), list[int](), 0
        counts = iter(self.counts(pictures))
        while place < len(ids):
            kept.append(ids[place])
            place += next(counts) if ids[place] == self.placeholder else 1
        return kept, pictures

    def pictures(self, messages: Sequence[dict[str, Any]], where: str) -> list[Any]:
        """The images of a prompt, in order, in RGB: ROW_PIXELS at most. Raises DataError."""
        pictures: list[Any] = []
        room = ROW_PIXELS
        for source in sources(messages):
            picture = self.read(source, where, room)
            room -= picture.width * picture.height
            pictures.append(picture)
        return pictures

    def read(self, source: str, where: str, room: int = ROW_PIXELS) -> Any:
        """An image in RGB, as PIL has it. where: the row; relative paths start at its folder.
        room: pixels that the row has left. Raises DataError."""
        told, url = (
            f"{where}: image {source[:60]!r}",
            urlparse(source) if len(source) < 4096 else None,
        )
        try:
            if source.startswith("data:"):
                raw = base64.b64decode(source.partition(",")[2], validate=True)
            elif url and url.scheme in ("http", "https"):
                if url.hostname not in self.hosts:
                    raise DataError(
                        f"{told}: {url.hostname} is not in env.image_hosts; add it, or give files"
                    )
                raw = self.fetched.setdefault(
                    source, self.fetched.get(source) or fetch(source, told)
                )
            else:
                path = Path(unquote(url.path) if url and url.scheme == "file" else source)
                raw = read_file(folder_of(where) / path)
            return decode(raw, room)
        except DataError:
            raise
        except TooLarge as error:
            raise DataError(f"{told}: {error}; make it smaller, or leave the row out") from None
        except (
            Exception
        ) as error:  # of the disk, the network, base64, and whatever PIL makes of a file
            raise DataError(
                f"{told} cannot be read ({error!s:.100}); give a data URL or a file of an image"
            ) from None

    def counts(self, pictures: Sequence[Any]) -> list[int]:
        """Features of each."""
        if not pictures:
            return []
        told = self.processor._get_num_multimodal_tokens(
            [(image.height, image.width) for image in pictures]
        )
        return [int(count) for count in told["num_image_tokens"]]

    def inputs(self, pictures: Sequence[Any]) -> dict[str, Any]:
        """What the model's forward pass wants of them: pixel_values, for some models image_grid_thw."""
        made = self.processor.image_processor(images=list(pictures), return_tensors="pt")
        return {name: made[name] for name in ("pixel_values", "image_grid_thw") if name in made}


def sources(messages: Sequence[dict[str, Any]]) -> list[str]:
    """Where the images of chat messages are, in order."""
    lists = [m["content"] for m in messages if isinstance(m.get("content"), list)]
    return [part["image"] for parts in lists for part in parts if part["type"] == "image"]


def folder_of(where: str) -> Path:
    """That of a row's file."""
    return Path(where.rpartition(":")[0]).parent


def read_file(path: Path) -> bytes:
    """The content of a regular file, up to MOST_BYTES + 1, which `decode` refuses. A pipe or a device is not
    waited for. Raises OSError, ValueError."""
    if path.exists() and not path.is_file():  # opening some devices already does something
        raise ValueError("not a regular file")
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a regular file")
        return file.read(MOST_BYTES + 1)


def check_bytes(raw: bytes | bytearray) -> None:
    """Raises TooLarge for the file of an image of over MOST_BYTES."""
    if len(raw) > MOST_BYTES:
        raise TooLarge(f"its file is over {MOST_BYTES >> 20} MiB")


def decode(raw: bytes, room: int = ROW_PIXELS) -> Any:
    """The image in RGB, of at most MOST_PIXELS, and at most `room`. Its size is read before its pixels
    are. Raises TooLarge, and whatever PIL raises."""
    from PIL import Image

    check_bytes(raw)
    with Image.open(io.BytesIO(raw), formats=FORMATS) as image:
        width, height = image.size
    if width * height > MOST_PIXELS:
        raise TooLarge(f"{width} x {height} pixels, over {MOST_PIXELS}")
    if width * height > room:
        size = f"{width} x {height} pixels"
        raise TooLarge(f"{size}: the images of the row have over {ROW_PIXELS} pixels together")
    return decode_small(raw) if width * height <= CACHED_PIXELS else to_rgb(raw)


def to_rgb(raw: bytes) -> Any:
    """The image of a file in one of FORMATS, in RGB. Raises whatever PIL raises."""
    from PIL import Image

    with Image.open(io.BytesIO(raw), formats=FORMATS) as image:
        return image.convert("RGB")


decode_small = functools.lru_cache(maxsize=32)(to_rgb)  # the answers to a prompt share its images


def fetch(source: str, told: str) -> bytes:
    """The bytes at an address, as they are sent. A redirect is refused, since it may lead to a host that
    env.image_hosts does not name. Raises DataError, TooLarge, TimeoutError, httpx.HTTPError."""
    import httpx

    deadline = time.monotonic() + FETCH_S
    raw = bytearray()
    with httpx.stream("GET", source, timeout=FETCH_S, follow_redirects=False) as answer:
        if answer.is_redirect:
            to = f"{answer.headers['location']:.60}"
            raise DataError(
                f"{told}: it redirects to {to}, which is refused; give the final address"
            )
        answer.raise_for_status()
        for part in answer.iter_raw():  # not unpacked: a few bytes of gzip can become gigabytes
            raw += part
            check_bytes(raw)
            if time.monotonic() > deadline:
                raise TimeoutError(f"not there after {FETCH_S:g} s")
    return bytes(raw)


def vision_of(config: DictConfig, hf_config: Any, tokenizer: Any) -> Vision | None:
    """For a model that sees, of the families that were tried, whose processor can be had. Others read text alone."""
    kind, folder = hf_config.model_type, config.actor_rollout_ref.model.path
    processor = load_processor(folder, kind) if kind in FAMILIES else None
    if processor is None:
        return None
    tokenizer.chat_template = tokenizer.chat_template or getattr(processor, "chat_template", None)
    placeholder = getattr(hf_config, "image_token_id", None) or hf_config.image_token_index
    placeholders = sorted({placeholder, getattr(hf_config, "video_token_id", None) or placeholder})
    return Vision(
        processor, placeholder, placeholders, folder, FAMILIES[kind], tuple(config.env.image_hosts)
    )


def load_processor(folder: str, kind: str) -> Any:
    """transformers' processor of a model, of Qwen's, whose video half wants torchvision, what does without; None where
    there is none."""
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

    half = Qwen2_5_VLProcessor.__new__(Qwen2_5_VLProcessor)
    half.tokenizer = half.video_processor = None
    half.image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return half


def check(config: DictConfig, vision: Vision, tasks: Sequence[Any], command: str) -> None:
    """Images go together with the rest of the recipe; vLLM is told how many a row has, FSDP what to cut by. Raises
    ConfigError."""
    policy, trains = config.actor_rollout_ref, command == "train"
    if drafts_of(config):
        raise ConfigError(
            f"{ROLLOUT}.engine_kwargs.vllm.speculative_config: vLLM bans no token then; leave it out"
        )
    for engine in (
        [policy.actor.fsdp_config, policy.ref.fsdp_config]
        if trains and config.model_engine == "dp"
        else []
    ):
        if not engine.wrap_policy.get("transformer_layer_cls_to_wrap"):
            engine.wrap_policy.transformer_layer_cls_to_wrap = layers(vision.folder)
    most = {len(sources(task.messages)) for task in tasks}
    if not max(most, default=0):
        return
    agents = {
        name
        for name, server in config.gym.servers.items()
        if (server.get("start") or {}).get("agent")
    }
    wrong = {
        f"{ROLLOUT}.name={policy.rollout.name}": policy.rollout.name != "vllm",
        f"{MODEL}.lora_rank": policy.model.lora_rank,
        "a critic (algorithm.adv_estimator)": trains and asks_for(config, "values"),
        "reward.reward_model": trains and config.reward.reward_model.enable,
        f"model_engine={config.model_engine}": config.model_engine != "dp",
        "ulysses_sequence_parallel_size": policy.actor.get("ulysses_sequence_parallel_size", 1) > 1,
        "an agent that owns the turns": any(
            task.server in agents for task in tasks if sources(task.messages)
        ),
        "rows without any on several GPUs": 0 in most
        and not vision.mrope
        and gpus(config) * config.trainer.nnodes > 1,
        "Qwen's on a CPU, where verl's attention of it does not run": vision.mrope
        and config.trainer.device == "cpu",
    }
    if found := [name for name, given in wrong.items() if given]:
        raise ConfigError(f"rows with images do not go with {'; '.join(found)}; leave these out")
    policy.rollout.limit_images = max(most)


def add(batch: Any, episodes: Sequence[Any], tokenizer: Any) -> None:
    """Give a batch (verl's DataProto) what the model wants of each row's images: `multi_modal_inputs`, `image` [B]
    (rows of one number have the same), and with mRoPE position_ids [B, 4, P+R]. Nothing for a model that sees none."""
    import torch

    vision: Vision | None = getattr(tokenizer, "vision", None)
    if not vision:
        return
    known: dict[tuple[tuple[str, str], ...], tuple[int, dict[str, Any]]] = {(): (0, {})}
    rows: list[tuple[int, dict[str, Any]]] = []
    for e in episodes:
        messages = env.render(e.row, e.row_id)[0]
        key = tuple(
            (str(folder_of(e.row_id)), source) for source in sources(messages)
        )  # paths are of that folder
        if key not in known:
            known[key] = len(known), vision.inputs(vision.pictures(messages, e.row_id))
        rows.append(known[key])
    batch.batch["image"] = torch.tensor([number for number, _ in rows])  # [B]
    given = np.empty(len(rows), dtype=object)
    given[:] = [inputs for _, inputs in rows]
    batch.non_tensor_batch["multi_modal_inputs"] = given
    if vision.mrope:
        batch.batch["position_ids"] = torch.stack(
            [positions(vision, batch, i, rows[i][1]) for i in range(len(rows))]
        )


def positions(vision: Vision, batch: Any, row: int, inputs: dict[str, Any]) -> Any:
    """[4, P+R]: of text, then of time, height and width, by the model's own get_rope_index."""
    import torch

    mask, plain = batch.batch["attention_mask"][row], batch.batch["position_ids"][row]  # [P+R]
    ids = batch.batch["input_ids"][row][mask.bool()][None]  # [1, n]
    kinds = (ids == vision.placeholder).int()
    found, _ = without_weights(vision.folder).model.get_rope_index(
        input_ids=ids,
        mm_token_type_ids=kinds,
        image_grid_thw=inputs.get("image_grid_thw"),
        attention_mask=None,
    )
    whole = plain.new_zeros(3, len(plain))
    whole[:, mask.bool()] = found[:, 0]
    return torch.cat([plain[None], whole])


@functools.cache
def without_weights(folder: str) -> Any:
    """The model, on torch's meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))


def layers(folder: str) -> list[str]:
    """Classes of the model's layers, for FSDP to cut it by. verl would take all that transformers does not split, also
    embeddings around an embedding, which it takes once more."""
    from torch.nn import Embedding

    model = without_weights(folder)
    whole = {
        type(m).__name__
        for m in model.modules()
        if any(isinstance(part, Embedding) for part in m.modules())
    }
    return sorted({*model._no_split_modules} - whole)


def shown(tokenizer: Any, ids: list[int], task: Any) -> tuple[list[int], dict[str, Any]]:
    """A conversation's ids as vLLM wants them, and what else it wants to be shown: arguments of its `generate`."""
    vision: Vision | None = getattr(tokenizer, "vision", None)
    if not vision or not sources(task.messages):
        return ids, {}
    kept, pictures = vision.shrink(ids, task.messages, task.row_id)
    return kept, {"image_data": pictures}


def banned(tokenizer: Any) -> dict[str, Any]:
    """Sampling parameters by which the policy never says what stands for an image."""
    vision: Vision | None = getattr(tokenizer, "vision", None)
    return {"logit_bias": dict.fromkeys(vision.placeholders, -100.0)} if vision else {}


def ban(workers: Any, tokenizer: Any) -> None:
    """The same in the trainer (training.Workers), actor and reference. A token that is never sampled is never worth
    less than others either, and would take all the probability that these lose."""
    import ray

    vision: Vision | None = getattr(tokenizer, "vision", None)
    if not vision:
        return
    placeholders = vision.placeholders

    def hook(worker: Any, name: str) -> None:  # in the worker, to which it travels by value
        def silence(_module: Any, _args: Any, logits: Any) -> Any:
            logits[
                ..., placeholders
            ] = -1e4  # whose exponential is 0, and which entropy can multiply by that
            return logits

        held = getattr(worker, "worker_dict", {name: worker})[name]
        for part in filter(None, (held.actor, held.ref)):
            part.engine.module.get_output_embeddings().register_forward_hook(silence)

    groups = {name: getattr(workers, name) for name in ("actor", "ref") if getattr(workers, name)}
    ray.get(
        [
            worker.__ray_call__.remote(hook, name)
            for name, group in groups.items()
            for worker in group.workers
        ]
    )
