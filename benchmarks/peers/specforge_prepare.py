"""SpecForge's own preparation of a chat file, as its trainer calls it; runs in SpecForge's environment.

SpecForge has no command for it: training does it first, with `prepare_prompt_tasks` and the tokenizer of
`load_tokenizer`. The tokens and masks lie in `--cache` then, as Arrow streams `prepared_*.pkl`.
"""

import argparse

from specforge.data.prompt_builder import prepare_prompt_tasks  # pyright: ignore[reportMissingImports]
from specforge.utils import load_tokenizer  # pyright: ignore[reportMissingImports]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--data", "--target", "--template", "--cache"):
        parser.add_argument(name, required=True)
    for name in ("--max-tokens", "--processes"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args()
    prepared = prepare_prompt_tasks(
        args.data,
        load_tokenizer(args.target),
        chat_template=args.template,
        max_length=args.max_tokens,
        is_preformatted=False,
        train_only_last_turn=False,
        cache_dir=args.cache,
        cache_key="prepared",
        num_proc=args.processes,
        min_loss_tokens=1,  # what SpecForge's EAGLE-3 asks for
    )
    print(f"{len(prepared)} rows kept")


if __name__ == "__main__":
    main()
