# my_agent.py
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
CALL = {"name": "open_drawer", "arguments": '{"number": 211}'}
EXAMPLE = [  # a small model copies what it sees
    {"role": "user", "content": "What is in drawer two hundred eleven?"},
    {"type": "function_call", "call_id": "1", **CALL},
    {"type": "function_call_output", "call_id": "1", "output": "a violin"},
    {"role": "assistant", "content": "a violin"},
]


async def solve(row, base_url, key):
    @function_tool
    def open_drawer(number: int) -> str:
        """Open a drawer and see what is in it."""
        return row["thing"] if number == row["number"] else "nothing"

    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key)
    model = OpenAIChatCompletionsModel("policy", client)
    agent = Agent(name="drawers", instructions="Open the drawer.", model=model, tools=[open_drawer])
    question = {"role": "user", "content": row["responses_create_params"]["input"]}
    return (await Runner.run(agent, [*EXAMPLE, question])).final_output
