import numpy as np
from hypothesis import given, strategies as st

from recipes.data.bytes import SEPARATOR, decode, encode


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_decode_undoes_encode(text):
    assert decode(encode(text)) == text


def test_a_token_is_a_byte():
    np.testing.assert_array_equal(encode("aé"), [0x61, 0xC3, 0xA9])


def test_separator_shows_as_newline():
    assert decode(np.array([97, SEPARATOR, 98])) == "a\nb"


def test_tokens_that_are_no_text_show_as_replacement():
    assert decode(np.array([97, 0xC3, 98, 256, -1])) == "a\ufffdb\ufffd\ufffd"
