"""What a drafter is worth: acceptance simulated on a store, decoded in process, or counted by a server.

    drafting.py   the drafter as a server runs it: its KV cache, chains and trees
    verifying.py  which drafts the target accepts, and its own token behind them
    walk.py       simulation on stored states: cycles as decoding would make them
    decode.py     speculative decoding with a transformers target
    questions.py  question.jsonl in EAGLE's layout
    results.py    what an evaluation leaves, and its table
    run.py        the verb

`eyas.acceptance` defines the figures, for all three. An evaluation leaves one file, evaluation-*.json:

    {
      "format": 1,
      "head": "run/draft",                     as given
      "head_digest": "5f0c...",                sha256 of its model.safetensors; "" where it is not at hand
      "target": "HuggingFaceTB/SmolLM2-135M-Instruct",
      "engine": "transformers",                store, transformers, sglang or vllm
      "mode": "offline-decoded",               offline-simulated, offline-decoded or live
      "benchmark": "mt_bench",                 folder of the question file, or the store's name
      "depth": 3, "topk": 1, "draft_tokens": 3,    steps drafted; branches; most tokens verified in a cycle, root not
                                               counted
      "prompts_digest": "91d2...",             of the questions, or the rows' prompts: only equal ones can be compared
      "sampling": {"temperature": 0.0, "seed": 0, "max_new_tokens": 128},
      "versions": {"eyas": "0.1.0", "torch": "2.13.0", "transformers": "5.19.0"},    in "live" the engine's, and
                                               "model", the target as the server names it
      "command": "eyas evaluate run/draft --questions question.jsonl",    without passwords and keys
      "notes": [],                             sentences a reader should know: rows left out, and why
      "date": "2026-11-30T13:00:00+00:00",
      "results": [                             "all" first, then the categories by name
        {
          "category": "all",
          "prompts": 80, "cycles": 5120, "tokens": 10240,
          "accept_length": 2.01, "ci95": [1.96, 2.07],    tokens a cycle, the target's own included
          "accept_by_position": [0.61, 0.52, 0.47],       CONDITIONAL: right ones of those that were reached
          "reached": [5120, 3100, 1610], "right": [3123, 1612, 757],
          "counters": {"drafts": 5120, "accepted": [3130, 1618, 760]},    as a server counts, what lies behind the end
                                               of an answer included: null in simulation, all there is in "live"
          "concurrency": 1,                    requests at a time
          "tokens_per_s": null, "speedup": null, "ttft_ms": null      null where they were not measured
        }
      ]
    }
"""
