from __future__ import annotations

import json
from typing import Any

import pytest

from eyas.data.prepare.renamed import renamed_roles


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, []),
        ({"conversations": [{"from": "human", "value": "a"}]}, [("human", "user")]),
        ({"messages": [{"role": " Assistant", "content": "a"}]}, [(" Assistant", "assistant")]),
        ({"messages": [{"role": "developer", "content": "a"}]}, [("developer", "system")]),
        ({"messages": [{"role": "function_call", "content": "{}"}]}, [("function_call", "assistant")]),
        ({"messages": [{"role": "model-7", "content": "a"}]}, [("model-7", "assistant")]),
        ({"messages": [{"role": "user", "content": '{"role": "human"}'}]}, []),
        ({"messages": [{"role": None, "content": "a"}, {"role": 3, "content": "a"}]}, []),
    ],
)
def test_the_same_from_text_and_from_a_table(row: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    roles = {"Model-7": "assistant"}
    assert list(renamed_roles(json.dumps(row).encode(), roles)) == expected
    assert list(renamed_roles(json.dumps(row, indent=1).encode(), roles)) == expected
    assert list(renamed_roles(row, roles)) == expected
