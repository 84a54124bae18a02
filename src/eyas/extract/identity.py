"""Whether the target's tokenizer is the one a corpus was made with."""

from __future__ import annotations

from typing import Final

from transformers import AutoTokenizer

from eyas.data.corpus import Corpus
from eyas.data.template import Template
from eyas.data.template.tokenizing import tokenizer_hash
from eyas.errors import ConfigError

SAME: Final = "same as the corpus's"
NOT_CHECKED: Final = "not checked"


def check_tokenizer(corpus: Corpus, model: str, *, trust_remote_code: bool = False) -> tuple[str, str]:
    """What is known of the target's tokenizer, for the store's provenance; and a warning, or nothing.

    Rows are token ids: another tokenizer makes them mean something else, and is refused. Another chat template does
    not, but the target will not be talked to in the way that the corpus has it: a warning.

    Args:
        corpus: which hashes it was made with; empty ones are not known.
        model: the target, a folder or hub id.
        trust_remote_code: whether the tokenizer's own code may run.

    Raises:
        ConfigError: the corpus was made with another tokenizer.
    """
    meta = corpus.meta
    if not meta.tokenizer_hash:
        return NOT_CHECKED, ""
    tokens, template = _hashes(corpus, model, trust_remote_code)
    if not tokens:
        return NOT_CHECKED, ""
    if tokens != meta.tokenizer_hash:
        hint = f"it was prepared for {meta.model}; prepare it again with --target {model}"
        raise ConfigError("the corpus was made with another tokenizer", corpus.path, hint)
    if template and meta.template_hash and template != meta.template_hash:
        warning = f"the corpus was made with another chat template than {model} has now"
        return SAME, f"{warning}: prepare it again if its answers should be in the form that is served"
    return SAME, ""


def _hashes(corpus: Corpus, model: str, trust_remote_code: bool) -> tuple[str, str]:
    """Hashes of the tokenizer and of the template with the corpus's settings; empty where there is none."""
    try:
        template = Template.load(model, trust_remote_code=trust_remote_code, **corpus.meta.template_settings)
    except ConfigError:  # a base model has no chat template; a folder of weights has no tokenizer either
        pass
    else:
        return template.tokenizer_hash, template.template_hash
    try:
        return tokenizer_hash(AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)), ""
    except Exception:  # noqa: BLE001  a broken or missing tokenizer raises whatever it likes; the engine needs none
        return "", ""
