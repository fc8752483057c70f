"""One step ahead (trainer.one_step_off: 1): while a batch is trained on, the next one is sampled.

    step k:  collect batch k, begun a step ago | begin k+1 | measure, credit, learn | publish: hold, send, go on | ...

The servers stay awake, and answers that are under way when new weights come go on with them from where they were: vLLM
ends the requests, the weights change, and what was sampled goes back as the beginning of the same answer. So a token is
at most one step older than the weights that it trains, and `Episode.versions` says of each which ones sampled it.
`rollout/staleness/*` counts that; configs/ahead.yaml corrects for it by importance weights of tokens. Evaluations wait
for the batch under way. A checkpoint knows nothing of it: a resumed run samples the same prompts once more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

import inference
from inference import OnDone, Requests
from kit.data.episodes import Episode


class Loop:
    """asyncio.Runner's calls, of a loop that runs in a thread of its own: also while the driver waits for an update."""

    def __enter__(self) -> Loop:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="episodes", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self.loop

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Have it done, and go on."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Have it done, and wait for it; a signal's exception ends the wait and the work."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


class Servers(inference.Servers):
    """inference.Servers with a batch under way: `begin` has it sampled, `rollout` of the same requests waits for it."""

    loop: Loop  # type: ignore[assignment]
    requests: Requests = ()  # under way
    under_way: Future[list[Episode]]
    ended: list[tuple[int, Episode]]  # of them
    tell: OnDone | None  # who wants to know of the others

    def begin(self, requests: Requests, sampling: dict[str, Any], baselines: bool = False) -> None:
        """Have episodes sampled for these requests, from now on."""
        self.requests, self.ended, self.tell = requests, [], None
        self.under_way = self.loop.start(self.play(requests, sampling, self._on_done, baselines))

    def _on_done(self, index: int, episode: Episode) -> None:
        self.ended.append((index, episode))
        if self.tell:
            self.tell(index, episode)

    def rollout(
        self,
        requests: Requests,
        sampling: dict[str, Any],
        on_done: OnDone = lambda *_: None,
        baselines: bool = False,
    ) -> list[Episode]:
        """What was begun with these requests; of others, as inference.Servers.rollout, once that is done."""
        if not self.requests:
            return super().rollout(requests, sampling, on_done, baselines)
        if (
            self.requests[0][1] != requests[0][1]
        ):  # an evaluation: what is under way stays for later
            self.under_way.result()
            return super().rollout(requests, sampling, on_done, baselines)
        self.requests = ()
        self.loop.run(self._listen(on_done))
        return self.under_way.result()

    async def _listen(self, on_done: OnDone) -> None:
        """To be told of each that ends, and of those that have."""
        for index, episode in self.ended:
            on_done(index, episode)
        self.tell = on_done

    def sleep(self) -> None:
        """They stay awake, and sample from weights that will soon be older."""
        self.asleep = True

    def publish(self, step: int) -> None:
        """From now on vLLM samples from the actor's weights after `step`, the rest of what is under way, too."""
        assert self.sync
        self.sync.abort_replicas()
        super().publish(step)
        self.sync.resume_generation_replicas()
