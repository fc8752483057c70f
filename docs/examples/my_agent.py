# my_agent.py
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def solve(row, base_url, key):
    """Run one episode. The answer goes to the verifier."""

    @function_tool
    def open_drawer(number: int) -> str:
        """Open a drawer and see what is in it."""
        return row["thing"] if number == row["number"] else "nothing"

    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key)
    model = OpenAIChatCompletionsModel("policy", client)
    agent = Agent(name="drawers", instructions="Open the drawer.", model=model, tools=[open_drawer])
    return (await Runner.run(agent, row["responses_create_params"]["input"])).final_output
