"""Supervised fine-tuning on conversations, with the workers of the loop: the `sft` command, a warm-up before RL.

    python algorithm.py --config math_cpu --config sft --config cpu sft 'env.train_files=[chats.jsonl]'
    python algorithm.py --config math_cpu --config cpu actor_rollout_ref.model.path=runs/sft/export

Rows of env.train_files, JSON (a row a line, also .gz) or parquet: `messages`, chat messages of which every one of the
assistant is learned, stop token included, and `tools` where there are any; or `prompt` (data.prompt_key: text, or
messages) and `response`, text. Loss: verl's sft_loss, the mean over all learned tokens
of a batch of data.train_batch_size rows, one optimiser step each. Held out: env.val_files, the same mean at
trainer.test_freq. Checkpoints, resume and export are those of `train`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from omegaconf import DictConfig

import env
from kit import later
from kit.config.load import to_plain
from kit.data.episodes import Episode
from kit.errors import ConfigError
from kit.runs import checkpoints, preparation
from kit.runs.preparation import Data
from kit.runs.run_dir import Run

training, start, damage = (
    later("training"),
    later("kit.runs.launch"),
    later("kit.runs.finite_check"),
)


@dataclass
class Example(Episode):
    """A conversation in tokens: its prompt goes up to the assistant's first word, its mask is 1 on the assistant's."""

    file: str = ""
    weight: float | None = None


def read_conversations(
    path: str, prompt_key: str = "prompt"
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file:line`, row), each with `messages`: of a prompt and a response, too. Raises env.DataError."""
    for where, raw in env.raw_rows(path, "messages", prompt_key):
        row = env.parse_json(raw, where)
        if row.get("messages") is None and prompt_key in row:
            prompt, response = row[prompt_key], row.get("response")
            if not (
                prompt and isinstance(prompt, str | list) and response and isinstance(response, str)
            ):
                why = f"`{prompt_key}` must be text or messages, and `response` text; they are"
                raise env.DataError(f"{where}: {why} {prompt!r:.40} and {response!r:.40}")
            asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            row = {
                "tools": row.get("tools"),
                "messages": [*asked, {"role": "assistant", "content": response}],
            }
        yield where, row


def tokenize(row: Mapping[str, Any], tokenizer: Any, stop_ids: set[int], where: str) -> Example:
    """A conversation -> its ids, split where the assistant begins and ends. Raises env.DataError.

    What the assistant says is encoded by itself, as it is sampled in RL: prompt, answer, what comes between, answer.
    """
    messages, template = row.get("messages"), {"tools": row.get("tools") or None, "tokenize": False}
    if not isinstance(messages, list) or not all(isinstance(said, dict) for said in messages):
        messages = []
    roles = [said.get("role") for said in messages]
    if "assistant" not in roles:
        why = "no `messages`, or none of the assistant's in it, nor `prompt` and `response`; add what is to be learned"
        raise env.DataError(f"{where}: {why}")
    if roles[0] == "assistant":
        raise env.DataError(
            f"{where}: nothing comes before the assistant's first message; add what it answers"
        )
    stops = tokenizer.convert_ids_to_tokens(sorted(stop_ids))
    ids: list[int] = []
    mask: list[int] = []
    done = ""
    for i in [i for i, role in enumerate(roles) if role == "assistant"]:
        try:
            before = tokenizer.apply_chat_template(
                messages[:i], add_generation_prompt=True, **template
            )
            after = tokenizer.apply_chat_template(messages[: i + 1], **template)
        except (TemplateError, TypeError) as error:  # TypeError: content that is no text
            why = f"the chat template does not take message {i + 1}: {error}"
            raise env.DataError(
                f"{where}: {why}; change the message, or {env.OTHER_TEMPLATE}"
            ) from None
        if not before.startswith(done) or not after.startswith(before):
            raise env.DataError(
                f"{where}: the chat template rewrites what comes before message {i + 1}; {env.OTHER_TEMPLATE}"
            )
        answer = after[len(before) :]
        ends = [answer.rfind(stop) + len(stop) for stop in stops if stop in answer]
        answer = (
            answer[: max(ends)] if ends else answer
        )  # what the template puts after its stop token is not sampled
        for text, learned in ((before[len(done) :], 0), (answer, 1)):
            new = tokenizer.encode(text, add_special_tokens=False)
            ids, mask = ids + new, mask + [learned] * len(new)
        done = before + answer
    start = mask.index(1)
    nothing = [0.0] * (len(ids) - start)
    return Example(
        where, "", "", ids[:start], ids[start:], mask[start:], log_probs=nothing, reward=0.0
    )


def prepare(config: DictConfig) -> Data:
    """As recipe.prepare, for the conversations of env.train_files and env.val_files: paths, or {path, weight}.

    What does not fit the recipe's lengths is dropped. Raises ConfigError, also where fewer rows are left than a batch
    takes, and env.DataError.
    """
    tokenizer, stop_ids, functions = preparation.check_recipe(config, "sft")
    if getattr(tokenizer, "vision", None):
        raise ConfigError(
            "`sft` of a model that sees is not there: take another model, or train it from rewards"
        )
    found: dict[str, list[Example]] = {"train_files": [], "val_files": []}
    dropped, limits = [], config.data
    for name, examples in found.items():
        for entry in to_plain(config.env[name]):
            given = dict(entry) if isinstance(entry, Mapping) else {"path": entry}
            for where, row in read_conversations(str(given["path"]), limits.prompt_key):
                example = tokenize(row, tokenizer, stop_ids, where)
                example.file, example.weight = str(given["path"]), given.get("weight")
                fits = len(example.prompt_ids) <= limits.max_prompt_length
                if fits and len(example.response_ids) <= limits.max_response_length:
                    examples.append(example)
                else:
                    dropped.append(where)
    train, validation = (
        found["train_files"][: config.env.max_rows],
        found["val_files"][: config.env.val_max_rows],
    )
    if len(train) < limits.train_batch_size:
        raise ConfigError(
            f"env.train_files hold {len(train)} usable rows, fewer than data.train_batch_size="
            f"{limits.train_batch_size}; add some, or lower it; {len(dropped)} were over data.max_prompt_length="
            f"{limits.max_prompt_length}, max_response_length={limits.max_response_length} tokens"
        )
    preparation.set_steps(config, "sft", len(train) // limits.train_batch_size)
    data = Data(train, validation, dropped, tokenizer, stop_ids, *functions)
    data.per_epoch = len(train)
    return data


def run_command(config: DictConfig, run: Run, data: Data) -> None:
    """Train on data.train to trainer.total_training_steps, from the checkpoint that `run` goes on from."""
    with contextlib.ExitStack() as stack:
        workers = start.start(run, data, stack, sample=False).workers
        from verl.utils.config import omega_conf_to_dataclass  # imported by now; before, 10 s
        from verl.workers.utils.losses import sft_loss

        workers.actor.set_loss_fn(
            functools.partial(sft_loss, omega_conf_to_dataclass(config.actor_rollout_ref.actor))
        )
        state: dict[str, Any] = {"command": "sft", "step": 0}
        if run.checkpoint:
            with run.stage("load_checkpoint"):
                state = checkpoints.load(workers, run.checkpoint)
        with run.saving(lambda: run.save(workers, state)):
            with run.stage("testing"):
                run.log(state["step"], held_out_loss(config, data, workers))
            while state["step"] < run.last:
                one_step(config, run, data, workers, state)
        run.export()
    run.say(
        f"the model is in {run.folder}/export: actor_rollout_ref.model.path={run.folder}/export"
    )


def held_out_loss(config: DictConfig, data: Data, workers: Any) -> dict[str, float]:
    """Mean over all learned tokens of the held-out rows, in nats."""
    total_loss, tokens, size = 0.0, 0.0, config.data.train_batch_size
    for i in range(0, len(data.validation), size):
        batch = training.to_batch(
            data.validation[i : i + size], data.tokenizer.pad_token_id, temperature=1.0
        )
        mask = batch.batch["response_mask"]  # [B, R]
        total_loss -= float(
            (training.log_probs(workers.actor, batch, config)["log_probs"] * mask).sum()
        )
        tokens += float(mask.sum())
    return {"val/loss": total_loss / tokens} if tokens else {}


def one_step(config: DictConfig, run: Run, data: Data, workers: Any, state: dict[str, Any]) -> None:
    """One optimiser step, and what is due after it."""
    step = state["step"] + 1
    run.begin(step)
    with run.stage("update_actor"):
        settings = config.data
        rows = env.batch(
            data.train, settings.train_batch_size, step, settings.seed, settings.shuffle
        )
        batch = training.to_batch(rows, data.tokenizer.pad_token_id, temperature=1.0)
        metrics = training.update_sft(workers.actor, batch, config)
        state["step"] = step
    if found := damage.damage(batch, metrics, config):
        run.say(f"step {step} skipped: {run.keep_damaged(step, found, batch)}")
    else:
        run.damaged = 0
    if run.due(step, config.trainer.save_freq):
        run.save(workers, state)
    if run.due(step, config.trainer.test_freq):
        with run.stage("testing"):
            metrics |= held_out_loss(config, data, workers)
    run.log(step, metrics | run.timings())
    names = {"loss": "actor/loss", "val/loss": "val/loss"}
    run.say_line(
        step, {label: f"{metrics[name]:.4g}" for label, name in names.items() if name in metrics}
    )
