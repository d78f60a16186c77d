"""URLs of repositories: which are accepted, and the errors of mistaken ones."""

from __future__ import annotations

import pytest
from headrace.core.store_url import StoreUrl, is_store_url, parse_store_url


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://bucket", StoreUrl("s3", "bucket")),
        ("s3://bucket/a/b/", StoreUrl("s3", "bucket", "a/b")),
        ("S3://Bucket.x_y/a", StoreUrl("s3", "Bucket.x_y", "a")),
        ("gs://bucket/models", StoreUrl("gs", "bucket", "models")),
        ("gcs://bucket", StoreUrl("gs", "bucket")),
        ("az://account1/container/models", StoreUrl("az", "container", "models", "account1")),
        ("as://account1/container", StoreUrl("az", "container", "", "account1")),
        ("hf://org/net", StoreUrl("hf", "org/net", "", "", "main")),
        ("hf://org/net/folder/below", StoreUrl("hf", "org/net", "folder/below", "", "main")),
        ("hf://org/net@v1.0", StoreUrl("hf", "org/net", "", "", "v1.0")),
        ("hf://org/net@refs/pr/3/folder", StoreUrl("hf", "org/net", "folder", "", "refs/pr/3")),
    ],
)
def test_urls(text: str, url: StoreUrl) -> None:
    assert is_store_url(text)
    assert parse_store_url(text) == url
    assert parse_store_url(str(url)) == url


@pytest.mark.parametrize("text", ["models", "/models", "./s3", "a:b", "C:models", "s3", "models/s3:x"])
def test_paths_are_no_urls(text: str) -> None:
    assert not is_store_url(text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("s3:/bucket/models", "two slashes"),
        ("s3:bucket/models", "two slashes"),
        ("http://host/models", "'http://' is not a store: write a path, or one of s3://"),
        ("s3://", "s3://BUCKET/FOLDER"),
        ("s3://bucket//models", "an empty part"),
        ("s3://bucket/../other", "'..'"),
        ("s3://b/models", "'b' in 's3://b/models' is not a bucket"),
        ("s3://https://host:9000/bucket", "an empty part"),
        ("s3://host:9000/bucket", "AWS_ENDPOINT_URL"),
        ("az://account1", "storage account and a container"),
        ("az://Account!/container", "storage account and a container"),
        ("hf://net", "hf://ORGANISATION/NAME"),
        ("hf://org/net@", "no revision"),
        ("hf://org/net/folder@v1", "no revision"),
        ("hf://org/.net", "hf://ORGANISATION/NAME"),
        ("s3://bucket/a\nb", "escaped character"),
    ],
)
def test_mangled_urls_are_named(text: str, part: str) -> None:
    assert is_store_url(text)
    with pytest.raises(ValueError, match=r".") as refused:
        parse_store_url(text)
    assert part in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIA:the-secret@bucket/models",
        "az://account/container/x?sig=the-secret",
        "gs://bucket/models#the-secret",
        "hf://user:the-secret@org/net",
    ],
)
def test_credentials_in_a_url_are_refused_without_their_text(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        parse_store_url(text)
    assert "the-secret" not in str(refused.value)
