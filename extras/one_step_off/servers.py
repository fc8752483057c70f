"""An event loop in a thread, and servers with one batch in progress."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import inference
from inference import ignore_episode
from kit.data.episode import Episode
from kit.engine.interfaces import OnDone
from kit.engine.sampling import EpisodeRequest, Sampling


class BackgroundLoop:
    """An event loop in a thread, with the methods of asyncio.Runner.

    Episodes in it also progress while the driver waits for an update.
    """

    def __enter__(self) -> BackgroundLoop:
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
        """Run a coroutine in the thread, and return immediately."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine and wait for it. If a signal ends the wait, cancel the coroutine."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


class Servers(inference.Servers):
    """inference.Servers with one batch in progress.

    `start_rollout` starts it, and `rollout` with the same requests waits for it.
    """

    loop: BackgroundLoop
    pending_requests: Sequence[EpisodeRequest] = ()  # of the batch in progress
    pending: Future[list[Episode]]  # the episodes of this batch
    ended: list[tuple[int, Episode]]  # those that have ended, with their indices
    on_done: OnDone | None  # of `rollout`; None until that is called

    def start_rollout(
        self, requests: Sequence[EpisodeRequest], sampling: Sampling, baselines: bool = False
    ) -> None:
        """Start to sample episodes for these requests."""
        self.pending_requests = requests
        self.ended = []
        self.on_done = None
        work = self.rollout_async(requests, sampling, self._receive, baselines)
        self.pending = self.loop.start(work)

    def _receive(self, index: int, episode: Episode) -> None:
        self.ended.append((index, episode))
        if self.on_done:
            self.on_done(index, episode)

    def rollout(
        self,
        requests: Sequence[EpisodeRequest],
        sampling: Sampling,
        on_done: OnDone = ignore_episode,
        baselines: bool = False,
    ) -> list[Episode]:
        """Wait for the batch in progress, and return its episodes.

        If the requests are of another batch, such as an evaluation's, run these after it.
        """
        if not self.pending_requests:
            return super().rollout(requests, sampling, on_done, baselines)
        if self.pending_requests[0].id.group_id != requests[0].id.group_id:  # an evaluation
            self.pending.result()
            return super().rollout(requests, sampling, on_done, baselines)
        self.pending_requests = ()
        self.loop.run(self._subscribe(on_done))
        return self.pending.result()

    async def _subscribe(self, on_done: OnDone) -> None:
        """Call `on_done` for all episodes that have ended, and later for each other that ends."""
        for index, episode in self.ended:
            on_done(index, episode)
        self.on_done = on_done

    def sleep(self) -> None:
        """Stay awake, but set `is_asleep`: then even a skipped step calls `update_weights`."""
        self.is_asleep = True

    def update_weights(self, step: int) -> Mapping[str, float]:
        """Give vLLM the actor's weights after `step`, also for the responses in progress."""
        assert self.checkpoint_manager, "one_step_off is for training, which has an actor"
        self.checkpoint_manager.abort_replicas()
        metrics = super().update_weights(step)
        self.checkpoint_manager.resume_generation_replicas()
        return metrics
