"""Corpora: concatenated text files, token files, and what is refused."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.train.corpus import TextCorpus, TextFile, open_corpus, standard_library


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=6), st.data())
def test_files_read_as_one_text(tmp_path_factory, texts, data):
    folder = tmp_path_factory.mktemp("texts")
    for index, text in enumerate(texts):
        (folder / str(index)).write_bytes(text)
    corpus = TextCorpus([TextFile(folder / str(index), str(index)) for index in range(len(texts))])
    joined = b"".join(text + b"\0" for text in texts)
    assert corpus.length == len(joined)
    start = data.draw(st.integers(0, len(joined)))
    stop = data.draw(st.integers(start, len(joined)))
    assert bytes(corpus.read(start, stop).tolist()) == joined[start:stop]


def test_folders_in_the_order_of_names_without_hidden_and_binary_files(tmp_path):
    for name, text in {"b/x.py": b"bx", "a.py": b"a", ".git/c.py": b"no", "d.bmp": b"\0no", "e.txt": b"e"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    assert bytes(open_corpus([str(tmp_path)]).read(0, 7).tolist()) == b"a\0bx\0e\0"
    only = open_corpus([str(tmp_path)], "*.py")
    assert (str(only), only.length) == ("2 files, 5B", 5)
    assert open_corpus([str(tmp_path / "e.txt"), str(tmp_path / "b")]).length == 5


def test_a_fingerprint_is_that_of_the_data_wherever_it_lies(tmp_path):
    prints = []
    for folder, text in (("one", "same"), ("two", "same"), ("three", "SAME"), ("four", "samer")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "f").write_text(text)
        prints.append(open_corpus([str(tmp_path / folder)]).fingerprint)
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_every_python_brings_its_own_sources():
    corpus = standard_library()
    assert corpus.length > 5_000_000
    assert re.fullmatch(r"Python's standard library, \d+ files, [\d.]+MB", str(corpus))
    assert b"import" in bytes(corpus.read(0, 5000).tolist())


@pytest.mark.parametrize("dtype", [np.uint16, np.int64])
def test_token_files(tmp_path, dtype):
    tokens = np.arange(1000, dtype=dtype) % 600
    np.save(tmp_path / "t.npy", tokens)
    tokens.astype(np.uint16).tofile(tmp_path / "t.bin")
    for name in ("t.npy", "t.bin"):
        corpus = open_corpus([str(tmp_path / name)], vocabulary=600)
        assert (corpus.length, corpus.vocabulary, corpus.is_text) == (1000, 600, False)
        assert corpus.read(590, 605).tolist() == tokens[590:605].tolist()


def read_all(paths, vocabulary):
    corpus = open_corpus(paths, vocabulary=vocabulary)
    return corpus.read(0, corpus.length)


def bad(tmp_path, name, make, vocabulary=None, also=()):
    path = tmp_path / name
    make(path)
    with pytest.raises(ConfigError) as error:
        read_all([str(path), *also], vocabulary)
    assert "Traceback" not in str(error.value)
    return str(error.value).replace(str(path), name)


def test_bad_corpora_say_what_is_wrong(tmp_path):
    assert bad(tmp_path, "empty", lambda path: path.mkdir()).startswith("no text in empty")
    assert bad(tmp_path, "zero.txt", lambda path: path.touch()) == "no text in zero.txt"
    assert "there is no file or folder" in bad(tmp_path, "nowhere", lambda path: None)
    tokens = np.array([1, 2, 700], dtype=np.uint16)
    assert "give its vocabulary size, --vocab N" in bad(tmp_path, "a.npy", lambda path: np.save(path, tokens))
    assert "token 700 near position 0 is not below --vocab 600" in bad(tmp_path, "b.bin", tokens.tofile, 600)
    assert "save wider tokens as .npy" in bad(tmp_path, "w.bin", tokens.tofile, 65537)
    assert "expected a 1-D array of integers" in bad(tmp_path, "c.npy", lambda path: np.save(path, np.ones((2, 2))), 9)
    assert "cannot be read as tokens" in bad(tmp_path, "d.npy", lambda path: path.write_text("no"), 9)
    assert "cannot be read as tokens" in bad(tmp_path, "e.npy", lambda path: None, 9)
    assert "give it alone" in bad(tmp_path, "f.npy", lambda path: np.save(path, tokens), 900, also=["x"])
    assert "only .npy and .bin files" in bad(tmp_path, "g.txt", lambda path: path.write_text("hi"), 9)


def test_a_file_that_shrank_is_named(tmp_path):
    path = tmp_path / "text"
    path.write_text("hello")
    corpus = open_corpus([str(path)])
    path.write_text("he")
    with pytest.raises(ConfigError, match="has become shorter than the 5 bytes"):
        corpus.read(0, 5)
