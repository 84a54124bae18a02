from __future__ import annotations

import pickle

import pytest

from eyas import errors


def subclasses(cls: type) -> list[type]:
    return [cls, *(sub for child in cls.__subclasses__() for sub in subclasses(child))]


def test_every_error_survives_a_process_boundary() -> None:
    """Worker processes send their errors to the parent."""
    for cls in subclasses(errors.EyasError):
        error = cls("what", "where", "next")
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is cls
        assert (copy.what, copy.where, copy.hint) == ("what", "where", "next")


def test_exit_codes_are_distinct_and_as_documented() -> None:
    codes = {cls.__name__: cls.exit_code for cls in errors.EyasError.__subclasses__()}
    expected = {"ConfigError": 2, "EngineError": 3, "IntegrityError": 4, "StoreError": 5, "RowsFailed": 6}
    assert codes == expected | {"TrainError": 7, "Interrupted": 130}


@pytest.mark.parametrize(
    ("args", "text"), [(("a",), "a"), (("a", "b"), "a: b"), (("a", "b", "c"), "a: b (c)"), (("a", "", "c"), "a (c)")]
)
def test_one_line_says_what_where_and_what_to_do(args: tuple[str, ...], text: str) -> None:
    assert str(errors.EyasError(*args)) == text


def test_the_cause_is_found_however_deep_it_lies_and_rings_end() -> None:
    root = KeyError("root")
    wrapped = OSError("outer")
    wrapped.__cause__ = ValueError("between")
    wrapped.__cause__.__context__ = root
    assert errors.cause_of(wrapped, KeyError) is root
    assert errors.cause_of(root, KeyError) is root
    assert errors.cause_of(wrapped, TypeError) is None
    assert errors.cause_of(None, KeyError) is None
    root.__context__ = wrapped
    assert errors.cause_of(wrapped, TypeError) is None


@pytest.mark.parametrize(
    ("said", "line"), [("one\ntwo", "one"), ("\n\n one \n", "one"), ("", "ValueError"), (" \n", "ValueError")]
)
def test_a_foreign_error_is_told_in_one_line(said: str, line: str) -> None:
    assert errors.first_line(ValueError(said)) == line
