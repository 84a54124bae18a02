from enum import Enum
from typing import Any, ClassVar


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"


class HookRegistry:
    hooks: ClassVar[list[tuple[str, Any, HookType]]] = []

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType) -> None:
        cls.hooks.append((target, hook, hook_type))
