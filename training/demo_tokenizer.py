"""The demo models' tokenizer: bytes, three ChatML markers and the role names.

Byte-level without merges, so any text has ids and round-trips. Written as ``tokenizer.json`` and
``tokenizer_config.json``, which transformers loads as a plain fast tokenizer, without remote code.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT, IM_START, IM_END = 0, 1, 2
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROLES = ("system", "user", "assistant")
VOCAB_SIZE = 264
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer() -> Tokenizer:
    """The tokenizer: ids 0-2 markers, 3-258 bytes in the byte-level alphabet's order, 259-261 role names."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*MARKERS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    tokenizer.add_tokens([AddedToken(role, normalized=False) for role in ROLES])
    return tokenizer


def save_tokenizer(directory: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` with the chat template into ``directory``.

    ``directory``: an existing directory.
    ``max_length``: positions of the model, stored as ``model_max_length``.
    """
    build_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": MARKERS[END_OF_TEXT],
        "eos_token": MARKERS[IM_END],
        "pad_token": MARKERS[END_OF_TEXT],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def chat_text(turns: list[tuple[str, str]], prompt: str) -> str:
    """The chat template's text for finished (user, assistant) turns and a new user prompt."""
    done = "".join(
        f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n" for user, answer in turns
    )
    return f"{done}<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
