"""A program as an environment, in any language. It runs from `reset` to the end of the episode.

    env: {verifier: "templates/program.py:Program"}

A row has the words of its command as `command`. For each line of JSON with a text of the policy, at
first null, the program writes a line of JSON: {"observation": ..., "reward": ..., "done": ...}.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any


class Program:
    """An episode. If the program ends early, the episode fails."""

    def reset(self, row: dict[str, Any]) -> str | None:
        pipe = subprocess.PIPE
        self.program = subprocess.Popen(row["command"], stdin=pipe, stdout=pipe, text=True)
        return self.ask(None)[0]

    def ask(self, text: str | None) -> tuple[str | None, float, bool]:
        assert self.program.stdin and self.program.stdout
        print(json.dumps(text), file=self.program.stdin, flush=True)
        answer = json.loads(self.program.stdout.readline())
        return answer["observation"], answer["reward"], answer["done"]

    step = ask

    def close(self) -> None:
        self.program.kill()
        self.program.wait()
