"""Requests that have no slot, first to be served first: by priority, then arrival."""

from __future__ import annotations

import heapq

from .request import Request


class WaitingQueue:
    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._gone: set[int] = set()

    def __len__(self) -> int:
        return len(self._heap) - len(self._gone)

    def push(self, request: Request, priority: int) -> None:
        heapq.heappush(self._heap, (priority, request.arrival, request))

    def first(self) -> Request | None:
        while self._heap and self._heap[0][1] in self._gone:
            self._gone.discard(heapq.heappop(self._heap)[1])
        return self._heap[0][2] if self._heap else None

    def pop_first(self) -> Request:
        assert self.first() is not None
        return heapq.heappop(self._heap)[2]

    def remove(self, request: Request) -> None:
        """The request must be in the queue. It is skipped when its turn comes."""
        self._gone.add(request.arrival)
