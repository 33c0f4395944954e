"""Makes your own checkpoint: a tiny Qwen3 with random weights, as transformers saves it, with its own tokenizer.

python examples/own/model.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEXTS = ["say.sh should print alpha\necho beta > say.sh\n", '{"name": "edit_file", "arguments": {"path": "say.sh"}}\n']
TEMPLATE = """\
{%- for m in messages %}
{%- if m.role == 'system' %}{{ '<|im_start|>system\\n' + m.content }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{% if not loop.first %}{{ '\\n' }}{% endif %}{{ '<tool_call>\\n' }}
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{ '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""ChatML with Hermes' calls, as Qwen's models have it."""


def tokenizer() -> Tokenizer:
    """A byte-level BPE of a few hundred entries."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(TEXTS * 8, trainer)
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return made


def make(folder: Path) -> None:
    """Write weights, configuration, tokenizer and chat template."""
    folder.mkdir(parents=True)
    made = tokenizer()
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        vocab_size=made.get_vocab_size(),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        intermediate_size=64,
        initializer_range=0.2,
        max_position_embeddings=8192,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
