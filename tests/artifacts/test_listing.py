"""What lies in a run's folder, on every backend; and uploads that never ended, on a real server."""

import pytest

from artifacts.listing import abort, uploads, walk
from artifacts.store import Store
from s3_server import BUCKET

PART = 5 << 20  # the least that S3 takes for a part that is not the last


def begin_upload(path: str, parts: int) -> str:
    """Write ``parts`` parts of an object and stop there, as a killed writer does."""
    fs = Store(f"s3://{BUCKET}/any").fs
    where = {"Bucket": BUCKET, "Key": path}
    upload = fs.call_s3("create_multipart_upload", **where)["UploadId"]
    for number in range(1, parts + 1):
        fs.call_s3("upload_part", **where, UploadId=upload, PartNumber=number, Body=bytes(PART))
    return str(upload)


def test_walk_gives_the_bytes_of_every_file_of_this_run_alone(store: Store) -> None:
    for path, size in {"run.json": 3, "a/b/c": 0, "a/b/d": 70_000, "a/.tmp-1": 5}.items():
        store.put(path, bytes(size))
    beside = Store(f"{store.url}-2")
    beside.put("a/b/e", b"1")
    assert walk(store) == {"run.json": 3, "a/b/c": 0, "a/b/d": 70_000, "a/.tmp-1": 5}
    assert walk(beside) == {"a/b/e": 1}


def test_walk_of_a_run_that_is_not_there_is_empty(store: Store) -> None:
    assert walk(store) == {}


@pytest.mark.parametrize("backend", ["file", "memory"])
def test_uploads_where_there_is_no_such_thing_are_none(tmp_path, backend) -> None:
    assert list(uploads(Store(f"{backend}://{tmp_path}/run"))) == []


def test_uploads_are_those_under_the_runs_own_folder_and_abort_ends_them_alone(s3_server, request):
    top = request.node.name
    ids = {
        path: begin_upload(f"{top}/{path}", parts)
        for path, parts in {"run/a/x": 2, "run/a/y": 0, "run-2/a/x": 1, "ru/n": 1}.items()
    }
    run, other, short = (Store(f"s3://{BUCKET}/{top}/{name}") for name in ("run", "run-2", "ru"))
    found = {upload.path: upload for upload in uploads(run)}
    assert {path: upload.bytes for path, upload in found.items()} == {"a/x": 2 * PART, "a/y": 0}
    assert found["a/x"].upload_id == ids["run/a/x"]
    for upload in [*found.values(), found["a/x"]]:  # twice is no error
        abort(run, upload)
    assert list(uploads(run)) == []
    assert [upload.upload_id for upload in uploads(other)] == [ids["run-2/a/x"]]
    assert [upload.upload_id for upload in uploads(short)] == [ids["ru/n"]]
