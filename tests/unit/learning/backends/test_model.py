"""What can be loaded, and what is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny_model import CHAT_TEMPLATE, build_tiny_model
from tests.unit.learning.backends.tiny import gradients, make_batch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from leyden.base.config import LearnConfig, LoraConfig
from leyden.base.errors import ModelUnusable
from leyden.learning.backends.base import Objective
from leyden.learning.backends.embedded.lora import add_lora
from leyden.learning.backends.embedded.model import (
    LoadedModel,
    convert_gguf,
    load_model,
    load_tokenizer,
    parameter_fingerprint,
)
from leyden.learning.backends.embedded.trainer import Trainer

Load = Callable[..., LoadedModel]


def save(model: PreTrainedModel, like: Path, folder: Path) -> Path:
    """`model` with the tokenizer of the folder `like`."""
    shutil.copytree(like, folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    return folder


def test_any_text_survives_the_tiny_tokenizer_and_the_template(load_tiny: Load) -> None:
    loaded = load_tiny()
    for text in ("SELECT name FROM t WHERE a = 'b';", "caf\u00e9 \u4e2d\n\t <tool_call>{}", "  spaces  "):
        assert loaded.decode(loaded.encode(text)) == text
    ids = loaded.encode(loaded.render([{"role": "user", "content": "hi"}]))
    assert loaded.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(loaded.eos_ids[0]) == 1
    assert loaded.chat_template == CHAT_TEMPLATE.rstrip("\n") or loaded.chat_template == CHAT_TEMPLATE


def test_tools_are_rendered_by_a_template_that_knows_them(tmp_path: Path) -> None:
    loaded = load_model(build_tiny_model(tmp_path / "m", tools=True), dtype="float32")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    text = loaded.render([{"role": "user", "content": "hi"}], tools=tools)
    assert '"look"' in text and text.endswith("assistant\n")
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    text = loaded.render([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert '<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>' in text


def test_the_end_token_is_trained_whether_it_is_the_pad_token_or_there_is_none(
    tiny_folder: Path, tmp_path: Path
) -> None:
    found = []
    for pad_is_eos in (True, False):
        folder = build_tiny_model(tmp_path / str(pad_is_eos), pad_is_eos=pad_is_eos)
        shutil.copy(tiny_folder / "model.safetensors", folder)
        loaded = load_model(folder, dtype="float32")
        eos = loaded.eos_ids[0]
        assert loaded.config.pad_token_id == (eos if pad_is_eos else None)
        batch = make_batch(
            [(np.asarray([5, 6, 7, eos], np.int32), 2), (np.asarray([5, eos, 9, eos, 8, eos], np.int32), 1)],
            np.random.default_rng(0),
        )
        Trainer(loaded, LearnConfig(layout="padded")).accumulate(batch, Objective())
        found.append((gradients(loaded), Trainer(loaded, LearnConfig()).logprobs(batch)))
    assert np.array_equal(found[0][1], found[1][1]) and np.isfinite(found[0][1]).all()
    for name, gradient in found[0][0].items():
        assert torch.equal(gradient, found[1][0][name]), name


def test_a_gguf_file_becomes_a_plain_folder_with_the_same_weights(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    lines: list[str] = []
    convert_gguf(path, tmp_path / "plain", lines.append)
    assert len(lines) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plain", "tiny.gguf"]
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    direct, plain = load_model(path, max_context=64), load_model(tmp_path / "plain", max_context=64)
    assert parameter_fingerprint(direct.model) == parameter_fingerprint(plain.model)
    assert plain.chat_template == direct.chat_template and plain.eos_ids == direct.eos_ids


def test_a_tokenizer_can_be_read_without_weights(tiny_folder: Path, tmp_path: Path) -> None:
    assert load_tokenizer(tiny_folder).decode([1]) == "<|im_start|>"
    with pytest.raises(ModelUnusable, match="no model folder"):
        load_tokenizer(tmp_path / "absent")


def test_a_missing_model_names_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match=f"no model folder {tmp_path / 'absent'}"):
        load_model(tmp_path / "absent")
    with pytest.raises(ModelUnusable, match=r"no GGUF file .*absent\.gguf"):
        load_model(tmp_path / "absent.gguf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelUnusable, match=r"no config\.json"):
        load_model(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelUnusable, match=r"a file but no \.gguf"):
        load_model(tmp_path / "file")
    with pytest.raises(ModelUnusable, match=r"policies\.NAME\.model"):
        load_model("")


def test_a_name_below_a_folder_that_is_there_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(ModelUnusable, match="no model folder models/absent"):
        load_model("models/absent")


def test_broken_weights_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(ModelUnusable, match=r"model of .* cannot be read"):
        load_model(folder)
    weights = load_file(tiny_folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelUnusable, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder)


def test_a_missing_chat_template_is_refused_and_can_be_given(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m", with_template=False)
    with pytest.raises(ModelUnusable, match=r"set policies\.NAME\.chat_template"):
        load_model(folder)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0]['content'] }}!")
    loaded = load_model(folder, chat_template=template)
    assert loaded.render([{"role": "user", "content": "hi"}]) == "hi!"
    with pytest.raises(ModelUnusable, match=r"other\.jinja cannot be read"):
        load_model(folder, chat_template=tmp_path / "other.jinja")


def test_a_context_beyond_the_positions_of_the_model_is_refused(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m", max_context=128)
    with pytest.raises(ModelUnusable, match="positions for 128 tokens, but max_context is 2048"):
        load_model(folder)
    assert load_model(folder, max_context=128).max_context == 128


def test_an_encoder_decoder_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    folder = save(T5ForConditionalGeneration(config), tiny_folder, tmp_path / "m")
    with pytest.raises(ModelUnusable, match=r"encoder-decoder \(t5\)"):
        load_model(folder)


def test_a_sliding_window_is_shorter_than_the_context_or_not(tiny_folder: Path, tmp_path: Path) -> None:
    config = MistralConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=64,
    )
    folder = save(MistralForCausalLM(config), tiny_folder, tmp_path / "m")
    for max_context in (64, 2048):
        loaded = load_model(folder, max_context=max_context)
        assert (loaded.config.model_type, loaded.config.sliding_window) == ("mistral", 64)


def test_other_attention_is_refused_by_name(tiny_folder: Path, tmp_path: Path) -> None:
    mamba = MambaForCausalLM(MambaConfig(vocab_size=259, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ModelUnusable, match="mamba"):
        load_model(save(mamba, tiny_folder, tmp_path / "mamba"))
    gemma = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=259,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            sliding_window=4096,
        )
    )
    with pytest.raises(ModelUnusable, match="softcap"):
        load_model(save(gemma, tiny_folder, tmp_path / "gemma"))


@pytest.mark.parametrize("targets", [["nothing"], ["q_proj", "nothing"], ["q_proj", "norm"], ["proj"]])
def test_a_lora_target_that_is_no_linear_layer_is_refused(load_tiny: Load, targets: list[str]) -> None:
    # peft would leave out the second of two in silence.
    wrong = f"names '{targets[-1]}', which is no linear layer .*; it has down_proj, gate_proj, k_proj, lm_head, o_proj"
    with pytest.raises(ModelUnusable, match=wrong):
        load_tiny(lora=LoraConfig(targets=targets))


def test_what_peft_refuses_of_a_target_is_said_with_the_key(load_tiny: Load) -> None:
    causal = load_tiny().causal
    causal.model.layers[0].q_proj = nn.Identity()  # of this name there is also something else
    with pytest.raises(ModelUnusable, match=r"lora\.targets = \['q_proj'\] cannot be used with here: .*Identity"):
        add_lora(causal, LoraConfig(targets=["q_proj"]), "here", seed=0)


def test_lora_targets_are_last_parts_of_names_and_by_default_all_but_the_head(load_tiny: Load) -> None:
    trained = load_tiny(lora=LoraConfig(rank=2, targets=["q_proj", "mlp.up_proj"])).trainable()
    assert len(trained) == 2 * 2 * 2 and all("q_proj" in name or "up_proj" in name for name in trained)
    with pytest.warns(UserWarning, match="tie_word_embeddings"):  # of peft, for whom it is
        trained = load_tiny(lora=LoraConfig(rank=2, targets=["embed_tokens", "q_proj"])).trainable()
    assert len(trained) == 2 + 2 * 2
    trained = load_tiny(lora=LoraConfig(rank=2)).trainable()
    assert len(trained) == 2 * 7 * 2 and not any("lm_head" in name for name in trained)


def test_new_lora_parameters_follow_the_seed_and_leave_the_global_random_state(load_tiny: Load) -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    one, two = (load_tiny(lora=LoraConfig(rank=2), seed=seed) for seed in (0, 1))
    assert torch.equal(torch.rand(2), expected)
    assert parameter_fingerprint(one.model) != parameter_fingerprint(two.model)
    assert parameter_fingerprint(one.model) == parameter_fingerprint(load_tiny(lora=LoraConfig(rank=2)).model)


def write_gguf(path: Path) -> None:
    """A llama of one layer, unquantised, as llama.cpp writes it."""
    writer = gguf.GGUFWriter(str(path), "llama")
    tokens = ["<unk>", "<|im_start|>", "<|im_end|>", *sorted(gguf_letters())]
    E, F, V, heads, kv = 32, 48, len(tokens), 4, 2
    writer.add_context_length(64)
    writer.add_embedding_length(E)
    writer.add_block_count(1)
    writer.add_feed_forward_length(F)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(E // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(V)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (V - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (V, E),
        "output_norm.weight": (E,),
        "blk.0.attn_norm.weight": (E,),
        "blk.0.ffn_norm.weight": (E,),
        "blk.0.attn_q.weight": (E, E),
        "blk.0.attn_k.weight": (E * kv // heads, E),
        "blk.0.attn_v.weight": (E * kv // heads, E),
        "blk.0.attn_output.weight": (E, E),
        "blk.0.ffn_gate.weight": (F, E),
        "blk.0.ffn_up.weight": (F, E),
        "blk.0.ffn_down.weight": (E, F),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_letters() -> list[str]:
    """Single letters, and the one merge of the file."""
    return [chr(c) for c in range(97, 123)] + ["ab"]
