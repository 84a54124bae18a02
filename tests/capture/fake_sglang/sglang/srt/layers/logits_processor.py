from dataclasses import dataclass
from typing import Any


@dataclass
class LogitsProcessorOutput:
    """As in 0.5.17: no field for the last state."""

    hidden_states: Any = None
    customized_info: Any = None
