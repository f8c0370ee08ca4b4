"""The package uses no name that torch or transformers is about to take away."""

import pytest

from tests.acts_of_neighbours import inputs_in
from tests.processes import run_script

# transformers warns of some names in its log, once in a process.
BEFORE = """
    import logging, sys, warnings
    import torch
    import offload
    from offload.cli import main

    class Raises(logging.Handler):
        def emit(self, record):
            text = record.getMessage()
            # transformers' own drafts give an assistant both.
            assert "deprecat" not in text or "Passing `generation_config` together with" in text, text
        def handleError(self, record):
            raise

    warnings.simplefilter("error", FutureWarning)
    warnings.filterwarnings("error", category=DeprecationWarning, module="offload")
    logging.getLogger("transformers").addHandler(Raises())
    folder, out = sys.argv[1:]
    model = offload.from_pretrained(folder + "/model").eval()
    text = torch.arange(130)[None] % 90
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
"""

WAYS = {
    "generate": "model.generate(text, **options)",
    "a forward with labels": "model(text, labels=text).loss.backward()",
    "drafts of an assistant": """
    assistant = offload.from_pretrained(folder + "/model").eval()
    model.generate(text, assistant_model=assistant, **options)""",
    "drafts from the text": "model.generate(text, prompt_lookup_num_tokens=3, **options)",
    "kept prompts": """
    for _ in range(2):
        model.generate(text, prompt_cache=out + "/prompts", **options)
    prompts = offload.generation.PromptCache(out + "/prompts")
    prompts.generate(model, text, prompt_lookup_num_tokens=3, **options)""",
    "keys and values on disk": """
    from offload.transformers_api import cache_option
    model.generate(text, **{cache_option(): offload.integrations.kv_cache(model)}, **options)""",
    "batches": "list(offload.map_batches(lambda one: model.generate(one, **options), [text, text], model))",
    "plan": "assert 0 == main(['plan', folder + '/model', '--disk-rate', '1GB'])",
    "batch": "assert 0 == main(['batch', folder + '/model', folder + '/in', out + '/out', '--max-new-tokens', '2'])",
    "answers of the server, with the prompt's scores": """
    from transformers import AutoTokenizer
    from offload.generation import answering, chat
    answering._SCORED_BYTES = 1  # in several pieces
    told = []
    prompt = chat.Prompt(text[0].tolist(), 2)
    job = answering.Job(prompt, told.append, {"temperature": 0}, top=2, echo=True)
    tokenizer = AutoTokenizer.from_pretrained(folder + "/model")
    with torch.no_grad():
        answering.Answering(model, tokenizer, set(), {}, {})(job)
    assert 130 + 2 == sum(len(piece.scores) for piece in told), told""",
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_deprecated_is_used(way, tmp_path):
    run_script(f"{BEFORE}\n    {WAYS[way].strip()}", inputs_in(tmp_path), tmp_path)
