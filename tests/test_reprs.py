"""Texts of arguments: short, without secrets, and never an error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from prefect.blocks.system import Secret
from pydantic import BaseModel, SecretStr

from prefect_torch_elastic.dispatch.reprs import MAX_CHARACTERS, short_reprs


def text(value: Any, name: str = "x") -> Any:
    return short_reprs({name: value})[name]


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Shapeless:
    @property
    def shape(self) -> Any:
        raise ValueError("not loaded yet")


@dataclass
class Settings:
    lr: float
    password: str = "hunter2"
    hidden: str = field(default="hidden", repr=False)


@dataclass
class Handmade:
    lr: float

    def __repr__(self) -> str:
        return "as I say"


class Model(BaseModel):
    weights: Any
    key: SecretStr


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (2**60, str(2**60)),
        (0.5, 0.5),
        (float("nan"), "nan"),
        (True, True),
        (None, None),
        ("text", "text"),
        ("it's", "it's"),
        (object(), "<object object>"),
        ([1, "a"], "[1, 'a']"),
        ((1,), "(1,)"),
        ({"a": [1]}, "{'a': [1]}"),
        (list(range(1000)), "[0, 1, 2, 3, 4, 5, 6, 7, ... 1000 in all]"),
        (b"ab", "b'ab'"),
        (bytes(1 << 20), "bytes[1048576]"),
        (torch.zeros(3, 4), "Tensor[3, 4] float32"),
        (torch.tensor(1.0), "Tensor[] float32"),
        ([torch.zeros(2)], "[Tensor[2] float32]"),
        (np.zeros((2, 2), dtype="int64"), "ndarray[2, 2] int64"),
        (Settings(0.1), "Settings(lr=0.1, password='********')"),
        (Handmade(0.1), "as I say"),
        (
            Model(weights=torch.zeros(9), key=SecretStr("k")),
            "Model(weights=Tensor[9] float32, key=SecretStr('**********'))",
        ),
        (Broken(), "<Broken>"),
        ([Broken()], "[<Broken>]"),
        (Shapeless(), "<Shapeless>"),
        (int, "<class 'int'>"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_argument_is_shown_as(value, expected):
    assert text(value) == expected


def test_text_is_cut():
    assert len(text("x" * 10_000)) == MAX_CHARACTERS
    assert text("x" * 10_000).endswith("...")


def test_deep_and_endless_values_end():
    endless: list[Any] = []
    endless.append(endless)
    assert text(endless) == "[[[[...]]]]"


def test_text_is_one_line_that_databases_take():
    class Odd:
        def __repr__(self) -> str:
            return "a\n  b\x00c\ud800"

    assert text(Odd()) == "a b c "
    assert text("a  b\n") == r"'a  b\n'"


@pytest.mark.parametrize(
    "value",
    [
        SecretStr("hunter2"),
        Secret(value=SecretStr("hunter2")),
        {"nested": [SecretStr("hunter2")]},
        {"api_key": "hunter2"},
        "postgresql://me:hunter2@host/db",
        "https://account.blob.core.windows.net/c?sig=hunter2",
    ],
    ids=["secret", "block", "nested", "by key", "password in a URL", "token in a URL"],
)
def test_secret_is_not_shown(value):
    assert "hunter2" not in text(value)


@pytest.mark.parametrize("name", ["password", "db_password", "api_key", "hf_token", "AWS_SECRET_ACCESS_KEY"])
def test_secret_is_known_by_its_name(name):
    assert text("hunter2", name) == "********"


@pytest.mark.parametrize("name", ["tokens", "key", "tokenizer", "secretary"])
def test_name_that_only_looks_like_a_secret_is_shown(name):
    assert text("corpus", name) == "corpus"


def test_function_and_module_take_one_line():
    assert "\n" not in text(torch.nn.Linear(2, 2))
    assert text(len) == "<built-in function len>"
