"""The policy endpoint: one server that speaks OpenAI's and Anthropic's APIs to agents and judges.

    agent -> POST /v1/chat/completions, /v1/responses or /v1/messages -> here -> vLLM

    server.py        HTTP: routes, keys, bodies, streams
    sessions.py      the agent of one episode: its limits, its calls, its training rows
    shared.py        all other clients: Gym's agents, which send token ids back, and judges
    prompts.py       the prompt of a call, and its response
    tree.py          which call continues which
    requests.py      a request in the form that all dialects share
    dialects/        request -> Request, Reply -> body, body -> events of a stream

Protects: sampled tokens, which are stored here and never encoded again from an agent's text.
"""
