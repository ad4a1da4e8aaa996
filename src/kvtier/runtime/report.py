"""What a close did: a tree with one node for each thing that was closed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    CLEAN = "clean"
    FAILED = "failed"
    """it raised while it was closed"""
    KILLED = "killed"
    """a process that had to be ended; its death is confirmed"""
    RUNNING = "running"
    """still there at the deadline"""


class Memory(StrEnum):
    FREED = "freed"
    KEPT = "kept"
    """something may still touch it; kept until the process exits"""


@dataclass(slots=True)
class CloseReport:
    """One node. `error` is what it raised; `cause` says in words why it is not clean."""

    name: str
    ended: Outcome = Outcome.CLEAN
    memory: Memory = Memory.FREED
    seconds: float = 0.0
    cause: str = ""
    error: Exception | None = None
    children: list[CloseReport] = field(default_factory=list)

    def walk(self) -> Iterator[CloseReport]:
        """This node and all below it, in the order in which they were closed."""
        for child in self.children:
            yield from child.walk()
        yield self

    @property
    def clean(self) -> bool:
        return all(n.ended is Outcome.CLEAN and n.memory is Memory.FREED for n in self.walk())

    @property
    def memory_kept(self) -> bool:
        return any(node.memory is Memory.KEPT for node in self.walk())

    def raise_if_failed(self) -> None:
        """Raise every error of the tree as one group; its last member is the last error."""
        errors = [node.error for node in self.walk() if node.error is not None]
        if errors:
            raise ExceptionGroup(f"{self.name}: {len(errors)} of its parts failed to close", errors)

    def lines(self, indent: int = 0) -> Iterator[str]:
        """The tree as text, one line a node."""
        why = f" ({self.cause})" if self.cause else ""
        yield f"{'  ' * indent}{self.name}: {self.ended}, memory {self.memory}, {self.seconds:.3f} s{why}"
        for child in self.children:
            yield from child.lines(indent + 1)

    def __str__(self) -> str:
        return "\n".join(self.lines())
