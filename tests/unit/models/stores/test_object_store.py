"""S3, Azure and Google Cloud Storage through obstore: real servers on this machine, faults by a proxy in front of S3.

Azurite and fake-gcs-server are not among the locked packages: their tests skip without the programs.
"""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import json
import os
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from headrace.core.store_url import parse_store_url
from headrace.models.stores.base import StoredObject, StoreError, short_text
from headrace.models.stores.cache import open_mirrors
from headrace.models.stores.mirror import Mirror
from headrace.models.stores.object_store import ObjectStore
from headrace.models.stores.unit_records import RECORD
from headrace.server.settings import store_hosts

from tests.support.serving import HOST, free_port
from tests.support.store_servers import SECRET, FaultyProxy, s3_client, s3_environment, s3_server
from tests.support.waiting import until

pytestmark = pytest.mark.slow

FILES = {
    "net/1/model.onnx": os.urandom(3_000_000),
    "net/1/model.onnx.data": os.urandom(1_000_000),
    "net/config.yaml": b"name: net\n",
}


@pytest.fixture(scope="module")
def s3() -> Iterator[tuple[Any, int]]:
    """A client of an S3 server, and its port."""
    with s3_server() as port:
        yield s3_client(port), port


class Bucket:
    """A bucket behind a proxy.

    Attributes:
        proxy: with the faults.
        url: of the folder with the models.
    """

    def __init__(self, s3: Any, name: str, proxy: FaultyProxy) -> None:
        self._s3, self._name, self.proxy = s3, name, proxy
        self.url = f"s3://{name}/models"

    def put(self, path: str, content: bytes, **options: str) -> None:
        self._s3.put_object(Bucket=self._name, Key=f"models/{path}", Body=content, **options)


@pytest.fixture
def bucket(s3: tuple[Any, int], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Bucket]:
    client, upstream = s3
    name = "bucket-" + hashlib.sha1(request.node.name.encode()).hexdigest()[:12]
    client.create_bucket(Bucket=name)
    proxy = FaultyProxy(upstream)
    with proxy.serve() as port:
        for variable, value in s3_environment(port).items():
            monkeypatch.setenv(variable, value)
        result = Bucket(client, name, proxy)
        for path, content in FILES.items():
            result.put(path, content)
        yield result


@contextmanager
def mirror(url: str, cache: Path) -> Iterator[tuple[Mirror, Path]]:
    parsed = parse_store_url(url)
    with open_mirrors([parsed], str(cache)) as folders:
        (folder,) = folders
        yield Mirror(parsed, folder, 1 << 30, threading.Event(), lambda _url: store(url)), folder


def store(url: str) -> ObjectStore:
    return ObjectStore(parse_store_url(url), store_hosts())


def files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != RECORD]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def synced(url: str, cache: Path) -> dict[str, bytes]:
    with mirror(url, cache) as (ours, folder):
        ours.sync()
        ours.apply()
        return files(folder)


def test_objects_are_listed_with_sizes_and_digests(bucket: Bucket) -> None:
    bucket.put("empty/1/", b"")
    objects = {item.path: item for item in store(bucket.url).list_objects(threading.Event())}
    assert {path: item.size for path, item in objects.items() if path != "empty/1"} == {
        path: len(content) for path, content in FILES.items()
    }
    assert objects["empty/1"].size == 0
    model = objects["net/1/model.onnx"]
    assert model.digest == f"md5:{hashlib.md5(FILES['net/1/model.onnx']).hexdigest()}"
    assert model.is_digest_certain is False


def test_throttled_requests_and_cut_connections_are_repeated(bucket: Bucket, tmp_path: Path) -> None:
    bucket.proxy.slow_downs, bucket.proxy.cuts = 4, 3
    assert synced(bucket.url, tmp_path) == FILES
    assert (bucket.proxy.slow_downs, bucket.proxy.cuts) == (0, 0)


def test_a_download_goes_on_in_the_next_process(bucket: Bucket, tmp_path: Path) -> None:
    content = FILES["net/1/model.onnx"]
    with mirror(bucket.url, tmp_path) as (_, folder):
        partial = folder.parent / "partial"
    item = StoredObject("net/1/model.onnx", len(content), hashlib.md5(content).hexdigest())
    name = hashlib.sha256(f"{item.path}\n{item.size}\n{item.etag}".encode()).hexdigest()[:32]
    (partial / name).write_bytes(content[:2_000_000])
    assert synced(bucket.url, tmp_path) == FILES
    (path,) = [path for path in bucket.proxy.byte_counts if path.endswith("net/1/model.onnx")]
    assert bucket.proxy.byte_counts[path] == 1_000_000


def test_a_damaged_part_is_found_by_the_checksum(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = FILES["net/1/model.onnx"]
    with mirror(bucket.url, tmp_path) as (_, folder):
        partial = folder.parent / "partial"
    etag = hashlib.md5(content).hexdigest()
    name = hashlib.sha256(f"net/1/model.onnx\n{len(content)}\n{etag}".encode()).hexdigest()[:32]
    (partial / name).write_bytes(bytes(2_000_000))
    assert synced(bucket.url, tmp_path) == FILES
    assert "does not match its checksum, it is downloaded again" in caplog.text


def test_a_version_replaced_in_the_middle_of_a_download_is_whole(bucket: Bucket, tmp_path: Path) -> None:
    new = {**FILES, "net/1/model.onnx": os.urandom(3_000_000), "net/1/model.onnx.data": os.urandom(1_000_000)}
    is_replaced = threading.Event()

    def replace(method: str, path: str) -> None:
        if path.endswith("/model.onnx") and "?" not in path and not is_replaced.is_set():
            is_replaced.set()
            for each in ("net/1/model.onnx", "net/1/model.onnx.data"):
                bucket.put(each, new[each])

    bucket.proxy.before = replace
    with mirror(bucket.url, tmp_path) as (ours, folder):
        ours.sync()
        assert files(folder) == {}
        ours.apply()
        assert files(folder) == new
    assert is_replaced.is_set()


def test_etags_that_are_no_digests_are_accepted(bucket: Bucket, tmp_path: Path) -> None:
    parts = [os.urandom(5 << 20), os.urandom(1000)]
    key, s3, name = "models/net/2/model.onnx", bucket._s3, bucket._name
    upload = s3.create_multipart_upload(Bucket=name, Key=key)["UploadId"]
    tags = [
        {
            "PartNumber": number,
            "ETag": s3.upload_part(Bucket=name, Key=key, UploadId=upload, PartNumber=number, Body=part)["ETag"],
        }
        for number, part in enumerate(parts, 1)
    ]
    s3.complete_multipart_upload(Bucket=name, Key=key, UploadId=upload, MultipartUpload={"Parts": tags})
    assert synced(bucket.url, tmp_path)["net/2/model.onnx"] == b"".join(parts)


def test_credentials_of_a_profile_are_those_of_boto3(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    credentials = tmp_path / "credentials"
    credentials.write_text(f"[models]\naws_access_key_id = AKIAOFAPROFILE\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_PROFILE", "models")
    headers: list[str] = []
    answer = bucket.proxy.answer
    monkeypatch.setattr(
        bucket.proxy,
        "answer",
        lambda handler: (headers.append(handler.headers.get("Authorization", "")), answer(handler)),
    )
    assert synced(bucket.url, tmp_path / "cache") == FILES
    assert all("Credential=AKIAOFAPROFILE/" in header for header in headers)


@pytest.mark.parametrize("status", [401, 403])
def test_refused_access_names_the_credentials(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    body = b"<Error><Code>AccessDenied</Code></Error>"
    monkeypatch.setattr(bucket.proxy, "answer", lambda handler: handler.send(status, body))
    with pytest.raises(StoreError, match=r"refuses access.*AWS_ACCESS_KEY_ID") as refused:
        store(bucket.url).list_objects(threading.Event())
    assert SECRET not in str(refused.value)


def test_texts_of_errors_have_no_signatures() -> None:
    error = RuntimeError(
        "Generic error: GET https://account.blob.core.windows.net/c?sv=1&sig=abc%3D failed: <Error>x</Error>\nmore: sig=abc"
    )
    assert short_text(error) == "Generic error: GET https://account.blob.core.windows.net/c failed"


def test_azure_blob_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not installed: npm install --global azurite")
    import obstore
    from obstore.store import AzureStore

    port = free_port()
    words = [program, "--blobPort", str(port), "--location", str(tmp_path / "azurite"), "--silent"]
    with process([*words, "--skipApiVersionCheck", "--disableTelemetry"], port):
        monkeypatch.setenv("NO_PROXY", HOST)
        monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
        monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", f"http://{HOST}:{port}")
        create_container(port, "models")
        azure = AzureStore("models", account_name="devstoreaccount1", client_options={"allow_http": True})
        for path, content in FILES.items():
            obstore.put(azure, f"folder/{path}", content)
        assert synced("az://devstoreaccount1/models/folder", tmp_path / "cache") == FILES
        obstore.put(azure, "folder/net/config.yaml", b"name: net\nmax_batch_size: 2\n")
        changed = {**FILES, "net/config.yaml": b"name: net\nmax_batch_size: 2\n"}
        assert synced("az://devstoreaccount1/models/folder", tmp_path / "cache") == changed
        with pytest.raises(StoreError, match="does not exist"):
            synced("az://devstoreaccount1/missing/folder", tmp_path / "cache")


def create_container(port: int, name: str) -> None:
    """Create a container with the key that every Azurite has."""
    account = "devstoreaccount1"
    key = base64.b64decode("Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==")
    date = email.utils.formatdate(usegmt=True)
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    text = "PUT" + "\n" * 12 + "".join(f"{field}:{value}\n" for field, value in headers.items())
    text += f"/{account}/{account}/{name}\nrestype:container"
    signature = base64.b64encode(hmac.new(key, text.encode(), hashlib.sha256).digest()).decode()
    request(f"http://{HOST}:{port}/{account}/{name}?restype=container", "PUT", None, {
        **headers, "Authorization": f"SharedKey {account}:{signature}"
    })  # fmt: skip


def test_google_cloud_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = shutil.which("fake-gcs-server")
    if program is None:
        pytest.skip("fake-gcs-server is not installed: go install github.com/fsouza/fake-gcs-server@latest")
    port = free_port()
    url = f"http://{HOST}:{port}"
    words = [program, "-scheme", "http", "-backend", "memory", "-host", HOST, "-port", str(port)]
    with process([*words, "-public-host", f"{HOST}:{port}"], port):
        account = {
            "gcs_base_url": url,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        monkeypatch.setenv("NO_PROXY", HOST)
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
        request(f"{url}/storage/v1/b", "POST", b'{"name": "models"}', {"Content-Type": "application/json"})
        upload = f"{url}/upload/storage/v1/b/models/o?uploadType=media&name=folder/"
        for path, content in FILES.items():
            request(upload + path, "POST", content, {})
        assert synced("gs://models/folder", tmp_path / "cache") == FILES
        request(upload + "net/config.yaml", "POST", b"name: net\nmax_batch_size: 2\n", {})
        changed = {**FILES, "net/config.yaml": b"name: net\nmax_batch_size: 2\n"}
        assert synced("gs://models/folder", tmp_path / "cache") == changed


@contextmanager
def process(words: list[str], port: int) -> Iterator[None]:
    """Run a server until the context ends."""
    running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=sys.stderr)
    try:
        until(lambda: is_open(port))
        yield
    finally:
        running.kill()
        running.wait()


def is_open(port: int) -> bool:
    try:
        request(f"http://{HOST}:{port}/", "GET", None, {})
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def request(url: str, method: str, content: bytes | None, headers: dict[str, str]) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, content, headers, method=method), timeout=30) as response:
        response.read()
