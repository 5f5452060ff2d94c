"""A byte-level tokenizer with control tokens and a chat template, built in memory in the format of real models."""

from functools import cache

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from depthbatch.frontend.tokenizer import Tokenizer, byte_level_alphabet

SPECIAL = ("<|eos|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 256
VOCAB_SIZE = 256 + len(SPECIAL)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


@cache
def byte_tokenizer(chat_template: bool = True) -> Tokenizer:
    """Token id of a byte is the byte; 256 is end of sequence."""
    backend = Backend(models.BPE(vocab=dict(byte_level_alphabet()), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    config = {"eos_token": SPECIAL[0], **({"chat_template": TEMPLATE} if chat_template else {})}
    return Tokenizer(backend, config)
