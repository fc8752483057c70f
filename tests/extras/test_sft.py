"""Supervised fine-tuning: the tokens with a loss, files of conversations, and the export."""

from __future__ import annotations

import json

import pandas
import pytest

import env
from extras import sft
from kit.chat.processor import TextProcessor
from kit.chat.template import ChatTemplate
from kit.recipe.load import read_source
from kit.run.launch import Started
from kit.run.run import Run
from tests.helpers.recipes import CPU, RECIPE, metrics_of, tiny, write_chats, write_rows
from tests.helpers.stack import SESSION


@pytest.fixture(scope="module")
def tokenizer(workspace):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(workspace / "tied")


@pytest.fixture(scope="module")
def template(tokenizer):
    return ChatTemplate(TextProcessor(tokenizer), {1})


def test_only_messages_of_the_assistant_are_trained(tokenizer, template):
    turns = [("user", "say 7"), ("assistant", "7"), ("user", "again"), ("assistant", "77")]
    messages = [{"role": role, "content": text} for role, text in turns]
    example = sft.tokenize({"messages": messages}, template, "f:1")
    assert tokenizer.decode(example.prompt_ids) == "say 7 "
    assert tokenizer.decode(example.response_ids) == "7<end> again 77<end>"
    pairs = zip(example.response_ids, example.response_mask, strict=True)
    trained = [token for token, is_trained in pairs if is_trained]
    assert tokenizer.decode(trained) == "7<end>77<end>"
    for invalid in ([], messages[:1], "say 7", messages[1:2]):
        with pytest.raises(env.DataError, match="f:1: there must be `messages` with an answer"):
            sft.tokenize({"messages": invalid}, template, "f:1")


QUESTION = {"role": "user", "content": "say 7"}


@pytest.mark.parametrize(("flag", "value"), [("weight", 0), ("train", False)])
def test_an_answer_that_the_row_excludes_is_context(tokenizer, template, flag, value):
    excluded = {"role": "assistant", "content": "77", flag: value}
    included = {"role": "assistant", "content": "7", flag: not value}
    plain = {"role": "assistant", "content": "7"}
    for last in (included, plain, {**plain, flag: None}):
        messages = [QUESTION, excluded, {"role": "assistant", "content": ""}, QUESTION, last]
        example = sft.tokenize({"messages": messages}, template, "f:1")
        pairs = zip(example.response_ids, example.response_mask, strict=True)
        assert tokenizer.decode([token for token, mask in pairs if mask]) == "7<end>"
        assert tokenizer.decode(example.response_ids) == "77<end> say 7 7<end>"
    for messages, problem in (
        ([QUESTION, excluded], "no message of the assistant is trained on"),
        ([QUESTION, excluded, included], "of two messages of the assistant in a row, one is"),
        ([QUESTION, {**plain, flag: 0.5}], f"`{flag}` of a message is 0.5. Use 0"),
        ([QUESTION, {**plain, flag: "no"}], f"`{flag}` of a message is 'no'. Use 0"),
    ):
        with pytest.raises(env.DataError, match=f"^f:1: {problem}"):
            sft.tokenize({"messages": messages}, template, "f:1")


def test_a_completion_of_trl_is_trained_on_and_its_prompt_is_context(tokenizer, template, tmp_path):
    chat = [QUESTION, {"role": "assistant", "content": "1"}, QUESTION]
    answer = [{"role": "assistant", "content": "7"}]
    rows = [
        {"prompt": chat, "completion": answer},
        {"prompt": json.dumps(chat), "completion": json.dumps(answer)},
        {"prompt": chat, "response": "7"},
    ]
    path = write_rows(tmp_path / "a.jsonl", rows)
    for row_id, row in sft.read_conversations(str(path)):
        example = sft.tokenize(row, template, row_id)
        pairs = zip(example.response_ids, example.response_mask, strict=True)
        assert tokenizer.decode([token for token, mask in pairs if mask]) == "7<end>"
    with pytest.raises(env.DataError, match=r"x:1: there must be .* It has chosen, rejected\."):
        row = sft.to_conversation({"chosen": answer, "rejected": answer}, "x:1")
        sft.tokenize(row, template, "x:1")


def test_conversations_may_be_a_prompt_and_a_response(tmp_path):
    pairs = [
        {"prompt": "2?", "response": "4"},
        {"prompt": [{"role": "user", "content": "2?"}], "response": "4"},
    ]
    chat = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}]
    write_rows(tmp_path / "a.jsonl", [*pairs, {"messages": chat, "prompt": "other"}])
    read = [row["messages"] for _, row in sft.read_conversations(str(tmp_path / "a.jsonl"))]
    assert read == [chat] * 3
    pandas.DataFrame(pairs[:1]).to_parquet(tmp_path / "a.parquet")
    read = [row["messages"] for _, row in sft.read_conversations(str(tmp_path / "a.parquet"))]
    assert read == [chat]
    other_key = write_rows(tmp_path / "other.jsonl", [{"question": "2?", "response": "4"}])
    read = [row["messages"] for _, row in sft.read_conversations(str(other_key), "question")]
    assert read == [chat]
    for row in (
        {"prompt": "2?"},
        {"prompt": None, "response": "4"},
        {"prompt": 2, "response": "4"},
        {"prompt": "2?", "response": ["4"]},
    ):
        path = write_rows(tmp_path / "b.jsonl", [row])
        reason = r"b\.jsonl:1: `(prompt|response)` must be text or messages, not"
        with pytest.raises(env.DataError, match=reason):
            list(sft.read_conversations(str(path)))


def test_the_command_learns_and_exports_the_model(stack, monkeypatch, capsys):
    """It trains the shared actor."""
    changes = [*write_chats(stack.workspace), "trainer.experiment_name=sft"]
    changes += ["trainer.total_training_steps=20", "trainer.save_freq=10"]
    arguments = tiny(stack.workspace, *SESSION, *changes)
    recipe, inputs, _ = sft.prepare(read_source([str(CPU), str(RECIPE), "sft"], arguments))
    stack.workers.actor.load_checkpoint(str(stack.fresh))
    monkeypatch.setattr("kit.run.launch.start", lambda *_, **__: Started(stack.workers, None))
    with Run(recipe) as run:
        sft.run_command(recipe, run, inputs)
    metrics = metrics_of(run.folder)
    losses = [m["actor/loss"] for m in metrics if "actor/loss" in m]
    assert len(losses) == 20 and losses[0] > 3 and losses[-1] < 0.3, losses
    validation_losses = [m["val/loss"] for m in metrics if "val/loss" in m]
    # before the first step, both losses are of the same rows and weights
    assert validation_losses[0] == pytest.approx(losses[0], rel=1e-4)
    assert (run.folder / "export" / "model.safetensors").is_file()
    assert "path=runs/sft/export" in capsys.readouterr().out.replace("\n", "")
