"""File names of cells: no other account can find one, and make a file of this name."""

import os

import pytest

from allranks.records import code_names


@pytest.fixture
def own_folder(monkeypatch):
    monkeypatch.setattr(code_names, "_name", code_names._name)
    yield
    code_names._folder.cache_clear()


def test_the_ranks_of_a_cluster_alone_have_the_same_names(own_folder):
    names = []
    for secret in ("one", "one", "two"):
        code_names.name_folder(secret)
        names.append(code_names.code_name("pass"))
    assert names[0] == names[1] != names[2]
    assert os.path.basename(names[0]) == os.path.basename(names[2])
    assert os.path.basename(os.path.dirname(names[2])).startswith("ipykernel_")
    assert code_names.is_cell(names[2])
    assert not code_names.is_cell(names[0])
    assert code_names.with_numbers(f'File "{names[0]}"', {names[2]: "In[3]"}) == 'File "In[3]"'


def test_long_words_beside_a_file_name_take_no_long_time():
    """The search was quadratic: this took an hour."""
    file, word = code_names.code_name("pass"), "x" * 1_000_000
    text = f'KeyError: {word}\n  File "%s", line 1 {word}'
    assert code_names.with_numbers(text % file, {file: "In[3]"}) == text % "In[3]"
