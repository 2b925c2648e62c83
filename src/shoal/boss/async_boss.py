"""The boss with `await`: the same workers, the same orders, in a program that has other things
to do meanwhile.

    workers = await shoal.AsyncBoss.setup_host(2)
    boss = shoal.AsyncBoss(workers, model)
    await boss.distribute_model()
    await boss.send_optimizer(torch.optim.Adam, {"lr": 3e-3})
    prediction = await boss.forward(x, {})
    loss = loss_fn(prediction, y)
    loss.backward()
    await boss.backward(prediction.grad)
    await boss.optim_step()
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import torch

from shoal.boss.boss import Boss, on_terminal
from shoal.boss.calls import Status
from shoal.boss.optimizer import PlacedOptimizer
from shoal.boss.placed import PlacedModel
from shoal.errors import MeetingError, ModelError, WireError
from shoal.pipeline.build import Model

P = ParamSpec("P")
T = TypeVar("T")


class AsyncBoss:
    """One call at a time is under way; the event loop is free while it is."""

    def __init__(self, workers: Boss, model: Model | str) -> None:
        """workers: what `setup_host` gave."""
        self._boss = workers
        self._given = model
        self._placed: PlacedModel | None = None
        self._optimizer: PlacedOptimizer | None = None
        self._output: torch.Tensor | None = None
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-async-boss")

    @classmethod
    async def setup_host(
        cls, num_workers: int, listen: str = "tcp://127.0.0.1:1024", **options: Any
    ) -> Boss:
        """Wait for so many workers. options: those of `Boss`."""
        show = options.pop("notify", None) or on_terminal()
        is_cancelled = threading.Event()

        def notify(text: str) -> None:
            if text and is_cancelled.is_set():  # by Ctrl-C, say, which a thread does not hear
                raise MeetingError("nobody waits for workers any more")
            show(text)

        try:
            return await asyncio.to_thread(Boss, listen, num_workers, notify=notify, **options)
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    async def _call(self, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._is_closed:
            raise WireError("the boss was closed: its workers are gone.")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: do(*args, **kwargs))

    @property
    def model(self) -> PlacedModel:
        if self._placed is None:
            raise ModelError("the model has not been distributed: distribute_model() comes first.")
        return self._placed

    async def distribute_model(
        self, cuts: Sequence[str] | None = None, **options: Any
    ) -> PlacedModel:
        """options: those of `Boss.place`."""
        self._placed = await self._call(self._boss.place, self._given, cuts=cuts, **options)
        return self._placed

    async def send_optimizer(
        self, kind: type[torch.optim.Optimizer], options: dict[str, Any]
    ) -> PlacedOptimizer:
        self._optimizer = await self._call(self._boss.optimizer, kind, **options)
        return self._optimizer

    def gather_dependencies(self) -> None:
        """Nothing is left to be done: which value goes where is settled when a model is placed."""

    async def forward(self, x: Any, extra: dict[str, Any] | None = None) -> torch.Tensor:
        """The model's output, as a leaf: `loss.backward()` leaves its gradient in `.grad`."""

        def forward() -> torch.Tensor:
            with torch.enable_grad():
                output: torch.Tensor = self.model(x, **(extra or {}))
            return output

        self._output = await self._call(forward)
        return self._output.detach().requires_grad_(self._output.requires_grad)

    async def backward(self, gradient: torch.Tensor | None) -> None:
        """From the output of the last `forward`, with its gradient."""
        output, self._output = self._output, None
        if output is None or gradient is None:
            raise ModelError(
                "backward() wants the gradient of the last forward()'s output, once: "
                "loss.backward() first, then await boss.backward(prediction.grad)."
            )
        await self._call(output.backward, gradient)

    async def optim_step(self) -> None:
        """Update the parameters; their gradients begin anew."""
        if self._optimizer is None:
            raise ModelError("no optimizer has been sent: send_optimizer() comes first.")
        optimizer = self._optimizer

        def step() -> None:  # in one: who is cancelled in between would add to old gradients
            optimizer.step()
            optimizer.zero_grad()

        await self._call(step)

    async def train_step(self, *inputs: Any, **options: Any) -> torch.Tensor:
        """As `Boss.train_step`."""
        return await self._call(self._boss.train_step, *inputs, **options)

    async def state_dict(self) -> dict[str, torch.Tensor]:
        """Gathered; loads into a plain model."""
        state: dict[str, torch.Tensor] = await self._call(self.model.state_dict)
        return state

    def status(self) -> Status:
        return self._boss.status()

    async def close(self, error: BaseException | None = None) -> None:
        """Let the workers go. Once more does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        loop = asyncio.get_running_loop()
        closing = loop.run_in_executor(self._thread, self._boss.close, error)
        self._thread.shutdown(wait=False)  # takes no more; what is under way comes to its end
        await closing

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close(error)
