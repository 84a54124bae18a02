"""`eyas demo`: the main job on a small real model, CPU only and without a server.

run.py      the pipeline
answers.py  the target's answers
worth.py    what the drafter is worth, and the folder that servers load
"""

from eyas.demo.answers import ANSWERS, AnswersReport, Prompt, make_answers, read_prompts
from eyas.demo.run import (
    CORPUS,
    PROMPTS,
    STORE,
    SUMMARY,
    TRAIN,
    TRAINING,
    DemoCorpus,
    demo_corpus,
    make_corpus,
    run_demo,
)
from eyas.demo.worth import CHECK, EXPORTED, QUESTIONS

__all__ = [
    "ANSWERS",
    "CHECK",
    "CORPUS",
    "EXPORTED",
    "PROMPTS",
    "QUESTIONS",
    "STORE",
    "SUMMARY",
    "TRAIN",
    "TRAINING",
    "AnswersReport",
    "DemoCorpus",
    "Prompt",
    "demo_corpus",
    "make_answers",
    "make_corpus",
    "read_prompts",
    "run_demo",
]
