"""A drafter for servers: exported, checked, and the words that start a server with it.

run.py        export: a folder written whole or not at all
check.py      would SGLang and vLLM serve it as the drafter that was trained?
engines.py    their loaders' rules                   evidence.py  the drafter on every alternative input
record.py     what the folder was when it left       probe.py     texts, states and drafts that go with it
documents.py  texts to try it on                     replay.py    what it drafts on them
card.py       the model card                         launch.py    the servers' flags
"""
