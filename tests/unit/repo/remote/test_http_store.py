"""Listings of web servers in HTML, of several kinds. The oracle is what a browser would follow."""

from __future__ import annotations

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("fsspec")

LISTING = """<html><head><title>Index of /repo/</title><link href="style.css/"></head><body>
<a href="../">Parent</a> <a href="/">Root</a> <a href="/other/">Other</a> <a href="?C=M;O=D">Date</a>
<a href="near/">near/</a> <A class=entry HREF = 'sp%20ace/'>sp ace/</A> <a href="/a%20b/root/">root/</a>
<a href="http://host:81/a%20b/whole/">whole/</a> <a href="http://elsewhere/a%20b/far/">far/</a>
<a href="./here/">here/</a> <a href="a&amp;b/">a&amp;b/</a> <a href="deep/down/">down/</a> <a href="#top">Top</a>
<a href="http://[1/a%20b/bad/">bad/</a>
<a href="readme.txt">readme.txt</a> <a name="x">x</a> http://host:81/a%20b/text/ <a href="mailto:me@host">Owner</a>
<a\nhref="m%C3%B6del/">mödel/</a> <a title="near/" href="near/">again</a></body></html>"""


@pytest.mark.parametrize("charset", [None, "UTF-8", "unheard-of", "idna", "punycode"])
def test_the_links_of_a_listing(charset: str | None) -> None:
    from shmserve.repo.remote.http_store import of_html

    expected = ["a&b/", "here/", "mödel/", "near/", "readme.txt", "root/", "sp ace/", "whole/"]
    assert of_html(LISTING.encode(), charset, "http://host:81/a%20b/") == expected
    assert of_html(b"<p>nothing</p>", charset, "http://host:81/a%20b/") == []
    assert of_html('<a href="mödel/">'.encode("latin-1"), "ISO-8859-1", "http://host/") == ["mödel/"]


def test_where_redirects_may_lead() -> None:
    from yarl import URL

    from shmserve.repo.remote.http_store import redirected
    from shmserve.repo.remote.stores import StoreError

    assert redirected(URL("https://a/x"), "/y") == URL("https://a/y")
    assert redirected(URL("http://a/x"), "https://b/y") == URL("https://b/y")
    assert redirected(URL("http://a/x"), "http://u:p@b:81/y") == URL("http://b:81/y")
    with pytest.raises(StoreError, match=r"from https to http \(http://a\), which is not followed"):
        redirected(URL("https://a/x"), "http://a/x")
    for location in ("file:///etc/passwd", "http://[1/", "ftp://a/x"):
        with pytest.raises(StoreError):
            redirected(URL("http://a/x"), location)
