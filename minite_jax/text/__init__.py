"""Text to token ids and back: the small models' bytes, and the tokenizer and chat template of a Hugging Face folder."""

from minite_jax.text.base import TextStream, TextTokenizer
from minite_jax.text.byte_tokenizer import ByteTokenizer
from minite_jax.text.conversation import Conversation
from minite_jax.text.template import ChatTemplate
from minite_jax.text.tokenizer import Tokenizer

__all__ = ["ByteTokenizer", "ChatTemplate", "Conversation", "TextStream", "TextTokenizer", "Tokenizer"]
