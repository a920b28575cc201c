"""Model folders for the simulated device: configuration, tokenizer and processors, no weights.

``python -m omni_simulated_device.models MODEL OUT_DIR`` writes one. Dimensions are those of the published models where
they set the size of what is sent between stages, and small elsewhere; ``qwen3_omni_tiny`` is small everywhere, so that
the real runners can compute it on a processor.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Token ids that vllm-omni's Qwen3-Omni stage input processor compares with, as numbers.
_ROLES = {"user": 872, "system": 8948, "assistant": 77091}
_OMNI_SPECIAL = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
    "<|audio_start|>": 151669,
    "<|audio_end|>": 151670,
    "<tts_pad>": 151671,
    "<tts_text_bos>": 151672,
    "<tts_text_eod>": 151673,
    "<|audio_pad|>": 151675,
}
_SPEECH_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part.get('type') == 'audio' %}"
    "<|audio_start|><|audio_pad|><|audio_end|>{% else %}{{ part.get('text', '') }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PATCHES = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
_PIXELS = {"min_pixels": 3136, "max_pixels": 12845056, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def write_qwen3_omni_tiny(folder: Path) -> None:
    """Write a Qwen3-Omni model folder of a few million weights, with the vocabularies of the published model."""
    # A few narrow layers; token ids and the number of codebooks are those of the large one.
    write_qwen3_omni(folder, _changed(_published("qwen3_omni"), _published("qwen3_omni_tiny")))


def write_qwen3_omni(folder: Path, config: Mapping[str, Any] | None = None) -> None:
    """Write a Qwen3-Omni model folder: byte-level text, the published special ids, the published layer widths.

    Args:
        folder: Made if it is not there.
        config: What stands in config.json instead.
    """
    from transformers import WhisperFeatureExtractor

    folder.mkdir(parents=True, exist_ok=True)
    extra = {
        "image_token": "<|image_pad|>",
        "audio_token": "<|audio_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    }
    _write_tokenizer(folder, {**_ROLES, **_OMNI_SPECIAL}, tuple(_OMNI_SPECIAL), tuple(_ROLES), extra)
    WhisperFeatureExtractor(feature_size=128).save_pretrained(folder)
    processor = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    processor |= {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3OmniMoeProcessor"}
    _write(folder / "preprocessor_config.json", {**processor, **_PATCHES, **_PIXELS})
    _write(
        folder / "video_preprocessor_config.json",
        {"video_processor_type": "Qwen2VLVideoProcessor", **_PATCHES, **_PIXELS},
    )
    _write(folder / "chat_template.json", {"chat_template": _CHAT_TEMPLATE})
    _write(folder / "generation_config.json", {"eos_token_id": [151645, 151643], "talker_max_new_tokens": 4096})
    _write(folder / "config.json", config or _published("qwen3_omni"))


def write_qwen3_tts(folder: Path) -> None:
    """Write a Qwen3-TTS (custom voice) model folder with byte-level text."""
    folder.mkdir(parents=True, exist_ok=True)
    # Behind all codec ids, as in the published model: vLLM ends a talker at the tokenizer's <|im_end|> too.
    ids = {token: 3072 + index for index, token in enumerate(_SPEECH_SPECIAL)}
    _write_tokenizer(folder, ids, _SPEECH_SPECIAL, (), {})
    _write(
        folder / "generation_config.json",
        {"do_sample": True, "temperature": 0.9, "top_k": 50, "max_new_tokens": 4096},
    )
    _write(folder / "config.json", _published("qwen3_tts"))


def _write(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _write_tokenizer(
    folder: Path,
    fixed: Mapping[str, int],
    special: Sequence[str],
    words: Sequence[str],
    extra: Mapping[str, str],
) -> None:
    """Save a byte-level tokenizer in which the tokens of *fixed* have exactly those ids and no id is unused."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | dict(fixed)
    taken = set(vocabulary.values())
    # A hole in the id space would shift every added token behind it.
    vocabulary |= {f"<unused{index}>": index for index in range(max(taken)) if index not in taken}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    tokenizer.add_special_tokens(list(special))
    for token, index in fixed.items():
        if tokenizer.token_to_id(token) != index:
            raise RuntimeError(f"token {token!r} got id {tokenizer.token_to_id(token)}, wanted {index}")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",  # noqa: S106
        pad_token="<|endoftext|>",  # noqa: S106
        extra_special_tokens=dict(extra),
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with these changes, at every depth."""
    deeper = {key: _changed(config.get(key, {}), each) for key, each in changes.items() if isinstance(each, dict)}
    return {**config, **changes, **deeper}


def _published(model: str) -> dict[str, Any]:
    """What differs from the defaults of the configuration classes, of the tiny one from the large one.

    Widths between stages are the published ones.
    """
    path = Path(__file__).parent / "configs" / f"{model}.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


WRITERS = {
    "qwen3_omni": write_qwen3_omni,
    "qwen3_omni_tiny": write_qwen3_omni_tiny,
    "qwen3_tts": write_qwen3_tts,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="omni_simulated_device.models", description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=sorted(WRITERS))
    parser.add_argument("folder", type=Path, metavar="OUT_DIR")
    options = parser.parse_args(arguments)
    WRITERS[options.model](options.folder)


if __name__ == "__main__":
    main()
