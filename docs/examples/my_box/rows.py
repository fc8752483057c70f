# my_box/rows.py
import random

THINGS = ["apple", "book", "candle", "cup", "fork", "glove", "hat", "jar"]
HELD_OUT = ["key", "lamp", "pen", "plate"]
PUT = {
    "type": "function",
    "name": "put",
    "description": "Put it into the box.",
    "parameters": {
        "type": "object",
        "properties": {"item": {"type": "string"}},
        "required": ["item"],
    },
    "strict": True,
}


def call(number, item):
    return {
        "type": "function_call",
        "call_id": f"call_{number}",
        "name": "put",
        "arguments": f'{{"item": "{item}"}}',
    }


def output(number, text):
    return {"type": "function_call_output", "call_id": f"call_{number}", "output": text}


EXAMPLE = [  # a small model copies what it sees
    {"role": "user", "content": "Put the bell and the coin into the box."},
    call(0, "bell"),
    output(0, '{"box":["bell"]}'),
    call(1, "coin"),
    output(1, '{"box":["bell","coin"]}'),
    {"role": "assistant", "content": "Done."},
]


def rows(batch, size, seed, pass_rates, held_out=False):
    """Rows for one batch. They depend on the arguments alone."""
    rng = random.Random(f"{seed} {batch}")
    things = HELD_OUT if held_out else THINGS
    return [row(rng.sample(things, 2)) for _ in range(size)]


def row(wanted):
    question = f"Put the {' and the '.join(wanted)} into the box."
    messages = [*EXAMPLE, {"role": "user", "content": question}]
    return {"responses_create_params": {"input": messages, "tools": [PUT]}, "wanted": wanted}
