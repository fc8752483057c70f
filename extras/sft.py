"""The command `sft`: supervised fine-tuning on conversations, with the workers of `train`.

    python algorithm.py --config math --config sft sft 'env.train_files=[chats.jsonl]'
    python algorithm.py --config math actor_rollout_ref.model.path=runs/sft/export

A row of env.train_files (kit/data/row_files.py) has one of these formats:

- `messages`. All assistant messages are trained on, with their stop tokens, except those that the
  row excludes by `weight: 0`, `train: false` and the like (TRAINING_FLAGS).
- `prompt` (data.prompt_key) and `response` or `completion`, each text or messages. The prompt is
  context.

`tools` and `chat_template_kwargs` are those of TRL. Lists and objects may be JSON text.

The loss is verl's sft_loss: the mean over all trained tokens of a batch. A batch has
data.train_batch_size rows and one optimizer step. Every trainer.test_freq steps, the same mean is
measured on env.val_files. Checkpoints, resume and export are those of `train`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import env
from env import Json
from gym_client import GymError
from kit.chat.template import ChatTemplate, RenderError
from kit.data import fields
from kit.data.episode import Episode
from kit.data.fingerprint import hash_problem, name_row
from kit.data.row_files import parse_object, read_raw_rows, report_progress
from kit.data.tasks import find_entry_files, limit_rows
from kit.engine.inputs import RunInputs
from kit.errors import ConfigError
from kit.recipe.derive import RowFacts
from kit.recipe.entries import Entry
from kit.recipe.keys import ACTOR
from kit.recipe.load import Source
from kit.recipe.recipe import Recipe
from kit.recipe.schedule import POSITION
from kit.recipe.settings import Settings
from kit.run import checkpoints
from kit.run.checkpoints import LoopState
from kit.run.console import format_value, say
from kit.run.prepare import (
    OnFeatures,
    Prepared,
    check,
    check_enough_rows,
    finish,
    ignore_features,
)
from kit.run.run import Run

if TYPE_CHECKING:  # verl takes 7 s to import
    from tensordict import TensorDict
    from verl import DataProto

    from training import WorkerGroup, Workers

IS_TRAINED = 1  # in the mask of a conversation
IS_CONTEXT = 0


@dataclass
class Example(Episode):
    """A conversation in tokens. Its prompt ends where the first assistant message begins.

    The response mask is 1 on the tokens of the assistant.
    """

    file: str = ""
    weight: float | None = None
    key: str = ""  # its name by its content
    digest: str = ""


# --- rows ----------------------------------------------------------------------------------------


def read_conversations(
    path: str, prompt_key: str = "prompt", name: str = ""
) -> Iterator[tuple[str, Json]]:
    """Yield (`name:line`, row), each with `messages`. Raises env.DataError.

    name: the path if it is empty.
    """
    for row_id, raw in read_raw_rows(path, name):
        row: Any = parse_object(raw, row_id)
        row = row if isinstance(raw, str) else env.drop_nulls(row)  # Arrow fills objects with them
        yield row_id, to_conversation(row, row_id, prompt_key)


def to_conversation(row: Json, row_id: str, prompt_key: str = "prompt") -> Json:
    """Return a row with `messages`, maybe made from its prompt and response.

    Raises env.DataError.
    """
    if row.get("messages") or prompt_key not in row:
        return {**row, "messages": env.read_prompt(row.get("messages"), row_id, "messages")}
    key = "completion" if row.get("completion") and not row.get("response") else "response"
    messages = []
    for name, role in ((prompt_key, "user"), (key, "assistant")):
        part = env.read_prompt(row.get(name), row_id, name)
        part = [{"role": role, "content": part}] if part and isinstance(part, str) else part
        if not part or fields.list_objects(part) != part:
            raise env.DataError(
                f"{row_id}: `{name}` must be text or messages, not {part!r:.40}. Correct the row."
            )
        is_context = name == prompt_key
        messages += [{**m, "weight": 0} if is_context and env.is_answer(m) else m for m in part]
    others = {name: value for name, value in row.items() if name not in (prompt_key, key)}
    return {**others, "messages": messages}


def tokenize(row: Json, template: ChatTemplate, row_id: str) -> Example:
    """Turn a conversation into token ids, split where the assistant begins and ends.

    The ids are those of an episode of RL with these answers: each assistant message is encoded
    separately, as it is sampled, and the messages between two of them as observations are. Raises
    env.DataError.
    """
    chat = to_conversation(row, row_id)
    fields.check(fields.walk(fields.CHAT_ROW, chat, chat["messages"]), row_id)
    arguments = env.read_object(chat, env.TEMPLATE_ARGUMENTS, row_id)
    template = template.with_arguments(arguments, row_id)
    items = chat["messages"] if isinstance(chat["messages"], list) else []
    messages = env.render_items(items, row_id)
    starts = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not starts or starts[0] == 0:
        keys = ", ".join(key for key in row if row[key])
        raise env.DataError(
            f"{row_id}: there must be `messages` with an answer of the assistant after another "
            f"message, or a `prompt` and a `response` or `completion`. It has {keys}. "
            "Correct the row."
        )
    flags = read_flags(items, row_id)
    tools = env.render_tools(chat.get("tools") or [], row_id)
    prompt_ids = template.encode_prompt(messages[: starts[0]], tools, row_id)
    ids: list[int] = []
    mask: list[int] = []
    end = starts[0]  # of the messages that are encoded
    for start, is_trained in zip(starts, flags, strict=True):
        try:
            if ids:
                between = messages[end:start]
                context = template.encode_continuation(between, ids[-1], is_trusted=True)
                ids += context
                mask += [IS_CONTEXT] * len(context)
            answer = template.encode_answer(messages[start], messages[start - 1]["role"])
        except (RenderError, GymError) as error:
            raise env.DataError(
                f"{row_id}: the chat template does not take message {start + 1}: {error}. Change "
                f"the message, or {env.TEMPLATE_HINT}."
            ) from None
        ids += answer
        mask += [IS_TRAINED if is_trained else IS_CONTEXT] * len(answer)
        end = start + 1
    no_log_probs = [0.0] * len(ids)
    return Example(row_id, "", "", prompt_ids, ids, mask, log_probs=no_log_probs, reward=0.0)


def read_flags(items: list[Json], row_id: str) -> list[bool]:
    """Read for each answer of a conversation whether it is trained on. Raises env.DataError.

    Consecutive messages of the assistant are one answer, and an empty answer is none.
    """
    flags = []
    for is_answer, group in itertools.groupby(items, env.is_answer):
        answer = [item for item in group if env.render_items([item], row_id)]
        if is_answer and answer:
            values = {is_trained(item, row_id) for item in answer}
            if len(values) > 1:
                raise env.DataError(
                    f"{row_id}: of two messages of the assistant in a row, one is trained on and "
                    "the other is not. They are one answer, so give them the same flag."
                )
            flags.append(values.pop())
    if not any(flags):
        raise env.DataError(f"{row_id}: no message of the assistant is trained on. Remove the row.")
    return flags


def is_trained(item: Json, row_id: str) -> bool:
    """Return whether a message is trained on: unless it has a flag of 0. Raises env.DataError."""
    values = {key: item[key] for key in fields.TRAINING_FLAGS if item.get(key) is not None}
    for key, value in values.items():
        if value not in (0, 1):
            raise env.DataError(
                f"{row_id}: `{key}` of a message is {value!r:.40}. Use 0 (context) or 1 (trained)."
            )
    return all(values.values())


# --- the command ---------------------------------------------------------------------------------


def prepare(source: Source, on_features: OnFeatures = ignore_features) -> Prepared:
    """Check a recipe and load its conversations, as kit.run.prepare.prepare does for tasks.

    An entry of env.train_files or env.val_files is a path, or {path, weight}. Rows over the
    recipe's lengths are dropped. Raises env.DataError, and ConfigError, also if fewer rows are left
    than a batch needs.
    """
    draft = check(source, "sft", on_features)
    settings = draft.settings
    inputs = draft.inputs
    if inputs.processor.reads_images:
        raise ConfigError(
            "`sft` does not support models that read images. Use another model, or train it from "
            "rewards."
        )
    section = settings.env
    examples = load_examples(settings, inputs, section.train_files)
    inputs.train = limit_rows(examples, section.max_rows)
    check_enough_rows(settings, inputs)
    examples = load_examples(settings, inputs, section.val_files)
    inputs.validation = limit_rows(examples, section.val_max_rows)
    inputs.per_epoch = len(inputs.train)
    batches = len(inputs.train) // settings.data.train_batch_size
    return Prepared(finish(draft, RowFacts(batches), image_values={}), inputs, draft.features)


def load_examples(settings: Settings, inputs: RunInputs, entries: Sequence[Entry]) -> list[Example]:
    """Return the conversations of env.train_files or env.val_files that fit the lengths."""
    limits = settings.data
    examples = []
    copies: Counter[str] = Counter()
    for entry, found in find_entry_files(entries, say):
        unused: Counter[str] = Counter()
        files = [read_conversations(path, limits.prompt_key, name) for name, path in found.items()]
        rows = itertools.chain(*files)
        for row_id, row in report_progress(rows, entry.file, say):
            example = tokenize(row, inputs.template, row_id)
            unused.update(fields.list_unused(fields.walk(fields.CHAT_ROW, row, row["messages"])))
            arguments = env.read_object(row, env.TEMPLATE_ARGUMENTS, row_id)
            unused.update(inputs.template.list_unused(arguments))
            example.file = entry.file
            example.weight = entry.weight
            example.key = name_row(hash_problem(row), copies)
            is_prompt_short = len(example.prompt_ids) <= limits.max_prompt_length
            if is_prompt_short and len(example.response_ids) <= limits.max_response_length:
                examples.append(example)
            else:
                inputs.dropped.append(row_id)
        if unused:
            say(fields.describe_unused(unused, entry.file))
    return examples


def run_command(recipe: Recipe, run: Run, inputs: RunInputs) -> None:
    """Train to trainer.total_training_steps, from the checkpoint that `run` resumes from."""
    from kit.run import launch

    with contextlib.ExitStack() as stack:
        workers = launch.start(run, inputs, stack, samples=False).workers
        assert workers
        set_loss(recipe, workers)
        state = LoopState(command="sft")
        if run.files.checkpoint:
            with run.stage("load_checkpoint"):
                state = checkpoints.load(workers, run.files.checkpoint)
        trainer = Trainer(recipe, run, inputs, workers, state)
        with run.stages.save_on_stop(trainer.save):
            trainer.fit()
        run.mark_complete()
    run.files.export()  # only now: the workers no longer hold memory, and no monitor watches them
    say(f"The model is in {run.folder}/export. Train it with RL by")
    say(f"    actor_rollout_ref.model.path={run.folder}/export")


@dataclass
class Trainer:
    """The loop of supervised fine-tuning."""

    recipe: Recipe
    run: Run
    inputs: RunInputs
    workers: Workers
    state: LoopState

    def fit(self) -> None:
        """Train to the last step; measure the held-out loss and save as the recipe says."""
        with self.run.stage("testing"):
            self.run.log.write(self.state.step, self.compute_validation_loss())
        while self.state.step < self.run.last:
            self.step()

    def step(self) -> None:
        """Take one optimizer step, and save and evaluate if that is due after it."""
        import training
        from kit.run import finite_check

        run = self.run
        data = self.recipe.data
        step = self.state.step + 1
        run.stages.begin_step(step)
        with run.stage("update_actor"):
            size = data.train_batch_size
            start = self.state.rows
            rows = env.take_batch(self.inputs.train, size, start, data.seed, data.shuffle)
            batch = training.build_batch(rows, self.inputs.tokenizer.pad_token_id, temperature=1.0)
            batch.meta_info[POSITION] = step - 1  # of the learning rate
            metrics = update_sft(self.workers.actor, batch, self.recipe)
            self.state = replace(self.state, step=step, rows=start + size)
        reason = finite_check.find_reason_to_skip(batch, metrics, self.recipe)
        if reason:
            say(f"step {step} skipped: {run.files.keep_nonfinite(step, reason, batch)}")
        else:
            run.files.nonfinite_steps = 0
        if run.is_due(step, self.recipe.trainer.save_freq):
            self.save()
        if run.is_due(step, self.recipe.trainer.test_freq):
            with run.stage("testing"):
                metrics |= self.compute_validation_loss()
        run.log.write(step, metrics | run.stages.timings())
        names = {"loss": "actor/loss", "val loss": "val/loss"}
        values = {label: format_value(metrics[n]) for label, n in names.items() if n in metrics}
        run.display.print_step(step, values, run.stages.timing)

    def compute_validation_loss(self) -> dict[str, float]:
        """Return the mean loss over all trained tokens of the held-out rows, in nats."""
        import training

        total = 0.0
        tokens = 0.0
        size = self.recipe.data.train_batch_size
        for start in range(0, len(self.inputs.validation), size):
            rows = self.inputs.validation[start : start + size]
            batch = training.build_batch(rows, self.inputs.tokenizer.pad_token_id, temperature=1.0)
            mask = batch.batch["response_mask"]  # [B, R]
            result = training.compute_log_probs(self.workers.actor, batch, self.recipe)
            total -= float((result["log_probs"] * mask).sum())
            tokens += float(mask.sum())
        return {"val/loss": total / tokens} if tokens else {}

    def save(self) -> Path | None:
        """Save the workers' weights if they are finite, and return the last checkpoint."""
        return self.run.files.save(self.workers, self.state)


def set_loss(recipe: Recipe, workers: Workers) -> None:
    """Give the workers verl's sft_loss."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import sft_loss

    settings = omega_conf_to_dataclass(recipe.for_verl(ACTOR))
    workers.actor.set_loss_fn(functools.partial(sft_loss, settings))


def update_sft(actor: WorkerGroup, batch: DataProto, recipe: Recipe) -> dict[str, float]:
    """Take one optimizer step on verl's sft_loss: mean cross entropy of the response tokens."""
    import training

    data = training.make_update_data(
        batch,
        recipe.data_parallel_size(),
        1,
        recipe.actor,
        epochs=1,
        calculate_entropy=False,
        compute_loss=True,
        distillation_use_topk=False,
    )
    set_loss_mask(data)
    output = training.wait_for_output(actor.update_actor(data))
    return training.collect_metrics(output, recipe, "actor")


def set_loss_mask(data: TensorDict) -> None:
    """Set the loss mask that verl's sft_loss reads: over prompt and response, packed."""
    import torch

    zeros = torch.zeros_like(data["prompts"])  # [S, P]
    mask = torch.cat([zeros, data["response_mask"]], dim=1)  # [S, P+R]
    is_token = data["attention_mask"].bool()  # [S, P+R]
    offsets = data["input_ids"].offsets()  # [S+1]
    data["loss_mask"] = torch.nested.nested_tensor_from_jagged(mask[is_token], offsets=offsets)
