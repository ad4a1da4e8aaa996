"""The last events and effects of the core, for the report of a bug. Keeps references, formats only when asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvtier.core.effects import Effect
from kvtier.core.events import Event
from kvtier.core.limits import STORY_EVENTS

_TEXT_MAX = 400


class Story:
    def __init__(self) -> None:
        self._entries: deque[tuple[Event, Sequence[Effect]]] = deque(maxlen=STORY_EVENTS)

    def add(self, event: Event, effects: Sequence[Effect]) -> None:
        self._entries.append((event, effects))

    def lines(self, about: str = "") -> list[str]:
        """One line an event with its effects behind it; only those that mention `about`."""
        told = []
        for event, effects in self._entries:
            text = " -> ".join([_short(event), *map(_short, effects)])
            if about in text:
                told.append(text)
        return told


def _short(thing: Event | Effect) -> str:
    text = repr(thing)
    return text if len(text) <= _TEXT_MAX else text[:_TEXT_MAX] + "..."
