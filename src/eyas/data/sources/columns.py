"""Names of the columns that layouts know; what they mean is told in `layouts`."""

from __future__ import annotations

from typing import Final

SAMPLED: Final = ("prompt_ids", "answer_ids", "tokenizer_hash")
#: Lists of messages, the first one that is there wins.
CHATS: Final = ("conversations", "conversation", "messages")
TURNS: Final = "turns"
#: Questions, the first one that is there wins; and answers, likewise.
PROMPTS: Final = ("prompt", "instruction", "question", "query", "input")
ANSWERS: Final = ("response", "completion", "output", "answer")
TEXT: Final = "text"
#: What goes with a layout.
IDS: Final = ("id", "question_id")
SYSTEMS: Final = ("system", "system_prompt")
TOOLS: Final = ("tools", "functions")
BESIDE: Final = (*IDS, *SYSTEMS, *TOOLS, "context", "history", "finish_reason")
#: Images and sounds: a row with one of them is no text.
MEDIA: Final = ("image", "images", "audio", "audios", "video", "videos")

#: Columns that make a row; one of them is needed.
COLUMNS: Final = frozenset({*SAMPLED[:2], *CHATS, TURNS, *PROMPTS, TEXT})
EXPECTED: Final = ", ".join((*CHATS, TURNS, *PROMPTS, TEXT)) + ", or prompt_ids with answer_ids"
#: All that layouts read, apart from MEDIA.
READ: Final = frozenset({*COLUMNS, *SAMPLED, *ANSWERS, *BESIDE})
