"""The server's pages on a server with keys, in a real Chromium: the key form, the key of a tab, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support import models
from tests.support.browser import Browser, Page
from tests.support.keys import Keys
from tests.support.serving import Server, serving
from tests.support.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Keys]]:
    folder = tmp_path_factory.mktemp("keys")
    keys = Keys(folder)
    models.add_model(folder / "repository", "affine", models.affine())
    with serving(folder / "repository", folder, "--api-keys-file", str(keys.path)) as running:
        yield running, keys


def use(page: Page, key: str) -> None:
    page.wait("!document.getElementById('key-form').hidden")
    page.fill("#key", key)
    page.evaluate("document.querySelector('#key-form button[type=submit]').click()")


def reason(page: Page) -> str:
    return page.text("#key-form .error")


def test_the_page_shows_a_key_form_and_the_key_lasts_for_the_tab(case: tuple[Server, Keys], browser: Browser) -> None:
    server, keys = case
    page = browser.open(f"{server.url}/")
    page.wait("!document.getElementById('key-form').hidden")
    assert "this needs a key" in reason(page)
    assert page.evaluate("document.querySelectorAll('#models .card, #idle li').length") == 0
    assert page.statuses("/v2/status") == [401], "it waits for a key instead of asking again"
    use(page, "hr_wrong")
    page.wait("!document.querySelector('#key-form .error').textContent.startsWith('this needs a key')")
    assert page.statuses("/v2/status") == [401, 401]
    use(page, keys.keys["infer"])
    page.wait("document.querySelector('#key-form .error').textContent.includes(\"scope 'read'\")")
    assert page.statuses("/v2/status")[-1] == 403
    use(page, f" {keys.keys['all']} ")
    page.wait("document.querySelectorAll('#models .card, #idle li').length === 1")
    page.wait("document.getElementById('key-form').hidden")
    assert page.evaluate("document.getElementById('key').value") == "", "the key is not left in the form"
    assert page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
    # A try runs with the key; the next page of the tab has it too.
    page.evaluate("location.hash = 'affine/1'")
    page.wait("document.getElementById('try-text').value !== ''")
    page.evaluate("document.getElementById('try-send').click()")
    page.wait("document.getElementById('try-result').innerText.length > 20")
    assert page.statuses("/infer") == [200]
    # What is copied names the key by an environment variable.
    page.evaluate("document.getElementById('try-curl').click()")
    page.wait("document.getElementById('try-code').textContent.includes('Bearer $HEADRACE_KEY')")
    assert keys.keys["all"] not in page.text("#try-code")
    page.evaluate("location.assign('docs')")
    page.wait("document.querySelectorAll('.route').length > 20")
    assert [url for url in page.requested if not url.startswith(server.url)] == []
    page.close()
    # Another tab has no key.
    page = browser.open(f"{server.url}/docs")
    page.wait("!document.getElementById('key-form').hidden")
    page.close()


def test_the_docs_page_sends_requests_with_the_key(case: tuple[Server, Keys], browser: Browser) -> None:
    server, keys = case
    page = browser.open(f"{server.url}/docs")
    use(page, keys.keys["read"])
    page.wait("document.querySelectorAll('.route').length > 20")
    route = "[...document.querySelectorAll('.route')].find((it) => it.innerText.includes({}))"
    for path, status in (("/v2/models/stats", "200"), ("/v2/repository/index", "200"), ("/metrics", "403")):
        this = route.format(json.dumps(f"{path} "))
        page.evaluate(f"{this}.open = true")
        page.wait(f"{this}.querySelector('button')")
        page.evaluate(f"{this}.querySelector('button').click()")
        page.wait(f"{this}.querySelector('.asking pre').textContent.startsWith('{status}')")
    # Links show what the key may read.
    page.evaluate("document.querySelector('a[href=\"openapi.json\"]').click()")
    page.wait("location.protocol === 'blob:' && document.body.innerText.includes('openapi')")
    assert [url for url in page.requested if not url.startswith(server.url)] == []
    page.close()


def test_the_key_form_returns_when_the_key_is_withdrawn(case: tuple[Server, Keys], browser: Browser) -> None:
    server, keys = case
    key = keys.add("guest", scopes=["read"])
    keys.write()
    # The server reads the file each second.
    until(lambda: server.request("GET", "/v2/status", None, keys.bearer("guest"))[0] == 200)
    page = browser.open(f"{server.url}/")
    use(page, key)
    page.wait("document.querySelector('#models .card, #idle li')")
    del keys.clients["guest"]
    keys.write()
    page.wait("!document.getElementById('key-form').hidden")
    assert page.evaluate("document.body.className") == "stale"
    page.close()


def test_answers_are_not_stored(case: tuple[Server, Keys]) -> None:
    server, keys = case
    for path, name, status in (("/v2/status", "all", 200), ("/v2/status", "", 401), ("/v2/status", "infer", 403)):
        found, headers, _ = server.request("GET", path, None, keys.bearer(name))
        assert (found, headers["cache-control"]) == (status, "no-store")
    found, headers, _ = server.request("GET", "/metrics", None, keys.bearer("metrics"))
    assert (found, headers["cache-control"]) == (200, "no-store")
    for path in ("/", "/docs", "/page/page.js"):  # open without a key
        found, headers, _ = server.request("GET", path)
        assert (found, headers["cache-control"]) == (200, "no-cache")
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
