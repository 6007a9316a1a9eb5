"""Any causal language model of Hugging Face's transformers: `model.family = "hf:<path or id>"`. Needs `shoal[hf]`.

Names of parameters are Hugging Face's, so that weights are read, saved and exported under them.
"""

from __future__ import annotations

from shoal.models.huggingface.adapter import HuggingFace
from shoal.models.huggingface.source import builder_of

__all__ = ["HuggingFace", "builder_of"]
