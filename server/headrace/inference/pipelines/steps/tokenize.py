"""Built-in step `tokenize`: texts to token ids, with a `tokenizer.json` of Hugging Face's `tokenizers`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.errors import BadRequest, ConfigError, Finding
from headrace.core.tensor import Array
from headrace.inference.pipelines.steps.options import TokenizeOptions

# Token ids take 8 bytes each in three tensors.
MAX_TEXT_BYTES = 1_000_000


class Tokenizer:
    """Tokenizes the texts of a request.

    Args:
        file: the tokenizer.json.
        options: options of the step.

    Raises:
        ConfigError: the file is absent or no tokenizer, or the package `tokenizers` is not installed.
    """

    def __init__(self, file: Path, options: TokenizeOptions) -> None:
        try:
            from tokenizers import Tokenizer as HuggingFaceTokenizer
        except ImportError as error:
            message, cure = (
                "the step tokenize needs the package tokenizers",
                "pip install '.[tokenizers]' in a checkout of Headrace",
            )
            raise ConfigError([Finding(file.name, None, message, cure)]) from error
        if not file.is_file():
            raise ConfigError(
                [Finding(file.name, None, f"{options.file} is missing", "put it into the pipeline's folder")]
            )
        try:
            self._tokenizer: Any = HuggingFaceTokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            message = f"{options.file} is no tokenizer: {' '.join(str(error).split())[:200]}"
            raise ConfigError([Finding(file.name, None, message, "save it with Tokenizer.save")]) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        if options.max_length:
            self._tokenizer.enable_truncation(options.max_length)
        self._options = options

    def tokenize(self, texts: Array) -> Mapping[str, Array]:
        """Return the token ids of texts, padded to one length.

        Args:
            texts: object array of `bytes` in UTF-8, of any shape; one text an element.

        Returns:
            `input_ids`, `attention_mask` and `token_type_ids`, int64 (texts, length).

        Raises:
            BadRequest: a text is not UTF-8, or too long.
        """
        words = [_text(data) for data in texts.reshape(-1).tolist()]
        encodings = self._tokenizer.encode_batch(words, add_special_tokens=self._options.special_tokens)
        options = self._options
        longest = max([len(encoding.ids) for encoding in encodings], default=0)
        if options.pad_to and longest > options.pad_to:
            raise BadRequest(f"a text has {longest} tokens, the step pads to {options.pad_to}: send a shorter one")
        length = options.pad_to or -(-max(longest, 1) // options.multiple_of) * options.multiple_of
        ids = np.full((len(words), length), options.pad_id, np.int64)
        mask, types = np.zeros_like(ids), np.zeros_like(ids)
        for row, encoding in enumerate(encodings):
            tokens = len(encoding.ids)
            ids[row, :tokens] = encoding.ids
            mask[row, :tokens] = 1
            types[row, :tokens] = encoding.type_ids
        return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def _text(data: bytes) -> str:
    if len(data) > MAX_TEXT_BYTES:
        raise BadRequest(f"a text has {len(data)} bytes, at most {MAX_TEXT_BYTES} are tokenized: send a shorter one")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"a text is not UTF-8 at byte {error.start}: encode texts in UTF-8") from error
