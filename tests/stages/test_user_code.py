"""A user's function by import path: its digest is known before any line of its file has run."""

import pytest

from artifacts.keys import source_digest
from stages.contract import StageError
from stages.update.trainer_spec import UpdateOrder, check_functions
from stages.user_code import digest_before_import, load_function

SOURCE = "SCALE = 2.0\n\n\ndef mine(batch):\n    return SCALE\n"


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_digest_before_import_of_a_plain_function_is_its_source_digest(tmp_path, kind):
    path = tmp_path / "adv.py"
    path.write_text(SOURCE.replace("def", kind))
    found = digest_before_import(f"{path}:mine")
    assert found == source_digest(load_function(f"{path}:mine", "advantage"))


@pytest.mark.parametrize(
    "source",
    [
        "from json import dumps as mine\n",
        "mine = lambda batch: 1\n",
        "import functools\n\n@functools.cache\ndef mine(batch): ...\n",
        "if True:\n    def mine(batch): ...\n",
        "def mine(batch): ...\ndef mine(batch): ...\n",
        "def mine(:\n",
    ],
)
def test_digest_before_import_where_only_an_import_can_tell_is_none(tmp_path, source):
    path = tmp_path / "adv.py"
    path.write_text(source)
    assert digest_before_import(f"{path}:mine") is None


def test_update_order_that_names_another_file_than_it_was_made_with_never_runs_it(tmp_path):
    ran, path = tmp_path / "ran", tmp_path / "other.py"
    path.write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n{SOURCE}")
    paths = {"advantage": f"{path}:mine"}
    order = UpdateOrder({}, {}, functions={"advantage": "0" * 64}, paths=paths)
    with pytest.raises(StageError, match=r"update\.advantage .* has another source now"):
        check_functions(order)
    assert not ran.exists()
    right = digest_before_import(paths["advantage"])
    check_functions(UpdateOrder({}, {}, functions={"advantage": right}, paths=paths))
    assert ran.exists()
