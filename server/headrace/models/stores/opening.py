"""Opens the store of a URL, and says what to install for it."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec

from headrace.config.documents import refuse
from headrace.core.store_url import StoreUrl
from headrace.models.stores.base import ModelStore

_PACKAGES = {"hf": "huggingface_hub"}


def check_packages(url: StoreUrl) -> None:
    """Check that the package of a store is installed; raises ConfigError with the command that installs it."""
    package = _PACKAGES.get(url.scheme, "obstore")
    if find_spec(package) is None:
        message, cure = (
            f"needs the package {package}, which is not installed",
            "pip install '.[stores]' in a checkout of Headrace",
        )
        raise refuse(str(url), None, message, cure)


def open_store(url: StoreUrl, hosts: Collection[str]) -> ModelStore:
    """Create the store of a URL. Nothing is requested yet, except credentials.

    Args:
        url: of the repository.
        hosts: of object stores and their credentials by the environment, see `settings.store_hosts`.

    Raises:
        StoreError: the provider's settings in the environment are invalid.
    """
    if url.scheme == "hf":
        from headrace.models.stores.hub import HubStore

        return HubStore(url)
    from headrace.models.stores.object_store import ObjectStore

    return ObjectStore(url, hosts)
