"""A tiny model that babbles letters which its tokenizer spells in two ways, so that re-rendering its words drifts.

`build_babbling_model` writes a model like `tiny_model`, with two differences. The tokenizer has a token for every pair
of the letters a to h besides the letters themselves; encoding takes the pairs. The model samples single letters, each
as likely as another, and now and then the end of its turn. So a sampled text of two or more letters has other ids
when it is encoded again, as it happens to real models for a few words in a thousand.
"""

from pathlib import Path

import torch
from tests.tiny_model import CHAT_TEMPLATE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = "abcdefgh"
TRIMMING = CHAT_TEMPLATE.replace("message['content'] }}", "message['content'] | trim }}")
"""Trims every message."""
STRIPPING = CHAT_TEMPLATE.replace(
    "message['content'] }}", "message['content'].split('</think>')[-1] if message['role'] == 'assistant' "
    "else message['content'] }}",
)  # fmt: skip
"""Leaves out the thoughts of every assistant turn."""
REWRITING = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if loop.last or message['role'] != 'assistant' %}{{ message['content'] }}{% else %}(said){% endif %}",
)
"""Shows an earlier assistant turn only while it is the last message."""
ENDLESS = CHAT_TEMPLATE.replace("<|im_end|>", "")
"""No token ends a turn."""


def build_babbling_model(folder: Path, template: str = CHAT_TEMPLATE, *, extra: str = "") -> Path:
    """Write the model to `folder` and return it. `extra` are letters that it babbles besides."""
    pairs = [(a, b) for a in LETTERS for b in LETTERS]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *letters, *(a + b for a, b in pairs)])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, unk_token="<|endoftext|>", bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = template
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=2048,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                tie_word_embeddings=False,
            )
        )
    spaced = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(extra)
    babbled = [vocabulary[letter] for letter in [*LETTERS, *(c for word, _ in spaced for c in word)]]
    with torch.no_grad():
        # One direction of the residual stream outshines the rest, so the last norm makes it about the square root
        # of the width, whatever was read; the head turns it into the same logits everywhere.
        model.model.embed_tokens.weight[:, 0] = 5.0
        model.lm_head.weight.zero_()
        model.lm_head.weight[babbled, 0] = 3.0
        model.lm_head.weight[tokenizer.eos_token_id, 0] = 3.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
