"""Pins: written once, the same one a second time, never another one over it."""

import pytest

from artifacts.branches import open_store
from artifacts.errors import IntegrityError
from artifacts.pins import Pin, pin_branch, read_pins, remove_pin, write_pin
from artifacts.runs import write_record
from artifacts.store import Store


def test_pin_is_read_as_it_was_written_and_gone_once_removed(store: Store) -> None:
    made = write_pin(store, "b", "../child", "for a look", policies=[7, 3], iterations=[2])
    write_pin(store, "a")
    assert made == Pin("b", "../child", "for a look", (3, 7), (2,))
    assert read_pins(store) == [Pin("a", "user", ""), made]
    remove_pin(store, "b")
    assert read_pins(store) == [Pin("a", "user", "")]


def test_pin_written_twice_is_no_conflict_and_another_of_its_name_is(store: Store) -> None:
    write_pin(store, "a", policies=[3])
    write_pin(store, "a", policies=[3])
    with pytest.raises(ValueError, match="another pin 'a'"):
        write_pin(store, "a", policies=[4])
    assert [pin.policies for pin in read_pins(store)] == [(3,)]


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a b"])
def test_pin_of_a_name_that_is_none_is_refused(store: Store, name: str) -> None:
    with pytest.raises(ValueError, match="names no pin"):
        write_pin(store, name)


def test_pin_that_can_not_be_read_is_named_and_not_passed_over(store: Store) -> None:
    store.put("pins/a.json", b'{"by": "user"}')
    with pytest.raises(IntegrityError, match=r"pins/a\.json"):
        read_pins(store)


def test_pin_of_a_branch_goes_up_the_line_as_far_as_each_run_holds_its_past(tmp_path) -> None:
    write_record(Store(f"{tmp_path}/first"), {})
    parent = {"url": "../first", "iteration": 4}
    write_record(Store(f"{tmp_path}/second"), {"parent": parent})
    second = open_store(f"{tmp_path}/second")
    pin_branch(second, f"{tmp_path}/late", 6)
    pin_branch(second, f"{tmp_path}/early", 3)
    pin_branch(second, "s3://far/away", 5)
    expected = {"second": [3, 6, 5], "first": [3, 4, 4]}
    for run, versions in expected.items():
        pins = read_pins(Store(f"{tmp_path}/{run}"))
        assert [pin.by for pin in pins] == ["s3://far/away", "../early", "../late"]
        assert [pin.policies for pin in pins] == [(versions[2],), (versions[0],), (versions[1],)]
