"""A real Hugging Face model of under a million parameters, made on the spot, that can read and write any
text.

`build_tiny_model` writes a folder as `save_pretrained` does: a random Llama, a byte-level tokenizer (one
token per byte, so every text has ids and every id sequence has a text) and a ChatML template. It knows
nothing; tests teach it.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

TOOL_TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}

{% endif -%}
# Tools
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor -%}
</tools>
Call one with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if not (tools and loop.first and message['role'] == 'system') -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] or '' }}
{%- for call in message['tool_calls'] or [] -%}
{%- set arguments = call['function']['arguments'] -%}
<tool_call>{"name": {{ call['function']['name'] | tojson }}, "arguments": {{
arguments if arguments is string else arguments | tojson }}}</tool_call>
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def build_tiny_model(
    folder: Path,
    *,
    pad_is_eos: bool = False,
    with_template: bool = True,
    tools: bool = False,
    seed: int = 0,
    hidden_size: int = 64,
    num_layers: int = 2,
    max_context: int = 4096,
) -> Path:
    """Write the model to `folder` and return it.

    `pad_is_eos`: the pad token is the end token, as in many released models; otherwise it has none at all.
    `with_template=False`: no chat template. `tools=True`: a template that shows tools and renders tool calls.
    """
    tokenizer = _tokenizer(pad_is_eos)
    if with_template:
        tokenizer.chat_template = TOOL_TEMPLATE if tools else CHAT_TEMPLATE
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=hidden_size,
                intermediate_size=2 * hidden_size,
                num_hidden_layers=num_layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=max_context,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                tie_word_embeddings=True,
            )
        )
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(pad_is_eos: bool) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: i for i, token in enumerate(special + letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        unk_token="<|endoftext|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>" if pad_is_eos else None,
    )
